"""What becomes of a charge whose process is killed, of one that two workers go on with, and of one whose price is edited.

    python bench/peers/killed.py langgraph=PYTHON dbos=PYTHON temporal=PYTHON agent_runtime=.venv/bin/python

Each PYTHON is an interpreter that has the peer; `requirements.txt` beside this file names the versions that were measured.
For `temporal` the variable `TEMPORAL` names a running server. The programs are those beside this file, each started as its
user would. The bank's own file counts.
"""

import base64
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
SECONDS = 90


def main() -> None:
    for peer, _, python in (argument.partition("=") for argument in sys.argv[1:]):
        rules = ("idempotent", "none") if peer == "agent_runtime" else ("",)
        for rule in rules:
            for measure in (killed, together, edited):
                if peer == "temporal" and measure is not killed:
                    continue
                with TemporaryDirectory() as folder:
                    print(f"{peer} {rule} {measure.__name__}: {measure(Peer(peer, python, rule, Path(folder)))}", flush=True)


class Peer:
    def __init__(self, name: str, python: str, rule: str, folder: Path) -> None:
        self.name, self.python, self.rule, self.folder = name, shutil.which(python) or python, rule, folder

    def begin(self, what: str, **settings: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "BANK": str(self.folder / "bank.txt"), "RULE": self.rule, **settings}
        command = [os.path.abspath(self.python), str(HERE / f"with_{self.name}.py"), what]
        return subprocess.Popen(
            command, cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def ends(self, process: subprocess.Popen[str]) -> str:
        """The last line that it printed."""
        try:
            said, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            said = f"{process.communicate()[0]}\nstill running after {SECONDS} s"
        return (said.strip().splitlines() or ["nothing"])[-1][:160]

    def bank(self) -> str:
        charges = (self.folder / "bank.txt").read_text(encoding="utf-8").splitlines()
        keys = {charge.split()[-1] for charge in charges}
        return f"the bank was asked {len(charges)} times: {charges}, keys {sorted(keys)}"

    def die(self) -> None:
        self.ends(self.begin("start", DIE="1"))


def killed(peer: Peer) -> str:
    """Killed between act and record, then recovered."""
    peer.die()
    said = peer.ends(peer.begin("recover"))
    return f"{peer.bank()}; {said}"


def together(peer: Peer) -> str:
    """The same, recovered by two processes at once."""
    peer.die()
    both = [peer.begin("recover", SLOW="1") for _ in range(2)]
    said = [peer.ends(process) for process in both]
    return f"{peer.bank()}; {said}"


def edited(peer: Peer) -> str:
    """The same, with another price in the stored bytes of what was finished."""
    peer.die()
    changed = sum(edit(file) for file in peer.folder.glob("runs.db*"))
    said = peer.ends(peer.begin("recover"))
    return f"{changed} files edited; {peer.bank()}; {said}"


def edit(file: Path) -> bool:
    """Put another price into every value of a database that holds the old one."""
    if file.name != "runs.db":
        return False
    changed = 0
    with sqlite3.connect(file) as database:
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for _, column, *_ in database.execute(f"PRAGMA table_info('{table}')").fetchall():
                for row, value in database.execute(f'SELECT rowid, "{column}" FROM "{table}"').fetchall():
                    if (other := with_other_price(value)) != value:
                        changed += 1
                        database.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE rowid = ?', (other, row))
    return changed > 0


def with_other_price(value: object) -> object:
    match value:
        case str():
            return in_base64(value) or value.replace("price 20", "price 90")
        case bytes():
            return value.replace(b"price 20", b"price 90")
        case _:
            return value


def in_base64(value: str) -> str:
    """The same for bytes that are stored as text; nothing for what is none."""
    try:
        raw = base64.b64decode(value, validate=True)
    except ValueError:
        return ""
    return base64.b64encode(raw.replace(b"price 20", b"price 90")).decode() if b"price 20" in raw else ""


if __name__ == "__main__":
    main()
