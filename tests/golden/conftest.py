"""The house of each kind of store, for the tests of golden stores."""

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.redis_servers import RedisServer, redis_origins
from tests.servers import Server
from tests.tenants.house import KINDS, House


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer(redis_origins()[0].program, appendonly="no") as server:
        yield server


@pytest.fixture(params=KINDS)
async def house(
    request: pytest.FixtureRequest, tmp_path: Path, one_postgres: Server, redis_server: RedisServer
) -> AsyncIterator[House]:
    """A house of each kind. A test that names others is given those."""
    house = House(request.param, tmp_path, f"h{secrets.token_hex(6)}", one_postgres, redis_server)
    yield house
    await house.close()
