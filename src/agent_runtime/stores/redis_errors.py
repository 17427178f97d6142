"""What the errors of Redis mean: whether a write landed, by the code of the reply, and which error of ours says so.

A script that has written once is not stopped any more by a lack of memory or by a change of roles: the server refuses its
first write, or none. What such a reply says is therefore definite. What is no reply at all is not.
"""

from __future__ import annotations

import re
from enum import Enum

from agent_runtime.errors import (
    AgentRuntimeError,
    CheckpointStoreCorrupt,
    ForeignStore,
    ReadOnlyStore,
    StoreRefused,
    StoreUnavailable,
)


class Fate(Enum):
    """What is known of a command that ended in an error."""

    UNDONE = "nothing of it was written; the same again may succeed"
    REFUSED = "nothing of it was written, nor will be until somebody acts"
    ELSEWHERE = "nothing of it was written: another server, or another connection, is the one to ask"
    UNLOADED = "nothing of it was written: the server does not know the script"
    UNKNOWN = "nobody knows what of it was written"


# By the code that a reply begins with. What is not here is unknown.
FATES = {
    "ASK": Fate.ELSEWHERE,
    "BUSY": Fate.UNDONE,  # another script has been running for too long
    "CLUSTERDOWN": Fate.ELSEWHERE,
    "CROSSSLOT": Fate.REFUSED,
    "HALFRUN": Fate.REFUSED,
    "LOADING": Fate.ELSEWHERE,
    "MASTERDOWN": Fate.ELSEWHERE,
    "MAXCLIENTS": Fate.UNDONE,
    "MISCONF": Fate.UNDONE,  # the last snapshot or the append-only file could not be written
    "MOVED": Fate.ELSEWHERE,
    "NOAUTH": Fate.ELSEWHERE,  # what this connection showed holds no longer
    "NOPERM": Fate.REFUSED,
    "NOREPLICAS": Fate.UNDONE,
    "NOSCRIPT": Fate.UNLOADED,
    "OOM": Fate.UNDONE,
    "READONLY": Fate.ELSEWHERE,  # a replica by now
    "TRYAGAIN": Fate.ELSEWHERE,
    "WRONGPASS": Fate.REFUSED,
    "WRONGTYPE": Fate.REFUSED,
}

ADVICE = {
    "CROSSSLOT": "this server wants all keys in one slot; name a server, or a cluster, of Redis or Valkey",
    "MISCONF": "the server cannot write its disk; its log says why",
    "NOAUTH": "put user and password into the URL",
    "NOPERM": "let this user run scripts on the keys of the store (docs/reference/redis.md lists the commands)",
    "OOM": "raise maxmemory, or delete what is finished",
    "WRONGPASS": "correct user and password in the URL",
}

# How redis-py calls the codes that it takes off the text.
_CODES = {
    "AskError": "ASK",
    "AuthenticationError": "WRONGPASS",
    "AuthenticationWrongNumberOfArgsError": "WRONGPASS",
    "BusyLoadingError": "LOADING",
    "ClusterCrossSlotError": "CROSSSLOT",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "MovedError": "MOVED",
    "NoPermissionError": "NOPERM",
    "NoScriptError": "NOSCRIPT",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "SlotNotCoveredError": "CLUSTERDOWN",
    "TryAgainError": "TRYAGAIN",
}
# Redis 6 quotes the error of a command in the text of the script's.
_QUOTED = re.compile(rf"(?:^|[\s-])({'|'.join(FATES)})(?=\s|$)")


def code_of(error: BaseException) -> str:
    """The code that the server's reply began with; empty where the error is the driver's or the system's."""
    named = _CODES.get(type(error).__name__)
    if named == "WRONGPASS" and "required" in str(error):
        return "NOAUTH"
    if named is not None:
        return named
    if "max number of clients reached" in str(error):
        return "MAXCLIENTS"
    if not any(base.__name__ == "ResponseError" for base in type(error).__mro__):
        return ""
    found = _QUOTED.search(str(error))
    return found[1] if found else ""


def fate_of(error: BaseException) -> Fate:
    """What is known of the command that this error ended."""
    return FATES.get(code_of(error), Fate.UNKNOWN)


def translate(error: BaseException, place: str) -> AgentRuntimeError:
    """The error of ours for one after which nothing is written; `place` names the server, without a password."""
    code, said = code_of(error), first_line(error)
    advice = ADVICE.get(code, "")
    match code:
        case "READONLY":
            return StoreUnavailable(f"{place} is a replica by now ({said}); nothing was written: the next try looks again")
        case "WRONGTYPE":
            return ForeignStore(f"{place} holds something else under a key of ours ({said}); name another database or prefix=")
        case "HALFRUN":
            return CheckpointStoreCorrupt(
                f"{place} holds a part of a run whose row is gone ({said}): somebody removed keys, or the server evicted "
                "them; restore the run from a backup, or remove its other keys"
            )
        case _ if fate_of(error) is Fate.REFUSED:
            return StoreRefused(f"{place} refuses: {said} ({code}); {advice}")
        case _:
            named = f" ({code})" if code else ""
            more = f"; {advice}" if advice else ""
            return StoreUnavailable(f"{place} did not do it: {said}{named}; nothing was written{more}")


def refused_as_replica(place: str) -> ReadOnlyStore:
    """The error for a server that is no primary when the store is opened."""
    return ReadOnlyStore(f"{place} is a replica, and a store is written; name the primary, or ask Sentinel for it")


def first_line(error: BaseException) -> str:
    """What the error says, as far as one line goes."""
    return (str(error) or type(error).__name__).splitlines()[0]
