"""Starting the remotes inside the calling process; what serves them is imported only then.

All threads are daemons: a process that ends, even by `os._exit`, leaves nothing behind but the state file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from agent_runtime.mock.switches import Switches

if TYPE_CHECKING:
    from agent_runtime.mock.listener import Routes
    from agent_runtime.mock.pauses import Pauses
    from agent_runtime.mock.state import MockState

LOOPBACK = "127.0.0.1"
CLOUD_PORT = 9000
MODEL_PORT = 9100

# A whole set of switches, or only those to be changed; None leaves what the state file has.
SwitchSetting = Switches | Mapping[str, object] | None


def start_cloud(state: Path, *, host: str = LOOPBACK, port: int = 0, switches: SwitchSetting = None) -> MockServer:
    """A cloud that serves until it is closed, on a free port unless one is named."""
    cloud = _prepare_cloud(state, host, port)
    return _start(cloud, switches)


def start_model(state: Path, *, host: str = LOOPBACK, port: int = 0, switches: SwitchSetting = None) -> MockServer:
    """A model that serves until it is closed, on a free port unless one is named."""
    model = _prepare_model(state, host, port)
    return _start(model, switches)


def start_mocks(
    state: Path,
    *,
    host: str = LOOPBACK,
    cloud_port: int = 0,
    model_port: int = 0,
    switches: SwitchSetting = None,
    cloud_switches: SwitchSetting = None,
    model_switches: SwitchSetting = None,
) -> Mocks:
    """Both remotes over one state file. `switches` are for both, the other two for one each and come after."""
    with ExitStack() as unwind:
        # Both ports are had before either serves or changes a switch that other processes see.
        cloud = _prepare_cloud(state, host, cloud_port)
        unwind.callback(cloud.close)
        model = _prepare_model(state, host, model_port)
        unwind.callback(model.close)
        for setting in (switches, cloud_switches):
            cloud.change_switches(setting)
        for setting in (switches, model_switches):
            model.change_switches(setting)
        mocks = Mocks(cloud=_start(cloud, None), model=_start(model, None))
        unwind.pop_all()
    return mocks


@dataclass(frozen=True, slots=True)
class MockServer:
    """A remote that serves. `close` ends it, and may be called again; its state stays on disk."""

    url: str
    close: Callable[[], None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Mocks:
    """Both remotes."""

    cloud: MockServer
    model: MockServer

    @property
    def cloud_url(self) -> str:
        """Where the cloud serves."""
        return self.cloud.url

    @property
    def model_url(self) -> str:
        """Where the model serves."""
        return self.model.url

    def close(self) -> None:
        """Ends both; may be called again."""
        self.model.close()
        self.cloud.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Prepared:
    """A remote that has its port and its state, and does not serve yet."""

    def __init__(self, remote: str, routes: Callable[[MockState, Pauses], Routes], state: Path, host: str, port: int) -> None:
        from agent_runtime.mock.listener import Listener
        from agent_runtime.mock.pauses import Pauses
        from agent_runtime.mock.state import MockState

        self._remote = remote
        self._pauses = Pauses()
        self._state = MockState(state)
        try:
            self.listener = Listener(routes(self._state, self._pauses), host=host, port=port)
        except BaseException:
            self._state.close()
            raise

    def change_switches(self, setting: SwitchSetting) -> None:
        if setting is not None:
            changes = setting.values() if isinstance(setting, Switches) else setting
            self._state.change_switches(self._remote, changes)

    def close(self) -> None:
        self._pauses.end()
        self.listener.stop()
        self._state.close()


def _prepare_cloud(state: Path, host: str, port: int) -> _Prepared:
    from agent_runtime.mock.cloud import CLOUD, cloud_routes

    return _Prepared(CLOUD, cloud_routes, state, host, port)


def _prepare_model(state: Path, host: str, port: int) -> _Prepared:
    from agent_runtime.mock.model import MODEL, model_routes

    return _Prepared(MODEL, model_routes, state, host, port)


def _start(prepared: _Prepared, switches: SwitchSetting) -> MockServer:
    try:
        prepared.change_switches(switches)
        prepared.listener.start()
    except BaseException:
        prepared.close()
        raise
    return MockServer(url=prepared.listener.url, close=prepared.close)
