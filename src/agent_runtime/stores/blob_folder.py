"""A folder of blobs: `<shard>/<digest of the run's id>/<sha256 of the content>`. What is in here blocks: call it on a thread.

Rules of this file:

* A blob is written under another name, synced, and renamed; then its folder is synced. So a name stands for a whole content.
* Whoever wants a blob that is there touches it first; one that cannot be touched is written anew. Whoever removes an old
  one renames it first and looks again how old it is. So none is removed that somebody wants by now, on whatever host.
* The folder of a run holds the run's id, in a file that is touched like a blob: so what lies there can be judged, and an id
  that does not fit its folder judges nothing.
* The folder itself is marked as one of blobs: nothing is read, written or removed in any other, nor on a disk that is away.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import NamedTuple

from agent_runtime.entropy import Entropy
from agent_runtime.errors import InvalidSetting, NewerFormat, StoreUnavailable
from agent_runtime.ids import RunId
from agent_runtime.journal.records import LostBody
from agent_runtime.stores.blob_stub import Stub

FORMAT = b"agent_runtime blobs 1\n"
_PROGRAM = b"agent_runtime blobs "
_MARK, _RUN = "blobs", "run"
_PENDING, _ASIDE = ".tmp", ".swept"
TRIES = 8
"""How often what somebody else removes meanwhile is written again."""


class Blob(NamedTuple):
    """A content and the name that its file is to have."""

    name: str
    body: bytes


class Lying(NamedTuple):
    """What is found in the folder of one run. `run_id` is None where nothing says whose it is."""

    folder: str
    run_id: RunId | None
    files: Sequence[tuple[str, int]]
    """The names and sizes of its blobs that are old enough to be judged."""
    is_empty: bool = False
    """There is nothing in it but the word whose it is."""


class BlobFolder:
    """The blobs of one store."""

    def __init__(self, root: str, entropy: Entropy) -> None:
        self.root = os.path.abspath(root)
        self._entropy = entropy

    def open(self) -> None:
        """Refuse what is no folder for blobs, and mark one that is new. `InvalidSetting` says what is wrong with it."""
        root = self.root
        if not os.path.isdir(root):
            found = "a file" if os.path.exists(root) else "nothing"
            raise InvalidSetting(f"blobs are kept in a folder, found {found} at {root!r}; make it, with `mkdir -m 700`")
        if not os.access(root, os.R_OK | os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            raise InvalidSetting(f"the blob folder {root!r} cannot be read and written by this user; give it to them")
        try:
            if self._is_marked():
                return
            if others := [name for name in os.listdir(root) if not name.endswith(_PENDING)]:
                if self._is_marked():  # by another process, just now
                    return
                raise InvalidSetting(
                    f"{root!r} is no blob folder: it holds {sorted(others)[0]!r}; name an empty folder, one for each store"
                )
            self._put(root, Blob(_MARK, FORMAT))
            _sync_folder(root)
        except OSError as error:
            raise InvalidSetting(f"the blob folder {root!r} cannot be used: {error}; name one that can be written") from error

    def _is_marked(self) -> bool:
        try:
            with open(os.path.join(self.root, _MARK), "rb") as file:
                found = file.read(100)
        except FileNotFoundError:
            return False
        if found.startswith(_PROGRAM) and found != FORMAT:
            raise NewerFormat(f"the blob folder {self.root!r} is of another format, {found!r}; use the version that made it")
        return found == FORMAT

    def path(self, run_id: str, name: str = "") -> str:
        """Where the blob of a run lies."""
        digest = sha256(run_id.encode("utf-8", "surrogatepass")).hexdigest()
        return os.path.join(self.root, digest[:2], digest, name)

    # Writing.

    def write(self, run_id: str, blobs: Sequence[Blob]) -> None:
        """Have the blobs of a run durable when this returns. `StoreUnavailable`: something is not, and nothing names it."""
        folder = self.path(run_id)
        try:
            self._once_it_stays(lambda: self._write(folder, run_id, blobs))
        except OSError as error:
            raise StoreUnavailable(f"no blob could be written to {self.root!r}: {error}; nothing was written") from error

    def _once_it_stays(self, write: Callable[[], None]) -> None:
        for tries_left in range(TRIES - 1, -1, -1):
            try:
                return write()
            except FileNotFoundError:  # somebody removes the folder of this very run
                if not tries_left or not self._is_marked():
                    raise

    def _write(self, folder: str, run_id: str, blobs: Sequence[Blob]) -> None:
        self._claim(folder, run_id)
        for blob in blobs:
            if not _touch(os.path.join(folder, blob.name), len(blob.body)):
                self._put(folder, blob)
        _sync_folder(folder)
        self._claim(folder, run_id)

    def _claim(self, folder: str, run_id: str) -> None:
        """Have the folder say whose it is."""
        name = run_id.encode("utf-8", "surrogatepass")
        if _touch(os.path.join(folder, _RUN), len(name)):
            return
        shard = os.path.dirname(folder.rstrip(os.sep))
        for path in (shard, folder):
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
        self._put(folder, Blob(_RUN, name))
        for path in (folder, shard, self.root):
            _sync_folder(path)

    def _put(self, folder: str, blob: Blob) -> None:
        """Write a file under another name, sync it, and give it its own."""
        pending = os.path.join(folder, f"{self._entropy.draw(8).hex()}{_PENDING}")
        descriptor = os.open(pending, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            try:
                left = memoryview(blob.body)
                while left:
                    left = left[os.write(descriptor, left) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(pending, os.path.join(folder, blob.name))
        except BaseException:
            with suppress(OSError):
                os.unlink(pending)
            raise

    # Reading.

    def read(self, run_id: str, name: str, stub: Stub) -> bytes:
        """The content, or a `LostBody` that says what is wrong with its file. `StoreUnavailable` where the folder is away."""
        path = self.path(run_id, name)
        for each in (path, f"{path}{_ASIDE}", path):  # one that was being looked at may be back by now
            try:
                with open(each, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    body = file.read() if size == stub.size else b""
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StoreUnavailable(f"blob {each!r} cannot be read: {error}") from error
            if size != stub.size:
                return LostBody.of(stub.pack(), f"its blob {path!r} has {size} bytes, expected {stub.size}")
            if not stub.fits(body):
                return LostBody.of(stub.pack(), f"its blob {path!r} holds other bytes than its hash says")
            return body
        if not self._is_marked():
            raise StoreUnavailable(f"the blob folder {self.root!r} is away, or is no blob folder any more; bring it back")
        return LostBody.of(stub.pack(), f"its blob {path!r} is missing")

    # Removing.

    def drop(self, run_id: str, names: Sequence[str]) -> None:
        """Remove blobs that nothing names any more."""
        for name in names:
            with suppress(OSError):
                os.unlink(self.path(run_id, name))

    def remove(self, run_id: str) -> None:
        """Remove all blobs of a run that is no more. What stays for whatever reason is found by a sweep."""
        folder = self.path(run_id)
        for _ in range(TRIES):
            with suppress(OSError):
                for name in sorted(os.listdir(folder), key=_RUN.__eq__):  # whose they are goes last
                    os.unlink(os.path.join(folder, name))
            with suppress(OSError):
                os.rmdir(folder)
            if not os.path.exists(folder):
                return

    def folders(self) -> Iterator[str]:
        """The folders of runs."""
        for shard in sorted(os.listdir(self.root)):
            if len(shard) == 2:
                with suppress(FileNotFoundError, NotADirectoryError):
                    for name in sorted(os.listdir(os.path.join(self.root, shard))):
                        yield os.path.join(self.root, shard, name, "")

    def look(self, folder: str, before: float) -> Lying:
        """Whose folder it is, and what in it was last wanted before that time."""
        files, is_empty = [], True
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name == _RUN:
                    continue
                is_empty = False
                with suppress(FileNotFoundError):
                    found = entry.stat()
                    if found.st_mtime < before:
                        files.append((entry.name, found.st_size))
        return Lying(folder, self._whose(folder), sorted(files), is_empty)

    def _whose(self, folder: str) -> RunId | None:
        try:
            with open(os.path.join(folder, _RUN), "rb") as file:
                run_id = file.read().decode("utf-8", "surrogatepass")
        except (OSError, UnicodeDecodeError):
            return None
        return RunId(run_id) if self.path(run_id) == folder else None

    def sweep(self, lying: Lying, named: frozenset[str], before: float, *, is_gone: bool) -> None:
        """Remove what is old and not named. `is_gone`: there is no such run, so that the folder goes too once it is empty."""
        for name, _ in lying.files:
            base = name.removesuffix(_ASIDE)
            path = os.path.join(lying.folder, base)
            if base in named:
                if name != base and not os.path.exists(path):  # whoever looked at it died
                    os.rename(f"{path}{_ASIDE}", path)
            else:
                _remove_if_old(os.path.join(lying.folder, name), before)
        if is_gone:
            _remove_if_old(os.path.join(lying.folder, _RUN), before)
            with suppress(OSError):
                os.rmdir(lying.folder)


def is_named(name: str, named: frozenset[str]) -> bool:
    """Whether a record names what lies under that name."""
    return name.removesuffix(_ASIDE) in named


def _touch(path: str, size: int) -> bool:
    """Whether the file is there, whole, and counts as wanted from now on."""
    try:
        os.utime(path)
        return os.stat(path).st_size == size
    except FileNotFoundError:
        return False


def _remove_if_old(path: str, before: float) -> None:
    """Remove a file, unless somebody has wanted it since that time."""
    aside = path if path.endswith(_ASIDE) else f"{path}{_ASIDE}"
    with suppress(FileNotFoundError):
        if aside != path:
            os.rename(path, aside)
        if os.stat(aside).st_mtime < before:
            os.unlink(aside)
        elif aside != path:
            os.rename(aside, path)


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
