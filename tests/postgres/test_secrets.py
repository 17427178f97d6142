"""What a dump of the database tells of runs under a key that encrypts."""

from __future__ import annotations

from agent_runtime.stores.postgres import PostgresCheckpointStore
from tests.keys.rings import ALL_HIDING, STILL_OLD
from tests.keys.story import MARKER, come_back, refuse_pickles, tell
from tests.postgres.bench import fresh_store, session
from tests.servers import Server, fresh_schema


async def dump(url: str, schema: str) -> str:
    """Every row of every table of a schema as text; bytes are in hex there."""
    async with session(url) as db:
        tables = await db.fetch(
            "SELECT quote_ident(table_name) AS name FROM information_schema.tables WHERE table_schema = $1", schema
        )
        rows = [await db.fetch(f"SELECT t::text AS row FROM {schema}.{table['name']} t") for table in tables]
    return "\n".join(each["row"] for some in rows for each in some)


async def test_a_secret_is_nowhere_in_a_dump_of_all_tables(one_postgres: Server) -> None:
    said = {}
    for name, ring in (("plain", STILL_OLD), ("hidden", ALL_HIDING)):
        async with fresh_schema(one_postgres.url) as schema:
            store = PostgresCheckpointStore(one_postgres.url, schema=schema)
            told = await tell(store, ring)
            said[name] = await dump(one_postgres.url, schema)
            await store.close()
            assert MARKER in str(told)
    assert MARKER.encode().hex() in said["plain"], "else nobody would find it anywhere"
    assert MARKER.encode().hex() not in said["hidden"]
    assert MARKER not in said["hidden"]
    assert len(said["hidden"]) > 10_000


async def test_hostile_data_is_data_and_what_nobody_sealed_is_refused(one_postgres: Server) -> None:
    async with fresh_store(one_postgres) as store:
        await come_back(store, STILL_OLD)
        await refuse_pickles(store, STILL_OLD)
