"""Run a command beside a Postgres of its own: `with_postgres.py COMMAND…`, where `{url}` stands for the server's address.

The server is one of the tests' (tests/servers.py): nothing is left of it when the command has ended, however it ends.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.servers import Origin, own_origins, start


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the command is ended with this process
    with closing(start(next(iter(own_origins()), Origin("nowhere")))) as server:
        return subprocess.run([word.replace("{url}", server.url) for word in sys.argv[1:]], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
