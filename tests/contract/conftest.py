"""What the contract's own tests share: readable assertions, and the servers that the Postgres store is tested on."""

from collections.abc import Iterator

import pytest

from tests.servers import Origin, Server, origins, own_origins

pytest.register_assert_rewrite("agent_runtime.testing.store_contract")


def _named(origin: Origin) -> str:
    return origin.name


@pytest.fixture(scope="session", params=origins(), ids=_named)
def postgres_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server that runs for as long as the tests do: make schemas of your own in it."""
    origin: Origin = request.param
    if origin.bindir is None:
        assert origin.url is not None, "a server without binaries has an address"
        yield origin.url
        return
    server = Server(origin.bindir)
    server.start()
    yield server.url
    server.close()


@pytest.fixture(scope="session", params=own_origins(), ids=_named)
def postgres(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server that may be configured and given roles; others use it too, so it is not to be killed."""
    origin: Origin = request.param
    assert origin.bindir is not None, "one that we start has binaries"
    server = Server(origin.bindir)
    server.start()
    yield server
    server.close()
