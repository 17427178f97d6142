"""`make bench`: our speed beside the least that journals the same work, measured in turns in one pass. See docs/speed.md."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the modules beside this file are those of a package, `bench`
    from bench.command import main

    sys.exit(main(sys.argv[1:]))
