"""`agent-runtime demo`: the whole story in a few seconds, offline: it kills its own workers, and checks what it says.

Every worker is a process of its own, and dies by SIGKILL. The remote is a file that outlives them all. Whatever does not
come true ends the demo with exit code 1.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

from agent_runtime import codec
from agent_runtime.approvals import ApprovalRequest, Verdict, digest_of
from agent_runtime.cli.demo_worker import AMOUNT, KEY, RUN, STORE, Remote
from agent_runtime.cli.operate import print_picture
from agent_runtime.clock import SYSTEM_CLOCK
from agent_runtime.errors import AgentRuntimeError, CheckpointStoreCorrupt, VerdictRefused
from agent_runtime.journal.seal import key_beside
from agent_runtime.runs import Runs
from agent_runtime.stores.sqlite import SQLiteCheckpointStore

WORKER_SECONDS = 30


class DemoFailed(AgentRuntimeError):
    """Something that the demo says did not come true."""


def main() -> int:
    """Tell it all; gives the exit code."""
    began = SYSTEM_CLOCK.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="agent-runtime-demo."))
    try:
        asyncio.run(_tell(folder))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _say(f"All of it came true, in {SYSTEM_CLOCK.monotonic() - began:.1f} s. The run is kept; look at it in the browser:")
    print(f"   agent-runtime view --store sqlite:///{folder / STORE}")
    print(f"\nand remove it with   rm -r {folder}")
    return 0


async def _tell(folder: Path) -> None:
    remote = Remote(folder)
    print("An agent sets up a server, pays for it and mails that it is up. Its workers die.")

    _say("1. A worker dies after the server was made, before anybody wrote that down")
    _die(folder, "create_server")
    _check(remote.made("server") == 1, "the remote has 1 server; the journal knows that it was begun, and no more")

    _say("2. The next one replays the decision, and sends the call again under its key")
    _check(_work(folder) == "paused", "it goes on, and stops at the payment: that needs a person")
    _check(remote.made("server") == 1, "the remote knew the key: still 1 server")

    _say("3. What a person approves is what is paid, to the cent")
    await _approve(folder)

    _say("4. Another worker pays, and dies after the mail went out")
    _die(folder, "send_mail")
    _check((remote.made("payment"), remote.made("mail")) == (1, 1), "1 payment, 1 mail; nobody wrote down that it was sent")

    _say("5. The last one asks the outbox what became of the mail, and ends the run")
    _check(_work(folder) == "done", "the outbox has it: recorded, and not sent again")
    made = {what: remote.made(what) for what in ("server", "payment", "mail", "reply")}
    _check(
        made == {"server": 1, "payment": 1, "mail": 1, "reply": 4},
        "1 server, 1 payment, 1 mail; 4 decisions, each bought once",
    )

    _say("6. The same as a picture: two workers lost, what they did not have to do again")
    await _draw(folder)

    _say("7. Somebody edits a row of the store: nothing is paid on its word")
    await _edit_a_row(folder)
    key_beside(f"{folder / STORE}.key", KEY)  # beside the store, where every command looks for it


def _say(text: str) -> None:
    print(f"\n{text}\n", flush=True)


def _check(came_true: bool, text: str) -> None:
    if not came_true:
        raise DemoFailed(f"expected: {text}. It did not come true")
    print(f"   ✓ {text}" if _has_unicode() else f"   ok: {text}", flush=True)


def _has_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")


def _send(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agent_runtime.cli.demo_worker", str(folder), *more],
        capture_output=True, text=True, timeout=WORKER_SECONDS, check=False,
    )  # fmt: skip


def _die(folder: Path, tool: str) -> None:
    ended = _send(folder, tool)
    _check(ended.returncode == -signal.SIGKILL, f"a worker, killed inside {tool}")


def _work(folder: Path) -> str:
    ended = _send(folder)
    return ended.stdout.strip() if ended.returncode == 0 else f"{ended.stdout}{ended.stderr}"


async def _approve(folder: Path) -> None:
    store = SQLiteCheckpointStore(folder / STORE)
    runs = Runs(store, checkpoint_key=KEY)
    try:
        [request] = await runs.pending(RUN)
        print(f"   asked: {request.tool} {_told(request)}")
        try:
            await runs.answer(_forged(request))
            refused = ""
        except VerdictRefused as error:
            refused = str(error)
        _check(bool(refused), f"an approval of {AMOUNT * 10} for this request is refused")
        await runs.approve(request, by="you")
        _check(True, f"yours is taken: {_told(request)}, and no other amount")
    finally:
        await store.close()


def _told(request: ApprovalRequest) -> str:
    return " ".join(f"{name}={value}" for name, value in request.args.items())


def _forged(request: ApprovalRequest) -> Verdict:
    """An approval of ten times the amount."""
    digest = digest_of(request.run_id, request.id, request.tool, codec.encode({"amount": AMOUNT * 10}))
    return request.approve(by="somebody")._replace(digest=digest)


async def _draw(folder: Path) -> None:
    store = SQLiteCheckpointStore(folder / STORE)
    try:
        print_picture(await Runs(store, checkpoint_key=KEY).show(RUN))
    finally:
        await store.close()


async def _edit_a_row(folder: Path) -> None:
    """In a copy: a record says ten times the amount."""
    copy = folder / "edited.db"
    with sqlite3.connect(folder / STORE) as source, sqlite3.connect(copy) as target:
        source.backup(target)
        number = _edit(target)
    store = SQLiteCheckpointStore(copy)
    try:
        await Runs(store, checkpoint_key=KEY).show(RUN)
        refused = ""
    except CheckpointStoreCorrupt as error:
        refused = str(error)
    finally:
        await store.close()
        _remove(folder, "edited.db*")
    _check(f"record {number}" in refused, f"refused: the seal of record {number} does not hold")


def _edit(database: sqlite3.Connection) -> int:
    find = "SELECT rowid, number, body FROM journal WHERE instr(body, ?) ORDER BY number"
    rowid, number, body = database.execute(find, (b'"amount":%d' % AMOUNT,)).fetchone()
    edited = bytes(body).replace(b'"amount":%d' % AMOUNT, b'"amount":%d' % (AMOUNT * 10))
    database.execute("UPDATE journal SET body = ? WHERE rowid = ?", (edited, rowid))
    return int(number)


def _remove(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        path.unlink()
