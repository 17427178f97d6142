"""What a first run is measured against: a bare `sqlite3` script that journals the same three steps, four commits each."""

import asyncio
import json
import os
import sqlite3
import sys

STEPS = 3


async def lookup(q: str, i: int) -> str:
    return f"result {i}: " + "t" * 180


async def model(messages: list[object]) -> dict[str, object]:
    step = len(messages) // 2
    return {"text": f"step {step}: " + "m" * 170, "call": {"id": f"call_{step}", "q": f"query-{step}", "i": step}}


def begin(db: sqlite3.Connection, run: str, step: int, kind: int, args: object) -> None:
    db.execute("INSERT INTO calls VALUES (?, ?, ?, 0, ?)", (run, step, kind, json.dumps(args)))


def end(db: sqlite3.Connection, run: str, step: int, kind: int, result: object) -> None:
    values = (json.dumps(result), run, step, kind)
    db.execute("UPDATE calls SET ended = 1, body = ? WHERE run = ? AND step = ? AND kind = ?", values)


async def main(path: str) -> None:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute(
        "CREATE TABLE IF NOT EXISTS calls (run TEXT, step INTEGER, kind INTEGER, ended INTEGER, body TEXT,"
        " PRIMARY KEY (run, step, kind)) WITHOUT ROWID"
    )
    run = os.urandom(16).hex()
    messages: list[object] = []
    for step in range(STEPS):
        begin(db, run, step, 0, {})
        reply = await model(messages)
        end(db, run, step, 0, reply)
        query = f"query-{step}"
        begin(db, run, step, 1, {"q": query, "i": step})
        result = await lookup(query, step)
        end(db, run, step, 1, result)
        messages += [reply, {"role": "tool", "content": result}]
    db.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
