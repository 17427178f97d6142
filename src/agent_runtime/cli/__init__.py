"""The command line: `agent-runtime`, and `python -m agent_runtime` with arguments."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from agent_runtime import __version__
from agent_runtime.errors import AgentRuntimeError, InvalidSetting

EPILOG = "A run id that begins with a dash stands after `--`. Exit code 2: the command line is wrong; else see each command."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; gives its exit code."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character is shown its number
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        return _run(parser, chosen)
    except AgentRuntimeError as error:
        print(f"ERROR {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our lines has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> int:
    match chosen.command:
        case "provision":
            from agent_runtime import provision

            port = {} if chosen.metrics_port is None else {"METRICS_PORT": str(chosen.metrics_port)}
            return provision.main({**os.environ, **port}, resume=chosen.resume)
        case "supervisor":
            from agent_runtime import supervisor

            return supervisor.supervise(chosen)
        case "keygen":
            from agent_runtime.cli import keys

            return keys.keygen(chosen)
        case "demo":
            from agent_runtime.cli import demo

            return demo.main()
        case "completion":
            return _print_completion(parser, chosen.shell)
        case "doctor":
            from agent_runtime.cli import doctor

            return doctor.main(as_json=chosen.json, store=chosen.store)
        case "migrate":
            from agent_runtime.cli import migrate

            return migrate.main(chosen)
        case "view":
            from agent_runtime.cli import view

            return view.main(chosen)
        case None:
            parser.print_help()
            return 2
        case _:
            from agent_runtime.cli import operate

            return operate.main(chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agent-runtime", description="Agent runs that survive their worker.", epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"agent-runtime {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    provision = commands.add_parser("provision", help="work the provisioning agent (as `python -m agent_runtime` does)")
    provision.add_argument("--resume", action="store_true", help="only a run that is stored; to find it taken is no error")
    provision.add_argument(
        "--metrics-port", type=int, metavar="N", help="serve Prometheus metrics on 127.0.0.1:N (default: METRICS_PORT, or not)"
    )
    _add_operating(commands)
    commands.add_parser("demo", help="see runs survive their workers, offline, in a few seconds")
    completion = commands.add_parser("completion", help="print what completes these commands in a shell")
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    doctor = commands.add_parser("doctor", help="say what this machine has, and what is not as it should be")
    doctor.add_argument("--store", metavar="URL", help="the store to look at (default: DATABASE_URL)")
    doctor.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    return parser


def _add_operating(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from agent_runtime.cli import migrate, view
    from agent_runtime.cli.keys import add_keygen
    from agent_runtime.cli.operate import add_commands
    from agent_runtime.supervisor import add_options

    view.add_options(commands.add_parser("view", help="serve the run viewer: every run in a browser, live"))
    add_options(commands.add_parser("supervisor", help="start a worker on every run whose worker died"))
    add_commands(commands)
    migrate.add_commands(commands)
    add_keygen(commands)


def _print_completion(parser: argparse.ArgumentParser, shell: str) -> int:
    try:
        import shtab
    except ImportError:
        raise InvalidSetting("completion needs shtab; pip install 'durable-agent-runtime[completion]'") from None
    print(shtab.complete(parser, shell=shell))
    return 0
