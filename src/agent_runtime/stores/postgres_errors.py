"""What the errors of Postgres mean: whether a write landed, by a table of SQLSTATEs, and which error of ours says so."""

from __future__ import annotations

from enum import Enum

from agent_runtime.errors import AgentRuntimeError, ReadOnlyStore, StoreRefused, StoreUnavailable


class Fate(Enum):
    """What is known of a statement that ended in an error."""

    UNDONE = "nothing of it was written; the same again may succeed"
    REFUSED = "nothing of it was written, nor will be until somebody changes the server"
    UNKNOWN = "nobody knows what of it was written"


READ_ONLY = "25006"
"""A standby, or a setting."""

# By SQLSTATE, else by its class, the first two characters; what stands in neither is unknown. A statement of ours is a
# transaction: what raises inside it rolls it back. What ends the session may come after the commit.
FATES = {
    "02": Fate.UNDONE,
    "03": Fate.UNDONE,
    "08": Fate.UNKNOWN,  # connections, and all that a pooler says of its own
    "09": Fate.UNDONE,
    "0A": Fate.UNDONE,
    "0B": Fate.UNDONE,
    "0F": Fate.UNDONE,
    "0L": Fate.REFUSED,
    "0P": Fate.REFUSED,
    "0Z": Fate.UNDONE,
    "10": Fate.UNDONE,
    "20": Fate.UNDONE,
    "21": Fate.UNDONE,
    "22": Fate.UNDONE,
    "2200H": Fate.REFUSED,  # the last key of a run was given
    "23": Fate.UNDONE,
    "24": Fate.UNDONE,
    "25": Fate.UNDONE,
    "25003": Fate.UNDONE,
    READ_ONLY: Fate.REFUSED,
    "25P03": Fate.UNKNOWN,  # these two end the session
    "25P04": Fate.UNKNOWN,
    "26": Fate.UNDONE,
    "27": Fate.UNDONE,
    "28": Fate.REFUSED,
    "2B": Fate.UNDONE,
    "2D": Fate.UNDONE,
    "2F": Fate.UNDONE,
    "34": Fate.UNDONE,
    "38": Fate.UNDONE,
    "39": Fate.UNDONE,
    "3B": Fate.UNDONE,
    "3D": Fate.REFUSED,
    "3F": Fate.REFUSED,
    "40": Fate.UNDONE,  # serialization, deadlock
    "40003": Fate.UNKNOWN,  # the server itself does not know
    "42": Fate.REFUSED,  # no permission, no such table
    "44": Fate.UNDONE,
    "53": Fate.UNDONE,  # no room, no memory, too many connections
    "54": Fate.REFUSED,  # larger than the server takes
    "55": Fate.UNDONE,
    "57": Fate.UNKNOWN,  # shutdown, crash, a terminated session
    "57014": Fate.UNDONE,  # cancelled
    "57P03": Fate.UNDONE,  # starting up: no session yet
    "58": Fate.UNKNOWN,  # the system below the server
    "72": Fate.UNDONE,
    "F0": Fate.UNDONE,
    "HV": Fate.UNDONE,
    "P0": Fate.UNDONE,
    "XX": Fate.UNKNOWN,  # the server has found itself wrong
}

ADVICE = {
    "2200H": "this store has had as many runs as it can ever hold; name another with schema= or prefix=",
    "28000": "let this user in (pg_hba.conf), or name another in the URL",
    "28P01": "correct the password in the URL, in PGPASSWORD or in the password file",
    "3D000": "create the database, or name another in the URL",
    "3F000": "create the schema, or name another with schema=",
    "42501": "grant it, or load schema.sql as the owner of the tables",
    "54000": "record less in one call: max_value_bytes= bounds it",
    "42P01": "make the tables: load schema.sql, or let the store make them",
}


def state_of(error: BaseException) -> str:
    """The SQLSTATE; empty where the error is the driver's or the system's."""
    state = getattr(error, "sqlstate", None)
    return state if isinstance(state, str) else ""


def fate_of(error: BaseException) -> Fate:
    """What is known of the statement that this error ended."""
    state = state_of(error)
    if not state and isinstance(error, ValueError) and not isinstance(error, UnicodeDecodeError):
        return Fate.UNDONE  # the driver, over a value that it could not send
    return FATES.get(state) or FATES.get(state[:2]) or Fate.UNKNOWN


def leads_to_primary(error: BaseException) -> bool:
    """Whether the connection that ended a statement so is of use for the next: another server may be found by its name now."""
    return fate_of(error) is not Fate.UNKNOWN and state_of(error) != READ_ONLY


def refused_as_replica(place: str, what: str = "a read replica") -> ReadOnlyStore:
    """A server that is no store's, since it takes no writes."""
    return ReadOnlyStore(f"{place} is {what}, and a store is written; name the primary server, or allow writing")


def translate(error: BaseException, place: str) -> AgentRuntimeError:
    """The error of ours for one after which nothing is written; `place` names the server, without a password."""
    state, said = state_of(error), _first_line(error)
    if state == READ_ONLY:
        return ReadOnlyStore(f"{place} cannot be written ({said}); name the primary server, or allow writing")
    if fate_of(error) is Fate.REFUSED:
        advice = ADVICE.get(state, "find out with psql what this user may do there")
        return StoreRefused(f"{place} refuses: {said} (SQLSTATE {state}); {advice}")
    named = f" (SQLSTATE {state})" if state else ""
    return StoreUnavailable(f"{place} did not do it: {said}{named}; nothing was written")


def _first_line(error: BaseException) -> str:
    """What the error says, without the details, which quote what was sent."""
    said = str(getattr(error, "message", None) or error) or type(error).__name__
    return said.splitlines()[0]
