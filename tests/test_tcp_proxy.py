"""The proxy before a server does to messages what it was told to, and to no other ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agent_runtime.testing.manual_clock import ManualClock
from agent_runtime.testing.tcp_proxy import How, TcpProxy, Way
from tests.bench import until

PATIENCE_SECONDS = 10.0
LITTLE_SECONDS = 0.05
"""How long nothing happens before a test takes it that nothing will: where it errs, it misses a bug, and raises none."""


class Echo:
    """A server that says back each line in capitals, and keeps what it heard."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.resets = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.read(1000):
                self.heard.append(line)
                writer.write(line.upper())
                await writer.drain()
        except ConnectionResetError:
            self.resets += 1
        finally:
            writer.close()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, text: bytes) -> bytes:
        """The reply; nothing where the connection ended in order."""
        self.writer.write(text)
        return await self.hear()

    async def hear(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(1000), PATIENCE_SECONDS)

    async def hears_nothing(self) -> bool:
        hearing = asyncio.ensure_future(self.reader.read(1000))
        done, _ = await asyncio.wait([hearing], timeout=LITTLE_SECONDS)
        hearing.cancel()
        return not done


class Net:
    """A server, the proxy before it, and clients of it."""

    def __init__(self, echo: Echo, proxy: TcpProxy) -> None:
        self.echo, self.proxy = echo, proxy
        self._clients: list[Client] = []

    async def client(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.proxy.port))
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.writer.transport.abort()


@asynccontextmanager
async def made(clock: ManualClock) -> AsyncIterator[Net]:
    echo = Echo()
    listener = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    async with listener, TcpProxy("127.0.0.1", listener.sockets[0].getsockname()[1], clock=clock) as proxy:
        on = Net(echo, proxy)
        yield on
        on.close()


@pytest.fixture
async def net(clock: ManualClock) -> AsyncIterator[Net]:
    async with made(clock) as on:
        yield on


async def test_without_trouble_everything_passes_both_ways_and_the_end_too(net: Net) -> None:
    client, other = await net.client(), await net.client()
    assert await client.ask(b"one") == b"ONE"
    assert await other.ask(b"two") == b"TWO"
    assert net.proxy.connections == 2
    client.writer.write_eof()
    assert await client.hear() == b""
    await until(lambda: net.proxy.connections == 1)
    assert await other.ask(b"x" * 900) == b"X" * 900


@pytest.mark.parametrize(
    ("how", "way", "heard", "got"),
    [
        (How.LOST, Way.TO_SERVER, [], None),
        (How.CUT, Way.TO_SERVER, [b"str"], None),
        (How.LOST, Way.TO_CLIENT, [b"strike"], None),
        (How.CUT, Way.TO_CLIENT, [b"strike"], b"STR"),
    ],
)
async def test_a_message_that_is_lost_or_cut_takes_its_connection_along_and_no_other(
    net: Net, how: How, way: Way, heard: list[bytes], got: bytes | None
) -> None:
    client, other = await net.client(), await net.client()
    strike = net.proxy.strike(how, way, matching=b"strike")
    assert await client.ask(b"fine") == b"FINE"
    assert not strike.struck.is_set()
    client.writer.write(b"strike")
    if got is not None:
        assert await client.hear() == got
    with pytest.raises(ConnectionResetError):
        await client.hear()
    assert strike.struck.is_set()
    assert await other.ask(b"strike") == b"STRIKE", "one strike is for one message"
    assert net.echo.heard == [b"fine", *heard, b"strike"]


@pytest.mark.parametrize("way", Way)
async def test_a_message_that_vanishes_silently_leaves_its_connection_open_and_dead(net: Net, way: Way) -> None:
    client = await net.client()
    strike = net.proxy.strike(How.SILENT, way)
    client.writer.write(b"one")
    await asyncio.wait_for(strike.struck.wait(), PATIENCE_SECONDS)
    client.writer.write(b"two")
    assert await client.hears_nothing()
    if way is Way.TO_SERVER:
        assert net.echo.heard == []
    else:
        await until(lambda: b"".join(net.echo.heard) == b"onetwo")
    assert await (await net.client()).ask(b"three") == b"THREE"


async def test_a_held_message_arrives_when_it_is_released_and_in_its_order(net: Net) -> None:
    client = await net.client()
    strike = net.proxy.strike(How.HELD)
    client.writer.write(b"one")
    await asyncio.wait_for(strike.struck.wait(), PATIENCE_SECONDS)
    client.writer.write(b"two")
    assert await client.hears_nothing()
    strike.release()
    await until(lambda: b"".join(net.echo.heard) == b"onetwo")


async def test_a_held_message_arrives_even_if_its_client_has_given_up(net: Net) -> None:
    client = await net.client()
    strike = net.proxy.strike(How.HELD)
    client.writer.write(b"late")
    await asyncio.wait_for(strike.struck.wait(), PATIENCE_SECONDS)
    client.writer.transport.abort()
    await asyncio.sleep(0)
    assert net.echo.heard == []
    strike.release()
    await until(lambda: net.echo.heard == [b"late"])
    await until(lambda: net.proxy.connections == 0)


@pytest.mark.parametrize("ways", [(Way.TO_SERVER,), (Way.TO_CLIENT,), ()], ids=["to the server", "to the client", "both"])
async def test_a_partition_withholds_what_goes_its_way_and_delivers_it_when_it_heals(net: Net, ways: tuple[Way, ...]) -> None:
    client = await net.client()
    assert await client.ask(b"before") == b"BEFORE"
    net.proxy.partition(*ways)
    late = await net.client()
    late.writer.write(b"new")
    client.writer.write(b"old")
    assert await client.hears_nothing()
    if ways == (Way.TO_CLIENT,):
        await until(lambda: len(net.echo.heard) == 3)
    else:
        assert net.echo.heard == [b"before"]
    net.proxy.heal()
    assert (await client.hear(), await late.hear()) == (b"OLD", b"NEW")


async def test_a_delay_makes_each_message_that_much_later(clock: ManualClock) -> None:
    async with made(clock) as net:
        net.proxy.delay(2.0, Way.TO_CLIENT)
        client = await net.client()
        began = clock.monotonic()
        assert await client.ask(b"one") == b"ONE"
        assert clock.monotonic() - began == 2.0
        net.proxy.delay(0.5)
        assert await client.ask(b"two") == b"TWO"
        assert clock.monotonic() - began == 3.0
        net.proxy.heal()
        assert await client.ask(b"three") == b"THREE"
        assert clock.monotonic() - began == 3.0


async def test_a_reset_ends_every_connection_and_new_ones_pass(net: Net) -> None:
    client = await net.client()
    assert await client.ask(b"one") == b"ONE"
    net.proxy.reset()
    with pytest.raises(ConnectionResetError):
        await client.hear()
    await until(lambda: net.echo.resets == 1)
    assert await (await net.client()).ask(b"two") == b"TWO"


async def test_a_server_that_is_gone_resets_new_connections_too_until_it_is_back(net: Net) -> None:
    net.proxy.refuse()
    with pytest.raises(ConnectionResetError):
        await (await net.client()).hear()
    net.proxy.heal()
    assert await (await net.client()).ask(b"two") == b"TWO"


async def test_a_proxy_before_no_server_resets_whoever_comes(clock: ManualClock) -> None:
    async with made(clock) as net:
        port = net.proxy._server_port
    async with TcpProxy("127.0.0.1", port) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.transport.abort()


async def test_nothing_of_a_proxy_is_left_when_its_block_is_left(clock: ManualClock) -> None:
    async with made(clock) as net:
        client = await net.client()
        assert await client.ask(b"one") == b"ONE"
        port = net.proxy.port
        net.proxy.partition()
        client.writer.write(b"two")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    assert [task for task in asyncio.all_tasks() if "_serve" in repr(task)] == []
