"""A server that the tests of the Redis store share; whoever kills or changes one starts another."""

from collections.abc import Iterator

import pytest

from tests.redis_servers import RedisServer, redis_origins


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer(redis_origins()[0].program, appendonly="no") as server:
        yield server
