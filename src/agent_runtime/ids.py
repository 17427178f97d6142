"""The ids of a run's parts, and the one function that builds an idempotency key."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NewType

from agent_runtime.errors import InvalidRunId, InvalidSetting

RunId = NewType("RunId", str)
Step = NewType("Step", int)
Epoch = NewType("Epoch", int)
CallId = NewType("CallId", str)

MAX_RUN_ID = 512
MAX_KEY = 255

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.~@+=,")
_DIGEST = 64


def check_run_id(value: object) -> RunId:
    """The id of a run, or `InvalidRunId`: 1 to 512 printable characters that UTF-8 can hold."""
    if not isinstance(value, str):
        raise InvalidRunId(f"a run id must be text, found {type(value).__name__}; pass run_id='…'")
    if not 1 <= len(value) <= MAX_RUN_ID:
        raise InvalidRunId(f"a run id has 1 to {MAX_RUN_ID} characters, found {len(value)}; choose another id")
    if not value.isprintable():
        raise InvalidRunId(f"a run id holds printable characters only, found {value!r}; remove control characters")
    return RunId(value)


def check_label(option: str, value: object) -> str:
    """The name of a tenant or a namespace, or `InvalidSetting`: none, or 1 to 512 printable characters."""
    if not isinstance(value, str) or len(value) > MAX_RUN_ID or not value.isprintable():
        found = f"{len(value)} characters" if isinstance(value, str) and len(value) > MAX_RUN_ID else f"{value!r:.100}"
        raise InvalidSetting(f"{option}= is text of at most {MAX_RUN_ID} printable characters, or empty; found {found}")
    return value


@lru_cache(maxsize=1024)
def reply_call(seq: int) -> CallId:
    """The place of the model call that makes decision `seq` of a loop."""
    return CallId(f"{seq}/model")


def is_reply(call: str) -> bool:
    """Whether a place of a loop is that of a model call."""
    return call.endswith("/model")


@lru_cache(maxsize=1024)
def tool_call(seq: int, index: int, of: int) -> CallId:
    """The place of the tool call `index` out of `of` in decision `seq` of a loop."""
    return CallId(f"{seq}" if of == 1 else f"{seq}.{index}")


def seq_of(call: str) -> int:
    """The decision that a call of a loop belongs to."""
    return int(call.split("/", 1)[0].split(".", 1)[0])


def key_prefix(run_id: str, namespace: str = "") -> str:
    """What all keys of one run begin with; injective over (namespace, run id)."""
    start = f"{_escape(namespace)}/" if namespace else ""
    return f"{start}{_escape(run_id)}:"


def build_key(prefix: str, call: str) -> str:
    """The idempotency key of a call: the same on every worker, for ever; at most 255 ASCII characters.

    A longer one is cut and ends in its SHA-256. `#` stands in no uncut key, so the two cannot collide.
    """
    key = prefix + call
    if len(key) <= MAX_KEY:
        return key
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f"{key[: MAX_KEY - _DIGEST - 1]}#{digest}"


def digest_id(text: str) -> str:
    """A run id of a fixed length that stands for a longer one."""
    return f"#{hashlib.sha256(text.encode()).hexdigest()}"


def _escape(text: str) -> str:
    if _PLAIN.issuperset(text):
        return text
    return "".join(c if c in _PLAIN else "".join(f"%{byte:02X}" for byte in c.encode()) for c in text)
