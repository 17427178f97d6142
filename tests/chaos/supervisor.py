"""The supervisor of a chaos run: the real one, over a command that arms the crash point of poison runs alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from agent_runtime.supervisor import Program, add_options, supervise
from agent_runtime.worker import PROVISION

COMMAND = ("sh", str(Path(__file__).with_name("worker.sh")), sys.executable)


def main() -> int:
    """What `python -m agent_runtime.supervisor` does."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.supervisor")
    add_options(parser)
    return supervise(parser.parse_args(), program=Program(PROVISION, COMMAND))


if __name__ == "__main__":
    sys.exit(main())
