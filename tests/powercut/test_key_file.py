"""The key file survives a power cut from the moment that its key is given out, and is never there in part."""

from __future__ import annotations

import random
from pathlib import Path

from agent_runtime.journal.seal import parse_key
from tests.powercut.key_file import KEY
from tests.powercut.recording import Said, record
from tests.powercut.states import Recorded

EVERY_ONE = 1 << 12


def test_a_key_that_was_given_out_is_in_its_file_after_any_power_cut(tmp_path: Path) -> None:
    files, side = tmp_path / "files", tmp_path / "side"
    files.mkdir()
    calls = record(files, side, tmp_path / "log", ["-m", "tests.powercut.key_file", str(files / "key"), str(side)])
    assert Said("acked 1") in calls
    states = 0
    for acked, _, disk in Recorded(calls, []).moments():
        cut = disk.cut()
        assert cut.possible <= EVERY_ONE
        for choice in cut.choices(EVERY_ONE, random.Random(1)):
            found = cut.state(choice).get("key")
            states += 1
            assert found is not None or not acked, f"the key was given out, and its file is gone: {cut.parts}"
            if found is not None:
                (tmp_path / "found").write_bytes(found)
                assert parse_key(f"file:{tmp_path / 'found'}") == KEY
    assert states > 20
