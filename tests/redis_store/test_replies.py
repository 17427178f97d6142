"""What each reply of a server means for a write, and that what is no reply means nothing."""

from __future__ import annotations

from typing import Any

import pytest
from redis import exceptions
from redis.asyncio.connection import Connection

from agent_runtime.errors import CheckpointStoreCorrupt, ForeignStore, StoreRefused, StoreUnavailable
from agent_runtime.stores.redis_errors import FATES, Fate, code_of, fate_of, translate


def parsed(reply: str) -> Exception:
    """The error that the driver makes of a reply."""
    parser: Any = Connection()._parser
    error = parser.parse_error(reply)
    assert isinstance(error, Exception)
    return error


REPLIES = {
    "OOM command not allowed when used memory > 'maxmemory'. script: 3f2a, on @user_script:12.": Fate.UNDONE,
    "MISCONF Errors writing to the AOF file: No space left on device": Fate.UNDONE,
    "NOREPLICAS Not enough good replicas to write.": Fate.UNDONE,
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.": Fate.UNDONE,
    "ERR max number of clients reached": Fate.UNDONE,
    "READONLY You can't write against a read only replica. script: 3f2a, on @user_script:12.": Fate.ELSEWHERE,
    "LOADING Redis is loading the dataset in memory": Fate.ELSEWHERE,
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.": Fate.ELSEWHERE,
    "CLUSTERDOWN The cluster is down": Fate.ELSEWHERE,
    "MOVED 3999 127.0.0.1:6381": Fate.ELSEWHERE,
    "ASK 3999 127.0.0.1:6381": Fate.ELSEWHERE,
    "TRYAGAIN Multiple keys request during rehashing of slot": Fate.ELSEWHERE,
    "NOSCRIPT No matching script. Please use EVAL.": Fate.UNLOADED,
    "NOAUTH Authentication required.": Fate.ELSEWHERE,
    "WRONGPASS invalid username-password pair or user is disabled.": Fate.REFUSED,
    "NOPERM this user has no permissions to run the 'evalsha' command": Fate.REFUSED,
    "WRONGTYPE Operation against a key holding the wrong kind of value script: 3f2a": Fate.REFUSED,
    "CROSSSLOT Keys in request don't hash to the same slot": Fate.REFUSED,
    "HALFRUN agent_runtime:{07}:row:run-1": Fate.REFUSED,
    # As Redis 6 says it.
    "ERR Error running script (call to f_3f2a): @user_script:9: @user_script: 9: -OOM command not allowed": Fate.UNDONE,
    "ERR Error running script (call to f_3f2a): @user_script:9: @user_script: 9: -READONLY You can't write": Fate.ELSEWHERE,
    "ERR Error running script (call to f_3f2a): @user_script:9: WRONGTYPE Operation against a key": Fate.REFUSED,
    # What may come after a write.
    "ERR user_script:40: attempt to compare nil with number script: 3f2a, on @user_script:40.": Fate.UNKNOWN,
    "ERR something that nobody has heard of": Fate.UNKNOWN,
    "UNKILLABLE The busy script was already performing writes": Fate.UNKNOWN,
}


@pytest.mark.parametrize("reply", REPLIES)
def test_each_reply_has_its_fate(reply: str) -> None:
    assert fate_of(parsed(reply)) is REPLIES[reply]


def test_every_code_of_the_table_is_met_here() -> None:
    assert {code_of(parsed(reply)) for reply in REPLIES} - {""} == set(FATES)


@pytest.mark.parametrize(
    "error",
    [
        exceptions.ConnectionError("Connection closed by server."),
        exceptions.TimeoutError("Timeout reading from READONLY"),
        exceptions.InvalidResponse("Protocol Error: OOM"),
        ConnectionResetError("reset"),
        TimeoutError(),
    ],
)
def test_what_is_no_reply_leaves_everything_open_whatever_it_says(error: Exception) -> None:
    assert fate_of(error) is Fate.UNKNOWN


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        ("OOM command not allowed", StoreUnavailable, "raise maxmemory"),
        ("READONLY You can't write", StoreUnavailable, "nothing was written"),
        ("NOPERM this user", StoreRefused, "let this user run scripts"),
        ("WRONGTYPE Operation", ForeignStore, "something else under a key of ours"),
        ("HALFRUN x:row:1", CheckpointStoreCorrupt, "a part of a run"),
        ("MISCONF Errors", StoreUnavailable, "cannot write its disk"),
    ],
)
def test_an_error_names_the_server_and_what_to_do(reply: str, kind: type[Exception], says: str) -> None:
    error = translate(parsed(reply), "redis://host:6379/0")
    assert type(error) is kind
    assert "redis://host:6379/0" in str(error)
    assert says in str(error)
