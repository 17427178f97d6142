"""What a failover of a Postgres server keeps: which standbys its commits wait for. Asked by `doctor`; writes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from agent_runtime.stores.postgres_link import Connection, Link
from agent_runtime.stores.postgres_schema import Statements, check_session
from agent_runtime.stores.postgres_url import place_of

TIMEOUT_SECONDS = 5.0
_READ_ABOUT = "see docs/reference/postgres.md"


@dataclass(frozen=True, slots=True)
class Standbys:
    """The standbys of a server: what commits shall wait for, how many there are, and how many are waited for."""

    place: str
    names: str
    connected: int
    waited_for: int | None
    """None: this user may not know."""

    @property
    def told(self) -> str:
        """In a few words, what becomes of acknowledged writes when the server is lost."""
        if self.names and self.waited_for is None:
            return f"protected by a standby, if one of {self.names!r} is connected"
        if self.names and self.waited_for:
            return f"protected: commits wait for {self.names!r}, {self.waited_for} connected"
        if self.names:
            return f"stands still: commits wait for {self.names!r}, none connected"
        return f"not protected: no commit waits for a standby, {self.connected} connected"

    @property
    def warnings(self) -> list[str]:
        """What somebody should do something about."""
        if self.names and self.waited_for == 0:
            return [
                f"{self.place}: commits wait for a standby of synchronous_standby_names = {self.names!r}, and none is "
                "connected: writes stay unknown until one is. Bring it back, or name another"
            ]
        if not self.names and self.connected:
            return [
                f"{self.place} has {self.connected} standby(s) that no commit waits for: where one is promoted, acknowledged "
                f"writes that it did not have are lost. Set synchronous_standby_names; {_READ_ABOUT}"
            ]
        return []


async def read_standbys(url: str) -> Standbys:
    """Ask the primary at that URL; raises what a store there would raise."""
    place = place_of(url)
    statements = Statements("public", "", pooler=False)

    async def greet(connection: Connection) -> None:
        await check_session(connection, statements, place, pooler=False)

    link = Link(url, place, pooler=False, timeout_seconds=TIMEOUT_SECONDS, greet=greet, forget=lambda: None)
    try:
        [(names, connected, told, waited_for)] = await link.read(lambda db: db.fetch(statements["read_standbys"]))
    finally:
        await link.close()
    return Standbys(place, names, connected, waited_for if told == connected else None)
