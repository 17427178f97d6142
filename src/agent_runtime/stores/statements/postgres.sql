-- The statements of the Postgres store. {runs}, {journal}, {checkpoints}, {inbox} and {store} stand for its tables,
-- {unfinished}, {ended} and {numbers} for names of indexes. Times ending in _at are milliseconds UTC, but for heartbeat_at:
-- microseconds UTC, by the server's clock. Status numbers are those of RunStatus: 1 runs, from 8 on final, 11 deleted.
-- Integers of many rows come as the text of one array, which costs the driver one string; bytes of many rows come joined.
-- A record's place is the key of its run, shifted left by 24 bits, and its number: one index of one integer.
-- {channel} is the name under which those that listen hear of messages to these tables.
-- {durably} is true; behind a pooler, which shares sessions, it also makes the commit of this statement a durable one.

-- create_store: which form of tables this is
CREATE TABLE {store} (
    format integer NOT NULL
);

-- create_runs: one row a run, the only contended row; the dense key is what the journal refers to. Half of a page stays free:
-- a heartbeat renews all of its rows in one transaction, and a row that has to leave its page costs an entry in each index.
CREATE TABLE {runs} (
    key bigint GENERATED ALWAYS AS IDENTITY (MAXVALUE 549755813887) PRIMARY KEY,
    created_at bigint NOT NULL,
    updated_at bigint NOT NULL,
    heartbeat_at bigint NOT NULL,
    wake_at bigint,
    lease_ms bigint NOT NULL,
    posted bigint NOT NULL DEFAULT 0,
    step bigint NOT NULL CHECK (step >= 0),
    epoch bigint NOT NULL CHECK (epoch >= 1),
    number bigint NOT NULL CHECK (number >= 0),
    attempts bigint NOT NULL CHECK (attempts >= 0),
    format integer NOT NULL,
    status smallint NOT NULL CHECK (status IN (1, 2, 3, 4, 8, 9, 10, 11)),
    owner bytea NOT NULL CHECK (length(owner) = 16),
    head bytea NOT NULL CHECK (length(head) = 32),
    seal bytea NOT NULL,
    run_id text COLLATE "C" NOT NULL UNIQUE,
    key_id text NOT NULL,
    tenant text NOT NULL,
    kind text NOT NULL,
    name text NOT NULL,
    ended_at bigint GENERATED ALWAYS AS (CASE WHEN status >= 8 THEN updated_at END) STORED
) WITH (fillfactor = 50);

-- create_unfinished: the runs that are not final, without an index that every append would have to change
CREATE INDEX {unfinished} ON {runs} (run_id) WHERE status < 8;

-- create_ended: final runs by when they ended. Over a column that an append of a run that runs leaves as it is: with
-- updated_at in an index, every append would have to change all of them.
CREATE INDEX {ended} ON {runs} (status, ended_at, run_id) WHERE status >= 8;

-- create_journal: insert-only
CREATE TABLE {journal} (
    place bigint NOT NULL CHECK (place >> 24 >= 1 AND place & 16777215 >= 1),
    epoch integer NOT NULL CHECK (epoch >= 1),
    attempt integer NOT NULL,
    kind smallint NOT NULL,
    call text NOT NULL,
    body bytea NOT NULL,
    seal bytea NOT NULL
);

-- create_numbers: each number once a run
CREATE UNIQUE INDEX {numbers} ON {journal} (place);

-- create_checkpoints: the latest state of each run that keeps one
CREATE TABLE {checkpoints} (
    key bigint PRIMARY KEY,
    step bigint NOT NULL,
    body bytea NOT NULL,
    seal bytea NOT NULL
);

-- create_inbox: messages to whoever owns the run, once by digest
CREATE TABLE {inbox} (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key bigint NOT NULL,
    digest bytea NOT NULL,
    kind text NOT NULL,
    body bytea NOT NULL,
    seal bytea NOT NULL,
    UNIQUE (key, digest)
);

-- write_format: the form of the tables that were just made
INSERT INTO {store} (format) VALUES (2);

-- add_ended_at: what layout 2 has beyond layout 1, with the index above; and the room in a page, as the table is written anew
ALTER TABLE {runs}
SET (fillfactor = 50),
ADD COLUMN ended_at bigint GENERATED ALWAYS AS (CASE WHEN status >= 8 THEN updated_at END) STORED;

-- raise_format: the form of the tables that were just changed
UPDATE {store} SET format = 2;

-- read_format: the form of the tables that are there
SELECT max(format) FROM {store};

-- find_columns: the columns of tables that have our names, whoever made them
SELECT c.relname, array_agg(a.attname::text) AS columns
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE n.nspname = $1 AND c.relname = ANY ($2::text[]) AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
GROUP BY c.relname;

-- find_schema: whether the schema is there
SELECT count(*) FROM pg_catalog.pg_namespace WHERE nspname = $1;

-- lock_set_up: one at a time makes tables in this database
SELECT pg_advisory_xact_lock(4715532104317);

-- read_session: what durability and isolation need of a session
SELECT pg_is_in_recovery() AS is_standby,
       current_setting('transaction_read_only') = 'on' AS is_read_only,
       current_setting('synchronous_commit') AS synchronous_commit,
       current_setting('default_transaction_isolation') AS isolation,
       current_setting('server_encoding') AS encoding,
       current_setting('server_version_num')::integer AS version;

-- read_standbys: which standbys commits shall wait for; how many are connected, how many of these may be looked at by this
-- user, and how many are waited for
SELECT current_setting('synchronous_standby_names'), count(*), count(sync_state),
       count(*) FILTER (WHERE sync_state IN ('sync', 'quorum'))
FROM pg_stat_replication;

-- find_keys: the dense keys of runs
SELECT run_id, key FROM {runs} WHERE run_id = ANY ($1::text[]);

-- append: the guarded update of one run that runs, or shall run again, under its owner, and its one record; of those with
-- more records the last line of values stands once for each, with the parameters that come next
-- $1 key, $2 epoch, $3 owner, $4 number and $5 head as they must be; $6 step, $7 number, $8 head, $9 attempts, $10 seal,
-- $11 seen, $12 wake_at, $13 lease_ms, $14 format, $15 key_id as they shall be; then kind, call, attempt, body and seal of
-- each record
WITH p AS MATERIALIZED (
    SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8 AS us WHERE {durably}
), written AS (
    UPDATE {runs} u
    SET status = 1, step = $6::int8, number = $7::int8, head = $8::bytea, attempts = $9::int8, seal = $10::bytea,
        lease_ms = $13::int8, format = $14::int4, key_id = $15::text,
        wake_at = CASE WHEN u.posted > $11::int8 THEN p.us / 1000 ELSE $12::int8 END,
        heartbeat_at = CASE WHEN u.heartbeat_at - p.us BETWEEN 0 AND 1000000 THEN u.heartbeat_at + 1 ELSE p.us END,
        updated_at = p.us / 1000
    FROM p
    WHERE u.key = $1::int8 AND u.epoch = $2::int8 AND u.owner = $3::bytea AND u.number = $4::int8 AND u.head = $5::bytea
      AND u.status < 8 AND u.step BETWEEN $6::int8 - 1 AND $6::int8
    RETURNING u.key, u.posted
), journaled AS (
    INSERT INTO {journal} (place, epoch, attempt, kind, call, body, seal)
    SELECT (w.key << 24) + $4::int8 + v.n, $2::int8, v.attempt, v.kind, v.call, v.body, v.seal
    FROM written w, (VALUES
        (1, $16::int8, $17::text, $18::int8, $19::bytea, $20::bytea)
    ) AS v (n, kind, call, attempt, body, seal)
)
SELECT posted FROM written;

-- append_batch: many appends to different runs, of any kind, each guarded by itself, in the order given: that of the ids.
-- Rows are locked in that order first, so that two batches cannot wait for each other; the guard is the update itself.
-- $1 keys (-n for the n-th new run); $2 five integers a row: place of its shape, step, number, first record, records (which
-- follow the number that the guard names);
-- $3 128 bytes a row: guard's owner and head, then owner, head, seal; $4 ids of new runs; $5 texts, referred to by place;
-- $6 shapes, 13 integers each, named below: what many rows have in common is said once; $7 1, then of each record (kind,
-- attempt, size of call, where the next begins) and $8 call, body and seal, one behind the other; of each checkpoint $9
-- (step, offset, size) and $10 body and seal
WITH p AS MATERIALIZED (
    SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8 AS us, $2::text::int8[] AS a, $6::text::int8[] AS s,
           $5::text[] AS t
    WHERE {durably}
), r AS MATERIALIZED (
    SELECT i, key, us, step, number, first, records, marks,
           s[x] AS was_epoch, nullif(s[x + 1], -1) AS was_heard, s[x + 2] = 1 AS settles, s[x + 3]::int4 AS format,
           t[s[x + 4]] AS key_id, s[x + 5]::int2 AS status, s[x + 6] AS epoch, s[x + 7] AS attempts, s[x + 8] AS lease_ms,
           nullif(s[x + 9], -1) AS wake_at, s[x + 10] AS seen, s[x + 11]::int4 AS texts, s[x + 12]::int4 AS checkpoint
    FROM (
        SELECT k.i, k.key, us, s, t, a[k.i * 5 - 4]::int4 AS x, a[k.i * 5 - 3] AS step, a[k.i * 5 - 2] AS number,
               a[k.i * 5 - 1]::int4 AS first, a[k.i * 5]::int4 AS records,
               substring($3::bytea FROM (k.i * 128 - 127)::int4 FOR 128) AS marks
        FROM p, unnest($1::text::int8[]) WITH ORDINALITY AS k (key, i)
        OFFSET 0  -- else each of the names stands for its term, which is worked out again wherever it is used
    ) AS k
), fresh AS MATERIALIZED (
    SELECT ($4::text[])[-r.key] AS run_id, t[r.texts] AS tenant, t[r.texts + 1] AS kind, t[r.texts + 2] AS name, r.*
    FROM p, r WHERE r.key < 0
), opened AS (
    INSERT INTO {runs} (run_id, format, key_id, tenant, kind, name, status, step, epoch, owner, number, head, attempts, seal,
                        lease_ms, wake_at, heartbeat_at, created_at, updated_at)
    SELECT run_id, format, key_id, tenant, kind, name, status, step, epoch, substring(marks FROM 49 FOR 16), number,
           substring(marks FROM 65 FOR 32), attempts, substring(marks FROM 97 FOR 32), lease_ms, wake_at, us, us / 1000, us / 1000
    FROM fresh ORDER BY i
    ON CONFLICT (run_id) DO NOTHING
    RETURNING key, run_id
), locked AS MATERIALIZED (
    SELECT r.* FROM r JOIN {runs} u ON u.key = r.key WHERE r.key > 0 ORDER BY r.i FOR NO KEY UPDATE OF u
), appended AS (
    UPDATE {runs} u
    SET format = r.format, key_id = r.key_id, status = r.status, epoch = r.epoch, lease_ms = r.lease_ms,
        owner = substring(r.marks FROM 49 FOR 16), step = r.step, number = r.number, head = substring(r.marks FROM 65 FOR 32),
        attempts = r.attempts, seal = substring(r.marks FROM 97 FOR 32),
        wake_at = CASE WHEN u.posted > r.seen THEN r.us / 1000 ELSE r.wake_at END,
        heartbeat_at = CASE WHEN u.heartbeat_at - r.us BETWEEN 0 AND 1000000 THEN u.heartbeat_at + 1 ELSE r.us END,
        updated_at = r.us / 1000
    FROM locked r
    WHERE u.key = r.key AND u.epoch = r.was_epoch AND u.owner = substring(r.marks FROM 1 FOR 16)
      AND u.number = r.number - r.records AND u.head = substring(r.marks FROM 17 FOR 32)
      AND (r.was_heard IS NULL OR u.heartbeat_at = r.was_heard)
      AND (CASE WHEN u.status < 8 THEN u.step BETWEEN r.step - 1 AND r.step
                ELSE u.status < 11 AND r.settles AND u.status = r.status AND u.step = r.step AND u.epoch = r.epoch
                     AND u.owner = substring(r.marks FROM 49 FOR 16) END)
    RETURNING r.i, u.key, u.posted, r.epoch, r.number, r.first, r.records, r.checkpoint
), written AS MATERIALIZED (
    SELECT f.i, o.key, 0::int8 AS posted, f.epoch, f.number, f.first, f.records, f.checkpoint
    FROM opened o JOIN fresh f ON f.run_id = o.run_id
    UNION ALL
    SELECT i, key, posted, epoch, number, first, records, checkpoint FROM appended
), journaled AS (
    INSERT INTO {journal} (place, epoch, attempt, kind, call, body, seal)
    SELECT place, epoch, attempt, kind, convert_from(substring($8::bytea FROM start FOR size), 'UTF8'),
           substring($8::bytea FROM start + size FOR past - start - size - 32), substring($8::bytea FROM past - 32 FOR 32)
    FROM (
        SELECT before + n AS place, epoch, b[n * 4 - 2] AS kind, b[n * 4 - 1] AS attempt, b[n * 4]::int4 AS size,
               b[n * 4 - 3]::int4 AS start, b[n * 4 + 1]::int4 AS past
        FROM (SELECT $7::text::int8[] AS b OFFSET 0) AS p, (
            SELECT (key << 24) + number - records - first + 1 AS before, epoch,
                   generate_series(first, first + records - 1) AS n
            FROM written
        ) AS w
        OFFSET 0
    ) AS w
), kept AS (
    INSERT INTO {checkpoints} (key, step, body, seal)
    SELECT w.key, c[w.checkpoint * 3 - 2],
           substring($10::bytea FROM c[w.checkpoint * 3 - 1]::int4 FOR c[w.checkpoint * 3]::int4),
           substring($10::bytea FROM (c[w.checkpoint * 3 - 1] + c[w.checkpoint * 3])::int4 FOR 32)
    FROM (SELECT $9::text::int8[] AS c OFFSET 0) AS p, written w WHERE w.checkpoint > 0
    ON CONFLICT (key) DO UPDATE SET step = excluded.step, body = excluded.body, seal = excluded.seal
)
SELECT i, key, posted FROM written;

-- select_run: one run's row, with how long its owner has been silent, and its latest state
SELECT r.run_id, r.format, r.key_id, r.tenant, r.kind, r.name, r.status, r.step, r.epoch, r.owner, r.number, r.head,
       r.attempts, r.seal, r.lease_ms, r.wake_at, r.heartbeat_at,
       ((extract(epoch FROM clock_timestamp()) * 1000000)::int8 - r.heartbeat_at) / 1000, r.posted, r.created_at, r.updated_at,
       r.key, c.step, c.body, c.seal
FROM {runs} r LEFT JOIN {checkpoints} c ON c.key = r.key WHERE r.run_id = ANY ($1::text[]);

-- select_records: the records of a run past a number
WITH r AS MATERIALIZED (SELECT key << 24 AS start FROM {runs} WHERE run_id = $1)
SELECT place & 16777215, epoch, kind, call, attempt, body, seal FROM {journal}
WHERE place BETWEEN (SELECT start + 1 + least($2::int8, 16777215) FROM r) AND (SELECT start + 16777215 FROM r) ORDER BY place;

-- select_strays: the first record that is left of each run whose row is gone; the index leads from run to run
WITH RECURSIVE k (place) AS (
    SELECT min(place) FROM {journal}
    UNION ALL
    SELECT (SELECT min(place) FROM {journal} WHERE place >= ((k.place >> 24) + 1) << 24) FROM k WHERE k.place IS NOT NULL
)
SELECT j.place & 16777215, j.epoch, j.kind, j.call, j.attempt, j.body, j.seal FROM k JOIN {journal} j USING (place)
WHERE NOT EXISTS (SELECT 1 FROM {runs} r WHERE r.key = k.place >> 24) LIMIT $1;

-- select_all_records: the records of many runs, those of each in order. Run by run: a join that is ordered as a whole may be
-- worked by reading the whole journal in order.
SELECT j.*, k.key FROM unnest($1::int8[]) AS k (key), LATERAL (
    SELECT place & 16777215, epoch, kind, call, attempt, body, seal FROM {journal}
    WHERE place BETWEEN k.key << 24 AND (k.key << 24) + 16777215 ORDER BY place
) j;

-- list_unfinished: rows that are not final, by id
SELECT run_id, format, key_id, tenant, kind, name, status, step, epoch, owner, number, head, attempts, seal,
       lease_ms, wake_at, heartbeat_at,
       ((extract(epoch FROM clock_timestamp()) * 1000000)::int8 - heartbeat_at) / 1000, posted, created_at, updated_at
FROM {runs} WHERE status < 8 AND run_id > $1 AND ($2::text IS NULL OR name = $2) ORDER BY run_id LIMIT $3::int8;

-- list_awake: the same without those that wait for somebody, and for no time that has come
SELECT run_id, format, key_id, tenant, kind, name, status, step, epoch, owner, number, head, attempts, seal,
       lease_ms, wake_at, heartbeat_at,
       ((extract(epoch FROM clock_timestamp()) * 1000000)::int8 - heartbeat_at) / 1000, posted, created_at, updated_at
FROM {runs} WHERE status < 8 AND run_id > $1 AND ($2::text IS NULL OR name = $2)
  AND (status NOT IN (2, 3, 4) OR (status <> 4 AND wake_at <= $4::int8)) ORDER BY run_id LIMIT $3::int8;

-- list_runs: rows of all runs, by id; deleted ones only where asked for
SELECT run_id, format, key_id, tenant, kind, name, status, step, epoch, owner, number, head, attempts, seal,
       lease_ms, wake_at, heartbeat_at,
       ((extract(epoch FROM clock_timestamp()) * 1000000)::int8 - heartbeat_at) / 1000, posted, created_at, updated_at
FROM {runs} WHERE run_id > $1 AND ($2::int2 IS NULL AND status < 11 OR status = $2)
ORDER BY run_id LIMIT $3::int8;

-- list_recent: rows of the statuses $1, the newest first, from the first before the time $2 and the id $3; of each final status
-- no more are read than are asked for, and nothing of the unfinished runs where all of them are final
SELECT run_id, format, key_id, tenant, kind, name, status, step, epoch, owner, number, head, attempts, seal,
       lease_ms, wake_at, heartbeat_at,
       ((extract(epoch FROM clock_timestamp()) * 1000000)::int8 - heartbeat_at) / 1000, posted, created_at, updated_at
FROM (
    (SELECT * FROM {runs}
     WHERE status < 8 AND 8 > ANY ($1::int2[]) AND status = ANY ($1::int2[]) AND (updated_at, run_id) < ($2::int8, $3)
     ORDER BY updated_at DESC, run_id DESC LIMIT $4::int8)
    UNION ALL
    SELECT e.* FROM unnest($1::int2[]) AS s (status), LATERAL (
        SELECT * FROM {runs} u WHERE u.status = s.status AND u.status >= 8 AND (u.ended_at, u.run_id) < ($2::int8, $3)
        ORDER BY u.ended_at DESC, u.run_id DESC LIMIT $4::int8
    ) e
) r
ORDER BY updated_at DESC, run_id DESC LIMIT $4::int8;
-- make_sure: changes nothing of runs, and once it has its answer all that could be read of them before it is durable, too
UPDATE {runs} SET updated_at = updated_at WHERE run_id = ANY ($1::text[]) AND {durably} RETURNING key;

-- renew: the owner lives; guarded by epoch and owner alone
WITH p AS MATERIALIZED (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8 AS us)
UPDATE {runs} u
SET heartbeat_at = CASE WHEN u.heartbeat_at - p.us BETWEEN 0 AND 1000000 THEN u.heartbeat_at + 1 ELSE p.us END,
    wake_at = CASE WHEN u.posted = $4::int8 THEN $5::int8 ELSE u.wake_at END
FROM p WHERE u.run_id = $1 AND u.epoch = $2::int8 AND u.owner = $3::bytea AND u.status < 8 RETURNING u.posted;

-- renew_all: the owner of many runs lives; a row that somebody is just writing is passed over, and not waited for. A row is
-- locked where it lies, so the update goes there without a look into the index. $1 keys, $2 epochs, $3 owners. Answers with
-- how many were renewed, under 0, and then with those of which there is more to tell: who has had messages, and where not all
-- were renewed those that were
WITH p AS MATERIALIZED (
    SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8 AS us
), free AS MATERIALIZED (
    SELECT k.i, u.ctid AS place, us
    FROM p, ROWS FROM (unnest($1::text::int8[]), unnest($2::text::int8[])) WITH ORDINALITY AS k (key, epoch, i)
    JOIN {runs} u ON u.key = k.key
    WHERE u.epoch = k.epoch AND u.owner = substring($3::bytea FROM (k.i * 16 - 15)::int4 FOR 16) AND u.status < 8
    FOR NO KEY UPDATE OF u SKIP LOCKED
), renewed AS MATERIALIZED (
    UPDATE {runs} u
    SET heartbeat_at = CASE WHEN u.heartbeat_at - free.us BETWEEN 0 AND 1000000 THEN u.heartbeat_at + 1 ELSE free.us END
    FROM free WHERE u.ctid = free.place RETURNING free.i, u.posted
)
SELECT 0 AS i, count(*) AS posted FROM renewed
UNION ALL
SELECT i, posted FROM renewed WHERE posted > 0 OR (SELECT count(*) FROM renewed) < length($3::bytea) / 16;

-- find_owners: who holds runs that were not renewed
SELECT run_id, epoch, owner, posted FROM {runs} WHERE run_id = ANY ($1::text[]) AND status < 8;

-- post: a message, once by its digest; one more is posted, there is reason to look at the run, and whoever listens hears of it
WITH raised AS (
    UPDATE {runs} u SET posted = u.posted + 1, wake_at = (extract(epoch FROM clock_timestamp()) * 1000)::int8
    WHERE u.run_id = $1 AND u.status < CASE WHEN $3::text = 'settlement' THEN 11 ELSE 8 END AND {durably}
      AND NOT EXISTS (SELECT FROM {inbox} m WHERE m.key = u.key AND m.digest = $2::bytea)
    RETURNING u.key, u.posted
), inserted AS (
    INSERT INTO {inbox} (key, digest, kind, body, seal) SELECT key, $2, $3, $4::bytea, $5::bytea FROM raised
)
SELECT posted, pg_notify('{channel}', $1::text) FROM raised;

-- find_message: why a message was not taken
SELECT u.posted, EXISTS (SELECT FROM {inbox} m WHERE m.key = u.key AND m.digest = $2::bytea) AS is_there
FROM {runs} u WHERE u.run_id = $1 AND u.status < 11;

-- find_posted: how many messages runs have had that are not deleted
SELECT run_id, posted FROM {runs} WHERE run_id = ANY ($1::text[]) AND status < 11;

-- messages_since: who got messages past an id, and how far the writers have come: all transactions before `oldest` have ended,
-- none from `next` on has begun. A message may show up after one with a higher id.
SELECT pg_snapshot_xmin(s)::text::int8 AS oldest, pg_snapshot_xmax(s)::text::int8 AS next, n.id AS newest, m.id, m.run_id
FROM pg_current_snapshot() AS s
CROSS JOIN (SELECT coalesce(max(id), 0) AS id FROM {inbox}) n
LEFT JOIN LATERAL (SELECT i.id, r.run_id FROM {inbox} i JOIN {runs} r ON r.key = i.key WHERE i.id > $1::int8) m ON true;

-- select_messages: the messages of a run in the order they came
SELECT digest, kind, body, seal FROM {inbox}
WHERE key = (SELECT key FROM {runs} WHERE run_id = $1) ORDER BY id;

-- bury_run: what is left of a deleted run, so that its id is not used again
UPDATE {runs}
SET status = 11, number = 0, owner = decode(repeat('00', 16), 'hex'), head = decode(repeat('00', 32), 'hex'), seal = ''::bytea,
    wake_at = NULL, updated_at = (extract(epoch FROM clock_timestamp()) * 1000)::int8
WHERE run_id = $1 AND epoch = $2::int8 AND owner = $3::bytea AND number = $4::int8 AND head = $5::bytea AND status < 11
  AND {durably}
RETURNING key;

-- delete_records: the journal of a deleted run
DELETE FROM {journal} WHERE place BETWEEN $1::int8 << 24 AND ($1::int8 << 24) + 16777215;

-- delete_checkpoint: the state of a deleted run
DELETE FROM {checkpoints} WHERE key = $1::int8;

-- delete_messages: the messages of a deleted run
DELETE FROM {inbox} WHERE key = $1::int8;

-- read_clock: the server's clock
SELECT clock_timestamp();
