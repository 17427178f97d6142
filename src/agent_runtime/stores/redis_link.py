"""Connections to Redis: opened when needed, lent for one round trip, dropped once nobody knows what they did.

The user's client says where the servers are and how to get in, and no more: what is sent goes over connections of our own,
which never send anything a second time by themselves. A connection belongs to the event loop that opened it; on another
loop the link begins anew, with another client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from agent_runtime.clock import Clock
from agent_runtime.errors import AgentRuntimeError, InvalidSetting, StoreRefused, StoreUnavailable
from agent_runtime.stores.redis_errors import Fate, code_of, fate_of, first_line, translate
from agent_runtime.stores.redis_pack import SCRIPTS, Command, plain

WRITES_AT_ONCE = 2
READS_AT_ONCE = 2
TRIES = 5
"""How often a command is sent that another node of a cluster should have had, or whose script had to be loaded."""
FIRST_PAUSE_SECONDS = 0.02
CLOSE_SECONDS = 2.0

# Of what redis-py keeps beside the options of a connection, each of its versions something else.
_ITS_OWN = ("himport", "maint_notifications", "orig_", "retry_on")


class Wire(Protocol):
    """What we use of a connection of redis-py."""

    @property
    def is_connected(self) -> bool: ...

    async def connect(self) -> None: ...

    async def disconnect(self, nowait: bool = False) -> None: ...

    async def send_packed_command(self, command: Iterable[bytes], check_health: bool = True) -> None: ...

    async def read_response(self, disable_decoding: bool = False, *, disconnect_on_error: bool = True) -> Any: ...


class Lost(Exception):
    """Stands for the answer to a command of which nobody knows whether it was carried out."""

    @property
    def is_late(self) -> bool:
        """Whether it was waited for until the time was over."""
        return isinstance(self.__cause__, TimeoutError)


class Few(NamedTuple):
    """An answer to a write that fewer replicas have than were asked for."""

    value: Any
    acknowledged: int


class Node:
    """One server: how it is reached, and the connections to it that wait for work."""

    def __init__(self, place: str, kind: Callable[..., Wire], options: Mapping[str, Any]) -> None:
        self.place = place
        self.idle: list[Wire] = []
        self._kind = kind
        self._options = options

    def make_wire(self, timeout_seconds: float) -> Wire:
        """A connection that tries nothing twice, decodes nothing and waits for as long as it is told."""
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        kept = {name: value for name, value in self._options.items() if not name.startswith(_ITS_OWN)}
        kept |= {
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "decode_responses": False,
            "health_check_interval": 0,
            "socket_timeout": None,
            "socket_connect_timeout": timeout_seconds,
        }
        try:
            return self._kind(**kept)
        except TypeError as error:
            raise InvalidSetting(f"{self.place}: the driver refuses an option of the client or its URL: {error}") from error


class Link:
    """The connections of one store object."""

    def __init__(
        self,
        make_client: Callable[[], Any],
        *,
        timeout_seconds: float,
        wait_replicas: int,
        clock: Clock,
        greet: Callable[[Link, Node, Wire], Awaitable[None]],
    ) -> None:
        """`greet` is called with each fresh connection."""
        self._make_client = make_client
        self._timeout = timeout_seconds
        self._wait_replicas = wait_replicas
        self._clock = clock
        self._greet = greet
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._nodes: dict[str, Node] = {}
        self._is_stale = False
        self._is_closed = False
        self.is_cluster = False
        self.place = "the Redis server"

    async def write(self, commands: Sequence[Command], *, sync: str = "") -> list[Any]:
        """The answer to each command: a value, an error after which nothing of it is written, `Lost`, or `Few`.

        `sync` is how the key is to begin with which the replicas are waited for; without it nobody waits.
        """
        await self._enter_loop()
        async with self._writes:
            return await self._carry(commands, sync)

    async def read(self, commands: Sequence[Command]) -> list[Any]:
        """What was asked for. Raises where any of it was not answered."""
        await self._enter_loop()
        async with self._reads:
            answers = await self._carry(commands, "")
            if any(isinstance(answer, Lost) and not answer.is_late for answer in answers):
                answers = await self._carry(commands, "")  # the connection had ended while nobody used it
        return self._told(answers)

    def _told(self, answers: list[Any]) -> list[Any]:
        """The answers to reads, where all came."""
        for answer in answers:
            if isinstance(answer, Lost):
                raise StoreUnavailable(f"{self.place} did not answer: {answer}") from answer.__cause__
            if isinstance(answer, AgentRuntimeError):
                raise answer
            if isinstance(answer, Exception):
                raise translate(answer, self.place) from answer
        return answers

    async def ask_all(self, ask: Callable[[Node], Awaitable[None]]) -> None:
        """Go from primary to primary."""
        await self._enter_loop()
        await self._ready()
        for node in list(self._nodes.values()):
            await ask(node)

    async def read_on(self, node: Node, command: Command) -> Any:
        """What one server says, whoever has what."""
        async with self._reads:
            [answer] = await self._pipeline(node, [command], "")
        return self._told([answer])[0]

    async def close(self) -> None:
        self._is_closed = True
        await self._let_go()

    async def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        left = [wire for node in self._nodes.values() for wire in node.idle]
        self._loop, self._client, self._nodes = loop, None, {}
        self._writes, self._reads = asyncio.Semaphore(WRITES_AT_ONCE), asyncio.Semaphore(READS_AT_ONCE)
        self._getting_ready = asyncio.Lock()
        await self._end_at_once(left)

    # Carrying.

    async def _carry(self, commands: Sequence[Command], sync: str) -> list[Any]:
        answers: list[Any] = [None] * len(commands)
        left = list(range(len(commands)))
        pause = 0.0
        for attempt in range(TRIES):
            if pause:
                await self._clock.sleep(pause)
            try:
                await self._carry_once(commands, left, answers, sync)
            except AgentRuntimeError as error:
                if len(left) == len(commands):
                    raise
                for place in left:  # of the others some may be written
                    answers[place] = error
            fates = {place: fate_of(answers[place]) for place in left if isinstance(answers[place], Exception)}
            left = [place for place, fate in fates.items() if fate is Fate.UNLOADED or self._is_to_be_led_on(fate)]
            if not left:
                break
            if any(fates[place] is Fate.ELSEWHERE for place in left):
                self._is_stale = True
                pause = FIRST_PAUSE_SECONDS * 2**attempt
        return answers

    def _is_to_be_led_on(self, fate: Fate) -> bool:
        return self.is_cluster and fate is Fate.ELSEWHERE

    async def _carry_once(self, commands: Sequence[Command], places: Sequence[int], answers: list[Any], sync: str) -> None:
        """Give each of those commands its answer, all nodes at the same time."""
        await self._ready()
        shares: dict[Node, list[int]] = {}
        for place in places:
            try:
                shares.setdefault(self._node_of(commands[place].key), []).append(place)
            except Exception as error:  # no node has the slot just now
                if fate_of(error) is Fate.UNKNOWN:
                    raise
                answers[place] = error
        if len(shares) == 1:
            [(node, share)] = shares.items()
            await self._carry_share(node, share, commands, answers, sync)
            return
        works = (self._carry_share(node, share, commands, answers, sync) for node, share in shares.items())
        for ended in await asyncio.gather(*works, return_exceptions=True):
            if ended is not None:
                raise ended

    async def _carry_share(
        self, node: Node, share: Sequence[int], commands: Sequence[Command], answers: list[Any], sync: str
    ) -> None:
        try:
            found = await self._pipeline(node, [commands[place] for place in share], sync)
        except AgentRuntimeError as error:
            self._is_stale = True  # another node may have taken its place
            found = [error] * len(share)
        for place, answer in zip(share, found, strict=True):
            answers[place] = answer

    async def _pipeline(self, node: Node, commands: list[Command], sync: str) -> list[Any]:
        """One round trip. Raises where nothing was sent."""
        tail = self._waiting_for_replicas(commands[0], sync)
        wire = await self._connected(node)
        answers: list[Any] = []
        try:
            async with asyncio.timeout(self._timeout):
                await wire.send_packed_command([command.packed for command in [*commands, *tail]], check_health=False)
                for _ in range(len(commands) + len(tail)):
                    answers.append(await _answer(wire))
                if any(isinstance(answer, Exception) and fate_of(answer) is Fate.UNLOADED for answer in answers):
                    await load_scripts(wire)
        except Exception as error:
            await self._drop(node, wire)
            lost = Lost(first_line(error))
            lost.__cause__ = error
            answers += [lost] * (len(commands) - len(answers))
        except BaseException:
            await self._drop(node, wire)
            raise
        else:
            await self._take_back(node, wire, answers)
        return self._judged(answers, len(commands)) if tail else answers[: len(commands)]

    def _waiting_for_replicas(self, first: Command, sync: str) -> list[Command]:
        """A write of this very connection, whose place in the stream is past all the others', and the wait for it."""
        if not (self._wait_replicas and sync):
            return []
        key = f"{first.key[: first.key.index('}') + 1]}:{sync}"
        wait_ms = f"{max(1, round(self._timeout * 500))}"  # 0 would be for ever
        return [plain(key, "SET", key, "1", "PX", "1000"), plain(key, "WAIT", f"{self._wait_replicas}", wait_ms)]

    def _judged(self, answers: list[Any], size: int) -> list[Any]:
        """The answers, each marked where too few replicas have what it speaks of."""
        acknowledged = answers[-1] if len(answers) == size + 2 and isinstance(answers[-1], int) else -1
        given = answers[:size]
        if acknowledged >= self._wait_replicas:
            return given
        return [answer if isinstance(answer, Exception) else Few(answer, max(0, acknowledged)) for answer in given]

    # Where to.

    def _node_of(self, key: str) -> Node:
        if not self.is_cluster:
            [node] = self._nodes.values()
            return node
        return self._known(self._client.get_node_from_key(key))

    def _known(self, node: Any) -> Node:
        """Our side of a node of the client's."""
        known = self._nodes.get(node.name)
        if known is None:
            known = self._nodes[node.name] = Node(f"redis://{node.name}", node.connection_class, node.connection_kwargs)
        return known

    async def _ready(self) -> None:
        if self._client is not None and not self._is_stale:
            return
        async with self._getting_ready:
            if self._is_closed:
                raise StoreUnavailable(f"the store at {self.place} was closed; open another")
            if self._client is None:
                self._client = _client_of(self._make_client)
                self.is_cluster = hasattr(self._client, "nodes_manager")
                if not self.is_cluster:
                    pool = self._client.connection_pool
                    self.place = place_of_pool(pool.connection_kwargs)
                    self._nodes = {"": Node(self.place, pool.connection_class, pool.connection_kwargs)}
                self._is_stale = self.is_cluster
            if self._is_stale and self.is_cluster:
                await self._ask_who_has_what()
            self._is_stale = False

    async def _ask_who_has_what(self) -> None:
        """Have the cluster's client learn again which node has which slot."""
        try:
            async with asyncio.timeout(2 * self._timeout):
                # Its `initialize` would also ask for the arguments of every command there is, which takes long.
                await self._client.nodes_manager.initialize()
        except Exception as error:
            client, self._client = self._client, None  # it may have forgotten all nodes it knew
            await _close_client(client)
            if fate_of(error) is Fate.REFUSED:
                raise translate(error, "the Redis cluster") from error
            raise StoreUnavailable(
                f"the Redis cluster does not answer: {first_line(error)}; see that its nodes run and can be reached from here"
            ) from error
        nodes = self._client.get_primaries()
        self.place = f"the Redis cluster of {min(node.name for node in nodes)}"
        names = {node.name for node in nodes}
        for name in [name for name in self._nodes if name not in names]:
            await self._end(self._nodes.pop(name).idle)
        for node in nodes:
            self._known(node)

    # Connections.

    async def _connected(self, node: Node) -> Wire:
        if self._is_closed:
            raise StoreUnavailable(f"the store at {node.place} was closed; open another")
        while node.idle:
            wire = node.idle.pop()
            if wire.is_connected:
                return wire
        wire = node.make_wire(self._timeout)
        try:
            async with asyncio.timeout(self._timeout):
                await wire.connect()
                await self._greet(self, node, wire)
        except AgentRuntimeError:
            await self._end_at_once([wire])
            raise
        except Exception as error:
            await self._end_at_once([wire])
            raise _unreachable(error, node.place) from error
        except BaseException:
            await self._end_at_once([wire])
            raise
        return wire

    async def _take_back(self, node: Node, wire: Wire, answers: list[Any]) -> None:
        leads_on = any(isinstance(answer, Exception) and fate_of(answer) is Fate.ELSEWHERE for answer in answers)
        if self._is_closed or not wire.is_connected or leads_on:
            await self._end_at_once([wire])  # the name of the server may lead to another by now
        else:
            node.idle.append(wire)

    async def _drop(self, node: Node, wire: Wire) -> None:
        """Nothing is known of this one any more, and the others lead to the same server."""
        idle, node.idle = node.idle, []
        await self._end_at_once([wire, *idle])

    async def _end_at_once(self, wires: Sequence[Wire]) -> None:
        """Close them without waiting for anything: whoever is being cancelled gets no further."""
        for wire in wires:
            with suppress(Exception):  # whatever state it is in, or its loop, it is not used again
                await wire.disconnect(nowait=True)

    async def _end(self, wires: list[Wire]) -> None:
        for wire in wires:
            with suppress(Exception):  # it is closed, one way or the other
                async with asyncio.timeout(CLOSE_SECONDS):
                    await wire.disconnect()

    async def _let_go(self) -> None:
        nodes, self._nodes = list(self._nodes.values()), {}
        client, self._client = self._client, None
        if self._loop is not asyncio.get_running_loop():
            await self._end_at_once([wire for node in nodes for wire in node.idle])
            return
        for node in nodes:
            idle, node.idle = node.idle, []
            await self._end(idle)
        if client is not None:
            await _close_client(client)


async def _close_client(client: Any) -> None:
    """Only a cluster's has connections: those over which it asked who has what."""
    manager = getattr(client, "nodes_manager", None)
    with suppress(Exception):  # it is closed, one way or the other
        if manager is not None:
            await manager.aclose()
            await manager.aclose("startup_nodes")
        await client.aclose()


async def _answer(wire: Wire) -> Any:
    """The next reply: its value, or the error that the server gave for one. Raises where there is none."""
    try:
        return await wire.read_response(disable_decoding=True, disconnect_on_error=False)
    except Exception as error:
        if code_of(error) or any(base.__name__ == "ResponseError" for base in type(error).__mro__):
            return error
        raise


async def load_scripts(wire: Wire) -> None:
    """Have the server know every script."""
    await ask_wire(wire, [plain("", "SCRIPT", "LOAD", text) for text in SCRIPTS.values()])


async def ask_wire(wire: Wire, commands: Sequence[Command]) -> list[Any]:
    """The replies to commands on one connection, errors among them."""
    await wire.send_packed_command([command.packed for command in commands], check_health=False)
    return [await _answer(wire) for _ in commands]


def place_of_pool(options: Mapping[str, Any]) -> str:
    """The server that a client leads to, as it may be shown."""
    if "path" in options:
        return f"unix://{options['path']}"
    user = f"{options['username']}@" if options.get("username") else ""
    return f"redis://{user}{options.get('host', 'localhost')}:{options.get('port', 6379)}/{options.get('db') or 0}"


def _client_of(make_client: Callable[[], Any]) -> Any:
    client = make_client()
    if hasattr(client, "nodes_manager") and asyncio.iscoroutinefunction(getattr(client, "initialize", None)):
        return client
    kind = getattr(getattr(client, "connection_pool", None), "connection_class", None)
    if not asyncio.iscoroutinefunction(getattr(kind, "connect", None)):
        raise InvalidSetting(
            "the function given to RedisCheckpointStore returns a client of redis.asyncio, Redis or RedisCluster; found "
            f"{type(client).__module__}.{type(client).__name__}"
        )
    return client


def _unreachable(error: Exception, place: str) -> StoreUnavailable | StoreRefused:
    """Nothing was sent yet, so nothing was written, whatever it is."""
    if code_of(error) == "NOAUTH":
        return StoreRefused(f"{place} wants to know who asks ({first_line(error)}); put user and password into the URL")
    if fate_of(error) is Fate.REFUSED:
        refused = translate(error, place)
        if isinstance(refused, StoreRefused):
            return refused
    return StoreUnavailable(
        f"{place} does not answer: {first_line(error)}; see that the server runs, is Redis or Valkey, and can be reached "
        "from here"
    )
