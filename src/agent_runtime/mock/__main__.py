"""`python -m agent_runtime.mock`: serves both remotes until Ctrl-C or SIGTERM."""

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType

from agent_runtime.mock.start import CLOUD_PORT, LOOPBACK, MODEL_PORT, Mocks, start_mocks
from agent_runtime.mock.switches import DEFAULTS, HELP
from agent_runtime.mock.troubles import CannotListen, MockTrouble

STATE_FILE = Path("agent_runtime_mock.db")
USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 after a stop, 2 if the remotes could not be started as asked."""
    options = _parser().parse_args(arguments)
    stops = _listen_for_stops()
    try:
        mocks = _start(options)
    except MockTrouble as trouble:
        advice = " with --cloud-port or --model-port" if isinstance(trouble, CannotListen) else ""
        print(f"agent_runtime.mock: {trouble}{advice}", file=sys.stderr)
        return USAGE_ERROR
    with mocks:
        print(f"cloud {mocks.cloud_url}\nmodel {mocks.model_url}", flush=True)
        _wait(stops)
    return 0


def _start(options: argparse.Namespace) -> Mocks:
    changes = {name: value for name in DEFAULTS if (value := getattr(options, name)) is not None}
    return start_mocks(
        options.state,
        host=options.host,
        cloud_port=options.cloud_port,
        model_port=options.model_port,
        cloud_switches=changes if options.switches_for in ("both", "cloud") else None,
        model_switches=changes if options.switches_for in ("both", "model") else None,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m agent_runtime.mock", description="The two remotes of the provisioning agent, as HTTP servers."
    )
    parser.add_argument("--state", type=Path, default=STATE_FILE, metavar="FILE", help="default: %(default)s")
    parser.add_argument("--host", default=LOOPBACK, help="default: %(default)s")
    for remote, port in (("cloud", CLOUD_PORT), ("model", MODEL_PORT)):
        parser.add_argument(f"--{remote}-port", type=_port, default=port, metavar="N", help=f"default: {port}; 0: any")
    switches = parser.add_argument_group("switches", "Those not named stay as the state file has them.")
    switches.add_argument("--switches-for", choices=("both", "cloud", "model"), default="both", help="default: both")
    for name, default in DEFAULTS.items():
        _add_switch(switches, name, is_flag=isinstance(default, bool))
    return parser


def _add_switch(group: "argparse._ArgumentGroup", name: str, *, is_flag: bool) -> None:
    option = f"--{name.replace('_', '-')}"
    if is_flag:
        group.add_argument(option, action=argparse.BooleanOptionalAction, help=HELP[name])
    else:
        group.add_argument(option, type=int, metavar="N", help=HELP[name])


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"a port is a number from 0 to 65535, not {text!r}")
    return int(text)


def _listen_for_stops() -> SimpleQueue[int]:
    # A signal handler may interrupt anything, also the wait itself: of all ways to wake it, only this queue is
    # documented to be safe to put into at such a moment.
    stops: SimpleQueue[int] = SimpleQueue()

    def stop(number: int, _: FrameType | None) -> None:
        stops.put(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return stops


def _wait(stops: SimpleQueue[int]) -> None:
    # Windows runs a signal handler only when a wait ends; so this one ends now and then.
    stopped = False
    while not stopped:
        with suppress(Empty):
            stops.get(timeout=1.0)
            stopped = True


if __name__ == "__main__":
    sys.exit(main())
