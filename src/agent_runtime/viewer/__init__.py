"""The run viewer: every run of a store in a browser, live, with what a person may decide. Needs the `viewer` extra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Identity", "make_app"]

if TYPE_CHECKING:
    from agent_runtime.viewer.app import make_app
    from agent_runtime.viewer.asking import Identity


def __getattr__(name: str) -> Any:
    from importlib import import_module

    match name:
        case "make_app":
            return import_module("agent_runtime.viewer.app").make_app
        case "Identity":
            return import_module("agent_runtime.viewer.asking").Identity
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
