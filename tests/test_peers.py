"""Our own rows of the comparison are what the program that it names measures."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.pages import TOP

PEERS = TOP / "bench" / "peers"


def measures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("killed", PEERS / "killed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("rule", "said"),
    [("idempotent", "asked 2 times.*keys \\['order-7:1/charge'\\]; done"), ("none", "asked 1 times.*RecoveryNeedsDecision")],
)
def test_an_order_killed_between_act_and_record_ends_as_the_comparison_says(rule: str, said: str, tmp_path: Path) -> None:
    killed = measures()
    assert re.search(said, killed.killed(killed.Peer("agent_runtime", sys.executable, rule, tmp_path)))


def test_an_order_whose_price_is_edited_is_refused_as_the_comparison_says(tmp_path: Path) -> None:
    killed = measures()
    found = killed.edited(killed.Peer("agent_runtime", sys.executable, "idempotent", tmp_path))
    assert re.search("1 files edited.*asked 1 times.*CheckpointStoreCorrupt", found)


def test_the_programs_for_other_runtimes_are_python() -> None:
    for program in PEERS.glob("*.py"):
        compile(program.read_text(encoding="utf-8"), program.name, "exec")
