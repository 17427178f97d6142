"""Every file of `examples/` runs as a user would start it, offline and in an empty folder, and says what it should."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SECONDS = 60

KEY_LINES = {
    "tool_loop": [
        "!!! the worker dies: the bank has acted, nothing is written down",
        "INFO recovered run=order-7 replayed=3 rerun=1",
        "INFO calling run=order-7 seq=1 tool=charge_card key=order-7:1 attempt=2",
        "3 model calls, 1 charge at the bank",
    ],
    "in_doubt": [
        "done: It was sent to ana. 1 in the outbox",
        "done: It was sent to ana. 2 in the outbox",
        "refused: call '0' of run 'mail-3' cannot be settled as not done",
        "done: It was sent to ana. 3 in the outbox",
    ],
    "refund": [
        "paused: refund {'order': 'B-2', 'amount': 900} waits for a person",
        "done: refunded 20 for A-1 [refund-7:0.0]; refunded 90 for B-2 [refund-7:0.1]",
        "2 model calls",
        "at the bank: ['20 for A-1 [refund-7:0.0]', '90 for B-2 [refund-7:0.1]']",
    ],
    "tenants": [
        "order-1: run 'order-1' is not as it was written: its row is of another tenant or of no known format. Nothing was "
        "run. Restore the store from a copy you trust, and find out who can write to it."
    ],
    "ask": ["done - closed the account of Kim: asked for it"],
    "keys": [
        "ana: from 2030 to 2031",
        "refused: run 'eve' is sealed under key '2030', which is revoked",
        "to be read in the file: ['ana', 'ben', 'eve']",
    ],
    "large_values": [
        "a blob of 2,000,032 bytes beside a store of less than 1,000,000: True",
        "it goes with its run: True",
        "refused: the result of tool 'charge' takes 8,000,002 bytes as it is recorded, and 1,000,000 are allowed",
        "done: receipt 17, in the bank's portal",
    ],
    "operate": ["ana done step 1", "claim 1 (start), which ended it: done", "released: False", "corrupt: 0"],
    "retention": [
        "older than a month: 0",
        "ana was done and is now in ana.jsonl",
        "the id of ana is not used again",
        "changed: 2: the seal of the row does not hold under the key 'key'",
    ],
    "telemetry": [
        "!!! the worker dies",
        "  execute_tool charge_card  attempt=2",
        "invoke_agent seller  replayed=3  rerun=1  run.status=done  linked to the owner before",
        'agent_runtime_calls_total{outcome="done",tool="charge_card"} 1.0',
        "agent_runtime_takeovers_total 1.0",
    ],
    "tools": [
        '    {"show":"Hamlet","day":"2030-05-01"}',
        "    error: SoldOut: no seats on that day",
        "    error: ToolError: order 7 was refunded last week",
        "attempts of call_taxi: [1, 2, 3]",
    ],
}


def start(example: str, folder: Path) -> list[str]:
    """The lines that an example prints when it runs in the folder. Anything on standard error is a fault of it."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / f"{example}.py")],
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.splitlines()


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(KEY_LINES) | {"smallest", "own_store", "sweep", "tickets"}


@pytest.mark.parametrize("example", KEY_LINES)
def test_an_example_prints_what_it_is_about_and_leaves_nothing_behind(example: str, tmp_path: Path) -> None:
    lines = start(example, tmp_path)
    assert [line for line in KEY_LINES[example] if line not in lines] == []
    assert list(tmp_path.iterdir()) == []


def test_the_smallest_program_started_again_gives_the_stored_result_and_asks_nobody(tmp_path: Path) -> None:
    assert start("smallest", tmp_path) == ["the model is asked", "the model is asked", "done - The sum is 42."]
    assert start("smallest", tmp_path) == ["done - The sum is 42."]


def test_the_tickets_are_sold_once_and_started_again_it_gives_the_stored_result(tmp_path: Path) -> None:
    sold = [
        "done - mailed tickets for Hamlet",
        "held 2 seats for Hamlet [order-7:0/hold]",
        "charged 80 for Hamlet [order-7:1/pay]",
        "mailed tickets for Hamlet [order-7:2/send]",
    ]
    assert start("tickets", tmp_path) == sold
    assert start("tickets", tmp_path) == sold


def test_the_example_store_passes_every_case_of_the_contract_and_a_worse_one_does_not(tmp_path: Path) -> None:
    store, worse = start("own_store", tmp_path)
    assert store.startswith("FolderStore: ")
    assert store.endswith(" passed, 0 failed")
    assert worse.endswith(" fails: the answer must be fenced, found ok")
    assert list(tmp_path.iterdir()) == []


def test_the_example_sweep_finds_the_tool_that_does_not_keep_what_it_declares_and_no_other(tmp_path: Path) -> None:
    honest, careless, found = start("sweep", tmp_path)
    assert honest.startswith("honest: ")
    assert honest.endswith(" runs, 0 violations")
    assert careless.startswith("careless: ")
    assert not careless.endswith(" runs, 0 violations, such as")
    assert "one key, one effect, one set of arguments" in found
