"""A write through SQLAlchemy of which nobody learns whether it landed is settled as the native store settles it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agent_runtime.stores.sqlalchemy import SQLAlchemyCheckpointStore
from agent_runtime.testing.faults import Fault, FaultyStore
from agent_runtime.testing.tcp_proxy import TcpProxy, Way
from tests.postgres.test_unknown import (
    SHORT_SECONDS,
    TROUBLES,
    USUAL_SECONDS,
    Scene,
    assert_ends_undisturbed,
    cancel_while_a_write_is_on_the_wire,
)
from tests.servers import Server, fresh_schema

STRUCK = ("a reply", "the ending of a call")


class ThroughSQLAlchemy(Scene):
    """The scene, whose workers reach the server through an engine. What is looked at is read by the native store."""

    def __init__(self, server: Server, schema: str, proxy: TcpProxy, driver: str) -> None:
        super().__init__(server, schema, proxy)
        self._driver = driver

    def open(self, fault: Fault | None = None) -> FaultyStore:
        url = f"postgresql+{self._driver}://postgres@127.0.0.1:{self.proxy.port}/postgres"
        waits = SHORT_SECONDS if getattr(fault, "is_silent", False) else USUAL_SECONDS
        opened = FaultyStore(SQLAlchemyCheckpointStore(url, schema=self._schema, timeout_seconds=waits), fault, life=self.life)
        self._opened.append(opened)
        return opened


@pytest.fixture(params=["asyncpg", "psycopg"])
async def scene(request: pytest.FixtureRequest, one_postgres: Server) -> AsyncIterator[Scene]:
    async with fresh_schema(one_postgres.url) as schema, TcpProxy("127.0.0.1", one_postgres.port) as proxy:
        on = ThroughSQLAlchemy(one_postgres, schema, proxy, request.param)
        await on.store.now()  # the tables are made
        yield on
        await on.close()


@pytest.mark.parametrize("kind", STRUCK)
@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_run_through_sqlalchemy_ends_as_if_nothing_had_happened(scene: Scene, kind: str, trouble: str) -> None:
    scene.commits = "each"
    await assert_ends_undisturbed(scene, kind, TROUBLES[trouble])


@pytest.mark.parametrize("kind", STRUCK)
@pytest.mark.parametrize("way", Way)
async def test_a_run_that_is_cancelled_while_a_write_is_on_the_wire_recovers(scene: Scene, kind: str, way: Way) -> None:
    await cancel_while_a_write_is_on_the_wire(scene, kind, way)
