"""What the environment sets, read once, each with its default."""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from agent_runtime.errors import InvalidSetting

DATABASE_URL = "sqlite:///agent_runtime.db"
GOAL = "stand up a web service"
PLANNER = "mock"
MAX_VALUE_BYTES = 16 * 1024 * 1024
T = TypeVar("T", float, None)


class Settings(NamedTuple):
    """The settings of a worker. None where the environment says nothing and the default is made when it is needed."""

    database_url: str = DATABASE_URL
    run_id: str | None = None
    goal: str | None = None
    planner: str = PLANNER
    mock_cloud_url: str | None = None
    mock_llm_url: str | None = None
    checkpoint_key: str | None = None
    lease_seconds: float = 12.0
    poll_seconds: float = 3.0
    heartbeat_seconds: float = 3.0
    max_attempts: int = 5
    stuck_after: float | None = None
    metrics_port: int | None = None
    max_value_bytes: int = MAX_VALUE_BYTES
    view_token: str | None = None


def read_settings(environ: Mapping[str, str]) -> Settings:
    """The settings that an environment holds; `InvalidSetting` names the one that cannot be.

    Empty counts as unset, but for RUN_ID: whoever names a run and has lost its name is not to start another one.
    """
    lease_seconds, heartbeat_seconds = _seconds(environ, "LEASE", 12.0), _seconds(environ, "HEARTBEAT", 3.0)
    if heartbeat_seconds > lease_seconds / 2:
        raise InvalidSetting(
            f"HEARTBEAT is at most half of LEASE; found {heartbeat_seconds} s and {lease_seconds} s; lower the one or raise "
            "the other"
        )
    return Settings(
        database_url=environ.get("DATABASE_URL") or DATABASE_URL,
        run_id=environ.get("RUN_ID"),
        goal=environ.get("GOAL") or None,
        planner=environ.get("PLANNER") or PLANNER,
        mock_cloud_url=environ.get("MOCK_CLOUD_URL") or None,
        mock_llm_url=environ.get("MOCK_LLM_URL") or None,
        checkpoint_key=environ.get("CHECKPOINT_KEY") or None,
        lease_seconds=lease_seconds,
        poll_seconds=_seconds(environ, "POLL", 3.0),
        heartbeat_seconds=heartbeat_seconds,
        max_attempts=_count(environ, "MAX_ATTEMPTS", 5),
        stuck_after=_seconds(environ, "STUCK_AFTER", None),
        metrics_port=_port(environ, "METRICS_PORT"),
        max_value_bytes=_count(environ, "MAX_VALUE_BYTES", MAX_VALUE_BYTES),
        view_token=environ.get("VIEW_TOKEN") or None,
    )


def _seconds(environ: Mapping[str, str], name: str, default: T) -> float | T:
    text = environ.get(name) or ""
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise InvalidSetting(f"{name} is a number of seconds above 0; found {text!r}")
    return value


def _port(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name) or ""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise InvalidSetting(f"{name} is the number of a port, 1 to 65535; found {text!r}")
    return int(text)


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or ""
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise InvalidSetting(f"{name} is a whole number from 1; found {text!r}")
    return int(text)
