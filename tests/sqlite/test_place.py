"""Where a SQLite file may be, and with which SQLite: a disk of this host, and what the doctor says of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_runtime.errors import StoreRefused
from agent_runtime.journal.store import CheckpointStore
from agent_runtime.stores import open_store, sqlite_file
from agent_runtime.stores.sqlite_file import NETWORKS, file_system_of, has_wal_reset_fix


def mounted(monkeypatch: pytest.MonkeyPatch, folder: Path, *lines: str) -> None:
    """Have the system say that this is mounted."""
    mounts = folder / "mounts"
    mounts.write_text("".join(f"{line} rw,relatime 0 0\n" for line in ("/dev/vda1 / ext4", "proc /proc proc", *lines)))
    monkeypatch.setattr(sqlite_file, "MOUNTS", str(mounts))


def escaped(path: Path) -> str:
    return str(path).replace(" ", r"\040")


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+aiosqlite"])
@pytest.mark.parametrize("kind", ["nfs4", "cifs", "smb3", "9p", "fuse.sshfs"])
async def test_a_file_on_a_network_is_refused_and_not_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, scheme: str
) -> None:
    share = tmp_path / "a share"
    share.mkdir()
    mounted(monkeypatch, tmp_path, f"there:/x {escaped(share)} {kind}")
    for path in (share / "runs.db", linked(tmp_path / "link", share) / "runs.db"):
        store = open_store(f"{scheme}:///{path}")
        with pytest.raises(StoreRefused, match=f"kind {kind}.*local disk.*Postgres"):
            await store.list_runs()
        await store.close()
    assert list(share.iterdir()) == []


def linked(link: Path, target: Path) -> Path:
    link.symlink_to(target)
    return link


async def test_a_disk_that_is_mounted_inside_of_a_network_is_no_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    disk = tmp_path / "share" / "disk"
    disk.mkdir(parents=True)
    mounted(monkeypatch, tmp_path, f"there:/x {tmp_path}/share nfs", f"/dev/vdb {disk} xfs", f"there:/y {tmp_path}/sha nfs")
    assert file_system_of(str(disk / "runs.db")) == "xfs"
    assert file_system_of(str(tmp_path / "shar" / "runs.db")) == "ext4"
    await used(open_store(f"sqlite:///{disk}/runs.db"))
    mounted(monkeypatch, tmp_path, f"/dev/vdb {disk} xfs", f"there:/x {disk} nfs")
    assert file_system_of(str(disk / "runs.db")) == "nfs", "what is mounted later hides what was there"


def test_a_sandbox_whose_whole_disk_is_lent_to_it_has_a_disk_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mounts").write_text("none / 9p rw,trans=fd 0 0\n")
    monkeypatch.setattr(sqlite_file, "MOUNTS", str(tmp_path / "mounts"))
    assert file_system_of(str(tmp_path)) not in NETWORKS


async def used(store: CheckpointStore) -> None:
    assert await store.list_runs() == []
    await store.close()


async def test_where_the_system_does_not_tell_its_mounts_a_file_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sqlite_file, "MOUNTS", str(tmp_path / "nothing"))
    await used(open_store(f"sqlite:///{tmp_path}/runs.db"))


def test_the_file_system_of_this_test_is_told_and_is_no_network(tmp_path: Path) -> None:
    if os.path.exists(sqlite_file.MOUNTS):
        kind = file_system_of(str(tmp_path))
        assert kind
        assert kind not in NETWORKS


@pytest.mark.parametrize(
    ("version", "is_fixed"),
    [
        ((3, 40, 1), False),
        ((3, 44, 5), False),
        ((3, 44, 6), True),
        ((3, 45, 0), False),
        ((3, 50, 6), False),
        ((3, 50, 7), True),
        ((3, 51, 2), False),
        ((3, 51, 3), True),
        ((3, 54, 1), True),
    ],
)
def test_the_releases_that_mend_the_log_are_known(version: tuple[int, ...], is_fixed: bool) -> None:
    assert has_wal_reset_fix(version) is is_fixed


def test_the_doctor_names_sqlite_and_whether_it_mends_the_log() -> None:
    facts = json.loads(subprocess.check_output([sys.executable, "-m", "agent_runtime", "doctor", "--json"]))
    warned = [warning for warning in facts["warnings"] if "3.44.6, 3.50.7" in warning and facts["sqlite"] in warning]
    assert facts["wal_reset_fix"] == ("in this SQLite" if has_wal_reset_fix() else "not in this SQLite")
    assert len(warned) == (0 if has_wal_reset_fix() else 1)


def test_the_doctor_says_of_a_file_on_a_network_what_the_store_would(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from agent_runtime.cli import doctor

    mounted(monkeypatch, tmp_path, f"there:/x {tmp_path} nfs4")
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{tmp_path}/runs.db")
    assert doctor.main(as_json=False) == 0
    assert "kind nfs4" in capsys.readouterr().out
