"""Keys and rings as a setting holds them, and the command that makes a key."""

from __future__ import annotations

import base64
import json
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.cli import main
from agent_runtime.errors import InvalidKey, InvalidSetting
from agent_runtime.journal.keys import THE_ONE, KeyRing, parse_ring, write_key
from tests.keys.rings import KEYS, NEW_KEY, OLD_KEY
from tests.processes.job import Job
from tests.processes.test_operating import command

OLD_TEXT, NEW_TEXT = (base64.b64encode(key).decode() for key in KEYS.values())


def test_a_setting_without_an_id_is_one_key() -> None:
    assert parse_ring(OLD_TEXT) == KeyRing({THE_ONE: OLD_KEY}, THE_ONE)


@given(st.binary(min_size=16, max_size=64))
def test_no_key_is_taken_for_a_ring(key: bytes) -> None:
    assert parse_ring(base64.b64encode(key).decode()) == KeyRing.of(key)
    assert parse_ring(f"a={base64.b64encode(key).decode()}") == KeyRing({"a": key}, "a")


def test_the_last_key_of_a_ring_is_active_and_each_may_be_in_a_file(tmp_path: Path) -> None:
    write_key(tmp_path / "a=b", NEW_KEY)
    for text in (f"old={OLD_TEXT},new={NEW_TEXT}", f"old={OLD_TEXT}, new=file:{tmp_path / 'a=b'} "):
        assert parse_ring(text) == KeyRing(KEYS, "new")
    assert parse_ring(f"new={NEW_TEXT},old={OLD_TEXT}").active == "old"
    assert parse_ring(f"file:{tmp_path / 'a=b'}") == KeyRing.of(NEW_KEY)


def test_a_ring_says_which_keys_encrypt_and_which_are_revoked() -> None:
    third = f"third={NEW_TEXT}"
    text = f"old={OLD_TEXT},{third},new={NEW_TEXT},encrypts=new,revoked=old,revoked=third"
    ring = parse_ring(text)
    assert (ring.active, ring.encrypts, ring.revoked) == ("new", {"new"}, {"old", "third"})


@pytest.mark.parametrize(
    "text",
    [f"old={OLD_TEXT},", f"={OLD_TEXT}", f"old={OLD_TEXT},old={NEW_TEXT}", f"old={OLD_TEXT},{NEW_TEXT}", "revoked=old",
     "old=short,",
     f"old={OLD_TEXT},revoked=old", f"old={OLD_TEXT},encrypts=new", f"old={OLD_TEXT},new=file:/no/such/file", "a=b"],
)  # fmt: skip
def test_text_that_is_no_ring_is_refused_and_no_key_is_shown(text: str) -> None:
    with pytest.raises(InvalidKey) as refused:
        parse_ring(text)
    assert OLD_TEXT not in str(refused.value)
    assert NEW_TEXT not in str(refused.value)


def test_a_key_is_written_for_its_owner_alone_and_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_key(path, OLD_KEY)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(InvalidSetting, match="already"):
        write_key(path, NEW_KEY)
    assert base64.b64decode(path.read_text()) == OLD_KEY
    with pytest.raises(InvalidSetting, match="no key could be written"):
        write_key(tmp_path / "no" / "folder", OLD_KEY)
    assert [each.name for each in tmp_path.iterdir()] == ["key"]


def test_keygen_prints_what_stands_in_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["keygen"]) == 0
    assert len(parse_ring(capsys.readouterr().out.strip()).keys[THE_ONE]) == 32
    assert main(["keygen", "--id", "2031", "--out", "keys"]) == 0
    said = capsys.readouterr().out
    assert said == f"2031=file:{tmp_path / 'keys'}\n"
    assert parse_ring(said.strip()).active == "2031"
    assert main(["keygen", "--id", "2031", "--out", "keys"]) == 1
    assert "already" in capsys.readouterr().err
    assert main(["keygen", "--id", ""]) == 1
    assert "printable" in capsys.readouterr().err


def test_a_ring_is_turned_from_the_command_line_step_by_step(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for name, key in KEYS.items():
        write_key(tmp_path / f"{name}.key", key)
    old, new = "old=file:old.key", "new=file:new.key"
    assert job.run(RUN_ID="whole", CHECKPOINT_KEY=old).code == 0
    assert job.run(RUN_ID="dead", CHECKPOINT_KEY=old, CRASH_AT="after_call").code == 1
    both = f"{old},{new},encrypts=new"
    assert command(job, "verify", CHECKPOINT_KEY=both).stdout.splitlines()[1:] == ["under key old: 2 runs"]
    revoked = command(job, "reseal", CHECKPOINT_KEY=f"{both},revoked=old")
    assert (revoked.returncode, revoked.stdout.splitlines()[-1]) == (1, "0 of 2 runs moved; left as they were: 2")
    said = command(job, "reseal", "--json", "--by", "ana", CHECKPOINT_KEY=both)
    lines = [json.loads(line) for line in said.stdout.splitlines()]
    assert [(each["run"], each["was"], each["now"], each["moved"]) for each in lines] == [
        ("dead", "old", "new", True), ("whole", "old", "new", True),
    ]  # fmt: skip
    again = command(job, "reseal", CHECKPOINT_KEY=both)
    assert (again.returncode, again.stdout) == (0, "0 of 2 runs moved; left as they were: none\n")
    assert command(job, "verify", CHECKPOINT_KEY=f"{both},revoked=old").stdout.splitlines()[1:] == ["under key new: 2 runs"]
    assert job.run(RUN_ID="dead", CHECKPOINT_KEY=f"{both},revoked=old").code == 0
    assert "UnknownKey" in command(job, "show", "dead", CHECKPOINT_KEY=new).stderr
