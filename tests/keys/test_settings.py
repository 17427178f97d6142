"""Keys and rings as a setting holds them, and the command that makes a key."""

from __future__ import annotations

import asyncio
import base64
import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.cli import main
from agent_runtime.crash import CrashPoint
from agent_runtime.errors import InvalidKey, InvalidSetting
from agent_runtime.journal.keys import THE_ONE, KeyRing, parse_ring, write_key
from tests.bench import Bench, Place, Script, Worker
from tests.keys.rings import KEYS, NEW_KEY, OLD, OLD_KEY

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


Say = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs a command on the store `runs.db` under a key, in this process; gives its exit code and its lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", "sqlite:///runs.db")

    def run(key: str, *words: str) -> tuple[int, list[str]]:
        monkeypatch.setenv("CHECKPOINT_KEY", key)
        code = main(words)
        said = capsys.readouterr()
        return code, (said.out + said.err).splitlines()

    return run


def test_a_ring_is_turned_from_the_command_line_step_by_step(tmp_path: Path, say: Say) -> None:
    for name, key in KEYS.items():
        write_key(tmp_path / f"{name}.key", key)
    old, new = (f"{name}=file:{name}.key" for name in KEYS)
    asyncio.run(leave_two_runs(tmp_path))
    both = f"{old},{new},encrypts=new"
    assert say(both, "verify")[1][1:] == ["under key old: 2 runs"]
    code, lines = say(f"{both},revoked=old", "reseal")
    assert (code, lines[-1]) == (1, "0 of 2 runs moved; left as they were: 2")
    moved = [json.loads(line) for line in say(both, "reseal", "--json", "--by", "ana")[1]]
    assert [(each["run"], each["was"], each["now"], each["moved"]) for each in moved] == [
        ("dead", "old", "new", True), ("whole", "old", "new", True),
    ]  # fmt: skip
    assert say(both, "reseal") == (0, ["0 of 2 runs moved; left as they were: none"])
    assert say(f"{both},revoked=old", "verify")[1][1:] == ["under key new: 2 runs"]
    assert {json.loads(line)["key"] for line in say(both, "verify", "--json")[1]} == {"new"}
    code, [refused] = say(f"{new},encrypts=new", "show", "dead")
    assert (code, "UnknownKey" in refused, "'old'" in refused) == (1, True, True)
    shown = "\n".join(say(both, "show", "dead", "--redact", "amount")[1])
    assert ("4711" in shown, "[redacted]" in shown, "rekeyed" in shown) == (False, True, True)
    assert "4711" in "\n".join(say(both, "show", "dead")[1])


async def leave_two_runs(folder: Path) -> None:
    """One that is done and one whose worker died, under the old key."""
    place, model = Place("sqlite", folder), Script([("charge_i", {"amount": 4711})], "done")
    place.is_tampered = True
    await Worker(place).run(model, Bench().registry, "whole", checkpoint_key=OLD)
    dying = Worker(place).killed_at(CrashPoint.AFTER_CALL)
    await dying.run_and_die(model, Bench().registry, "dead", checkpoint_key=OLD)
    await place.close()
