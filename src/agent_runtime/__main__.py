"""`python -m agent_runtime`: the provisioning agent; with arguments, the command line."""

from __future__ import annotations

import sys


def main() -> int:
    if len(sys.argv) > 1:
        from agent_runtime.cli import main as command_line

        return command_line(sys.argv[1:])
    from agent_runtime import provision

    return provision.main()


if __name__ == "__main__":
    sys.exit(main())
