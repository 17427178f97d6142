"""One measurement in a process of its own: `python -m bench.job MODULE.FUNCTION OPTIONS`, its figures as JSON on stdout.

It imports what the job needs and nothing else: the start of the process is part of what some jobs measure.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any, TypeAlias

Figures: TypeAlias = dict[str, float]


def work(name: str, options: dict[str, Any]) -> Figures:
    """What the job `module.function` of this package measured."""
    module, function = name.split(".")
    figures: Figures = getattr(importlib.import_module(f"bench.{module}"), function)(**options)
    return figures


if __name__ == "__main__":
    print(json.dumps(work(sys.argv[1], json.loads(sys.argv[2]))))
