"""A program whose system calls are recorded: it makes the key file, says so once it has the key, and prints the key.

python -m tests.powercut.key_file FILE SIDE
"""

from __future__ import annotations

import os
import sys

from agent_runtime.journal.keys import key_beside

KEY = bytes(range(32))


def main() -> None:
    path, side = sys.argv[1:]
    channel = os.open(side, os.O_WRONLY | os.O_CREAT)
    os.write(channel, b"begin 1\n")
    assert key_beside(path, KEY) == KEY
    os.write(channel, b"acked 1\n")


if __name__ == "__main__":
    main()
