"""What of a store's URL names its blob folder: `?blobs=FOLDER&blobs_above=BYTES`, behind whatever the store itself takes."""

from __future__ import annotations

from typing import NamedTuple

from agent_runtime.errors import InvalidSetting

ABOVE = 64 * 1024
"""From how many bytes on a body is a blob."""


class Blobs(NamedTuple):
    """Where the blobs of a store lie, and from which size on a body is one."""

    folder: str
    above: int


def split_blobs(url: str) -> tuple[str, Blobs | None]:
    """The URL of the store itself, and its blob folder where one is named; every other part of it stays as it is."""
    front, mark, query = url.partition("?")
    parts = query.split("&") if mark else []
    ours = dict(part.split("=", 1) for part in parts if part.startswith(("blobs=", "blobs_above=")))
    if not ours:
        return url, None
    rest = "&".join(part for part in parts if not part.startswith(("blobs=", "blobs_above=")))
    from urllib.parse import unquote

    folder, above = unquote(ours.get("blobs", "")), ours.get("blobs_above", str(ABOVE))
    if not folder:
        raise InvalidSetting(
            "blobs_above= is for a store with a blob folder: name it too, ?blobs=/var/blobs&blobs_above=65536"
        )
    if not (above.isascii() and above.isdigit()):
        raise InvalidSetting(f"blobs_above= is a whole number of bytes, found {above!r}")
    return f"{front}?{rest}" if rest else front, Blobs(folder, int(above))
