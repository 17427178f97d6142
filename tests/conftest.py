"""Fixtures that several folders of tests share."""

import asyncio
import gc
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from agent_runtime.testing.manual_clock import ManualClock, let_everybody_go
from tests.bench import Place
from tests.redis_servers import RedisCluster, RedisServer, redis_origins
from tests.schemas import Schemas
from tests.servers import Origin, Server, origins, own_origins, start
from tests.tenants.house import KINDS, House

# Here, and not beside the contract's own tests: others use its parts as well, and may be imported first.
pytest.register_assert_rewrite("agent_runtime.testing.store_contract")

# A busy machine is slow, and slow is not wrong.
settings.register_profile("unhurried", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# A shell's background job ignores Ctrl-C, and so would each process that the tests start, to send it one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["memory", "sqlite"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """A place to keep runs, on each store; at the end every run in it must verify."""
    where = Place(request.param, tmp_path)
    yield where
    await where.close()


@pytest.fixture(autouse=True)
def _threads_are_let_go() -> Iterator[None]:
    """No heartbeat waits for the clock of a test that is over."""
    yield
    let_everybody_go()


@pytest.fixture
def clock() -> Iterator[ManualClock]:
    """A clock that whoever sleeps moves; at the end it lets the threads go that still wait for it."""
    manual = ManualClock(auto=True)
    yield manual
    manual.advance(1000)


NOWHERE = Origin("nowhere")
"""Stands where no Postgres was found: whoever needs one fails, and says so."""


class Servers:
    """The servers of this session, each started when it is first asked for."""

    def __init__(self) -> None:
        self._running: dict[Origin, Server] = {}

    def __call__(self, origin: Origin) -> Server:
        if origin not in self._running:
            self._running[origin] = start(origin)
        return self._running[origin]

    def close(self) -> None:
        for server in self._running.values():
            server.close()


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    running = Servers()
    yield running
    running.close()


@pytest.fixture(scope="session", params=origins() or (NOWHERE,), ids=lambda origin: origin.name)
def postgres_url(request: pytest.FixtureRequest, servers: Servers) -> str:
    """The address of a server that others use too: make schemas of your own in it."""
    origin: Origin = request.param
    return origin.url or servers(origin).url


@pytest.fixture(scope="session")
def schemas() -> Iterator[Schemas]:
    """Lends schemas whose tables are made and empty. Servers of our own take theirs along."""
    lender = Schemas()
    yield lender
    for origin in origins():
        if origin.url is not None:
            asyncio.run(lender.drop(origin.url))


@pytest.fixture(scope="session", params=own_origins() or (NOWHERE,), ids=lambda origin: origin.name)
def postgres(request: pytest.FixtureRequest, servers: Servers) -> Server:
    """A server that others use too, to be given roles and databases, and not to be killed."""
    return servers(request.param)


@pytest.fixture(scope="session")
def one_postgres(servers: Servers) -> Server:
    """The same, of one origin alone: for what is slow, and does not depend on where the server comes from."""
    return servers(next(iter(own_origins()), NOWHERE))


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A server that others use too: whoever kills or changes one starts another. It keeps nothing on its disk."""
    with RedisServer(redis_origins()[0].program, appendonly="no") as server:
        yield server


@pytest.fixture(scope="session")
def one_cluster() -> Iterator[RedisCluster]:
    """The same, of three masters."""
    with RedisCluster(redis_origins()[0].program, appendonly="no") as cluster:
        yield cluster


@pytest.fixture(params=KINDS)
async def house(
    request: pytest.FixtureRequest, tmp_path: Path, one_postgres: Server, redis_server: RedisServer
) -> AsyncIterator[House]:
    """A house of each kind of store. A test that names others is given those."""
    house = House(request.param, tmp_path, f"h{secrets.token_hex(6)}", one_postgres, redis_server)
    yield house
    await house.close()


def pytest_collection_finish() -> None:
    """What was collected stays: it is not looked through for garbage again and again while ten thousand tests run."""
    gc.collect()
    gc.freeze()
