"""Turn a key ring: the new key encrypts, the old one is withdrawn, and no run is lost by it.

    python examples/keys.py

Encryption needs `pip install 'durable-agent-runtime[encryption]'`. Everything happens in a temporary folder.
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from agent_runtime import KeyRing, Reply, RevokedKey, Runs, ToolRegistry, redact_names, run_tool_loop
from agent_runtime.stores import SQLiteCheckpointStore

OLD, NEW = b"one-secret-from-your-vault-of-32", b"another-secret-from-your-vault-3"


async def model(messages: object, tools: object) -> Reply:
    return Reply(text="Good morning.")


async def greet(name: str, store: SQLiteCheckpointStore, ring: KeyRing) -> None:
    hidden = redact_names("password", "token")  # in what is announced of the run
    text = f"Greet {name}"
    await run_tool_loop(model, ToolRegistry(), text, run_id=name, checkpoints=store, checkpoint_key=ring, redact=hidden)


async def main(path: Path) -> None:
    store = SQLiteCheckpointStore(path)
    await greet("ana", store, KeyRing({"2030": OLD}, "2030"))

    # 1. Every worker learns the new key; the old one is active still.
    keys = {"2030": OLD, "2031": NEW}
    learning = KeyRing(keys, "2030", encrypts={"2031"})
    await greet("ben", store, learning)

    # 2. The new one is active: what is new is under it, and a run that is picked up goes on to it.
    turned = KeyRing(keys, "2031", encrypts={"2031"})
    await greet("cleo", store, turned)

    # 3. What nobody picks up is moved, with a record that says by whom.
    for moved in await Runs(store, checkpoint_key=turned).reseal(by="example"):
        print(f"{moved.run_id}: from {moved.was} to {moved.now}")

    # 4. The old key is withdrawn: whoever still has it can make a run that nobody works.
    withdrawn = KeyRing(keys, "2031", encrypts={"2031"}, revoked={"2030"})
    await greet("eve", store, learning)
    try:
        await Runs(store, checkpoint_key=withdrawn).show("eve")
    except RevokedKey as error:
        print("refused:", str(error).split(":")[0])
    await store.close()


with TemporaryDirectory() as folder:
    asyncio.run(main(Path(folder) / "runs.db"))
    stored = (Path(folder) / "runs.db").read_bytes()
    print("to be read in the file:", [name for name in ("ana", "ben", "cleo", "eve") if f"Greet {name}".encode() in stored])
