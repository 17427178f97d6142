"""A server that the tests of the Redis store share; whoever kills or changes one starts another."""

import pytest

from tests.redis_servers import RedisServer


@pytest.fixture(scope="session")
def redis_server(one_redis: RedisServer) -> RedisServer:
    return one_redis
