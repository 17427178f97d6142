"""Places that are hard to write to: read-only ones and full ones, made by whatever means this machine allows."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BOUND_BY_MODES = ("setpriv", "--bounding-set=-dac_override")
"""Begins a command that root runs, and whom file modes shall bind all the same."""


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[bool]:
    """A file system of that size at the folder, until the block is left; false where this machine mounts nothing."""
    folder.mkdir(exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0777", "tmpfs", str(folder)]
    if not may_mount() or not _succeeds(words):
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def may_mount() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


@contextmanager
def read_only(folder: Path, *, is_mounted: bool) -> Iterator[tuple[str, ...]]:
    """Nothing in the folder can be changed by a command that begins with the words given."""
    if is_mounted:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield ()
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        return
    modes = {path: path.stat().st_mode for path in (folder, *folder.iterdir())}
    for path in modes:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        yield BOUND_BY_MODES if may_mount() else ()
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


def fill(folder: Path) -> Path:
    """A file that takes all the room that is left."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            while _writes(file.fileno(), bytes(size)):
                pass
    return ballast


def _writes(descriptor: int, data: bytes) -> bool:
    try:
        return os.write(descriptor, data) > 0
    except OSError:
        return False


def _succeeds(words: list[str]) -> bool:
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
