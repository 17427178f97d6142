"""A proxy before a server, which does to messages what networks do: loses, tears, delays and withholds them.

    async with TcpProxy("127.0.0.1", 5432) as proxy:
        store = PostgresCheckpointStore(f"postgresql://me@127.0.0.1:{proxy.port}/runs")
        strike = proxy.strike(How.LOST, Way.TO_CLIENT, matching=b"run-42")   # that request arrives, its reply does not
        proxy.partition(Way.TO_SERVER)                                       # from now on nothing gets there, until heal()

A message is what one read of the socket gives: small requests and replies come whole. Strikes are for one message each, in
the order in which they were asked for; a partition and a delay are for all.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from enum import Enum
from types import TracebackType

from agent_runtime.clock import SYSTEM_CLOCK, Clock

MOST_BYTES = 1 << 18
_RESETS = struct.pack("ii", 1, 0)  # lingers for no time at all: the peer gets a reset, no orderly end


class Way(Enum):
    """Where a message goes."""

    TO_SERVER = "to the server"
    TO_CLIENT = "to the client"


class How(Enum):
    """What becomes of a message that is struck."""

    LOST = "it vanishes, and its connection is reset"
    CUT = "its first half arrives, and its connection is reset"
    SILENT = "it vanishes, with all that follows it that way, and nobody is told"
    HELD = "it waits, with all that follows it that way, until it is released"


class Strike:
    """One message's bad luck. `struck` is set once it has met it."""

    def __init__(self, how: How, way: Way, matching: bytes) -> None:
        self.how = how
        self.way = way
        self.struck = asyncio.Event()
        self._matching = matching
        self._free = asyncio.Event()

    def release(self) -> None:
        """Let a held message go on, also where the client has given up by now."""
        self._free.set()

    def fits(self, request: bytes) -> bool:
        """Whether this request, or the reply to it, is the one."""
        return self._matching in request

    async def is_released(self) -> None:
        await self._free.wait()


class TcpProxy:
    """Listens on `port` of 127.0.0.1 while its block lasts, and takes everything to a server and back."""

    def __init__(self, host: str, port: int, *, listen_host: str = "127.0.0.1", clock: Clock = SYSTEM_CLOCK) -> None:
        self._host, self._server_port = host, port
        self._listen_host = listen_host
        self._clock = clock
        self._listener: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._waiting: list[Strike] = []
        self._delays = dict.fromkeys(Way, 0.0)
        self._open = {way: asyncio.Event() for way in Way}
        self._refuses = False
        self.heal()

    async def __aenter__(self) -> TcpProxy:
        self._listener = await asyncio.start_server(self._serve, self._listen_host, 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._listener is not None, "the block was entered"
        self._listener.close()
        self._refuses = True
        ending = [link.task for link in self._links]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._listener.wait_closed()

    @property
    def port(self) -> int:
        """Where clients find the server."""
        assert self._listener is not None, "a proxy listens inside of its `async with`"
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._links)

    def strike(self, how: How, way: Way = Way.TO_SERVER, *, matching: bytes = b"") -> Strike:
        """Have this happen to the next request that holds those bytes, or (`TO_CLIENT`) to the reply to it."""
        strike = Strike(how, way, matching)
        self._waiting.append(strike)
        return strike

    def partition(self, *ways: Way) -> None:
        """Withhold everything that goes that way, or both ways if none is named, until `heal`; new connections' too."""
        for way in ways or Way:
            self._open[way].clear()

    def delay(self, seconds: float, *ways: Way) -> None:
        """Deliver each message that goes that way, or either way, so much later."""
        self._delays.update(dict.fromkeys(ways or Way, seconds))

    def refuse(self) -> None:
        """Reset every connection there is, and every new one, until `heal`: the server is gone."""
        self._refuses = True
        self.reset()

    def reset(self) -> None:
        """Reset every connection there is; new ones pass."""
        for link in self._links:
            link.task.cancel()

    def heal(self) -> None:
        """End partition, delay and refusal. What was withheld is delivered, as TCP does; strikes still wait."""
        self._refuses = False
        self._delays = dict.fromkeys(Way, 0.0)
        for gate in self._open.values():
            gate.set()

    # Each connection.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection is served by a task of its own"
        link = _Link(task, writer)
        self._links.add(link)
        try:
            if not self._refuses:
                server_reader, link.server = await asyncio.open_connection(self._host, self._server_port)
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pump(link, Way.TO_SERVER, reader, link.server))
                    both.create_task(self._pump(link, Way.TO_CLIENT, server_reader, writer))
        except* (OSError, asyncio.CancelledError):
            pass  # a reset, wherever it came from, or the server is not there: it ends, on both sides
        finally:
            self._links.discard(link)
            link.reset()

    async def _pump(self, link: _Link, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take messages one way until their sender has no more of them, or is gone."""
        while message := await _read(reader):
            strike = self._strike_at(link, way, message)
            if strike is not None:
                strike.struck.set()
                match strike.how:
                    case How.LOST:
                        raise ConnectionResetError("struck")
                    case How.CUT:
                        await _write(writer, message[: len(message) // 2])
                        raise ConnectionResetError("struck")
                    case How.SILENT:
                        await _swallow(reader)
                        return
                    case How.HELD:
                        await strike.is_released()
            if self._delays[way]:
                await self._clock.sleep(self._delays[way])
            await self._open[way].wait()
            await _write(writer, message)
        await self._open[way].wait()
        with suppress(OSError):
            writer.write_eof()

    def _strike_at(self, link: _Link, way: Way, message: bytes) -> Strike | None:
        """The strike that this message meets. A request may call one down upon its reply."""
        if way is Way.TO_CLIENT:
            strike, link.on_reply = link.on_reply, None
            return strike
        found = next((each for each in self._waiting if each.fits(message)), None)
        if found is None:
            return None
        self._waiting.remove(found)
        if found.way is Way.TO_SERVER:
            return found
        link.on_reply = found
        return None


class _Link:
    """One client's connection, and the proxy's own to the server for it."""

    def __init__(self, task: asyncio.Task[None], client: asyncio.StreamWriter) -> None:
        self.task = task
        self.client = client
        self.server: asyncio.StreamWriter | None = None
        self.on_reply: Strike | None = None

    def reset(self) -> None:
        """End both sides at once."""
        for writer in (self.client, self.server):
            if writer is not None:
                with suppress(OSError):
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
                writer.transport.abort()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """The next message; nothing where there is none any more, however the sender went."""
    try:
        return await reader.read(MOST_BYTES)
    except OSError:
        return b""


async def _write(writer: asyncio.StreamWriter, message: bytes) -> None:
    with suppress(OSError):  # whom it was for is gone; what goes the other way is another matter
        writer.write(message)
        await writer.drain()


async def _swallow(reader: asyncio.StreamReader) -> None:
    while await _read(reader):
        pass
