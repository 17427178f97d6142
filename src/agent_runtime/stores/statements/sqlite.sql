-- The statements of the SQLite store. Times ending in _at are milliseconds UTC, but for heartbeat_at: microseconds of
-- the host's uptime. Status numbers are those of RunStatus: 1 runs, from 8 on final, 11 deleted.

-- create_runs: one row a run, the only contended row; the dense key is what the journal refers to
CREATE TABLE runs (
    key INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL UNIQUE,
    format INTEGER NOT NULL,
    key_id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    status INTEGER NOT NULL CHECK (status IN (1, 2, 3, 4, 8, 9, 10, 11)),
    step INTEGER NOT NULL CHECK (step >= 0),
    epoch INTEGER NOT NULL CHECK (epoch >= 1),
    owner BLOB NOT NULL CHECK (length(owner) = 16),
    number INTEGER NOT NULL CHECK (number >= 0),
    head BLOB NOT NULL CHECK (length(head) = 32),
    attempts INTEGER NOT NULL CHECK (attempts >= 0),
    seal BLOB NOT NULL,
    lease_ms INTEGER NOT NULL,
    wake_at INTEGER,
    heartbeat_at INTEGER NOT NULL,
    posted INTEGER NOT NULL DEFAULT 0,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL
) STRICT;

-- create_unfinished: the runs that are not final, without an index that every append would have to change
CREATE INDEX unfinished ON runs (run_id) WHERE status < 8;

-- create_ended: final runs by when they ended; no append of a run that runs has to change it
CREATE INDEX ended ON runs (status, updated_at, run_id) WHERE status >= 8;

-- create_journal: insert-only
CREATE TABLE journal (
    key INTEGER NOT NULL,
    number INTEGER NOT NULL CHECK (number >= 1),
    epoch INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    call TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    body BLOB NOT NULL,
    seal BLOB NOT NULL
) STRICT;

-- create_numbers: each number once a run
CREATE UNIQUE INDEX numbers ON journal (key, number);

-- create_checkpoints: the latest state of each run that keeps one
CREATE TABLE checkpoints (
    key INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    body BLOB NOT NULL,
    seal BLOB NOT NULL
) STRICT;

-- create_inbox: messages to whoever owns the run, once by digest
CREATE TABLE inbox (
    id INTEGER PRIMARY KEY,
    key INTEGER NOT NULL,
    digest BLOB NOT NULL,
    kind TEXT NOT NULL,
    body BLOB NOT NULL,
    seal BLOB NOT NULL,
    UNIQUE (key, digest)
) STRICT;

-- find_key: the dense key of a run
SELECT key FROM runs WHERE run_id = ?;

-- newest_key: the highest key in use
SELECT coalesce(max(key), 0) FROM runs;

-- open_run: the row of a new run; none is written where the id is, or was, in use
INSERT INTO runs (key, run_id, format, key_id, tenant, kind, name, status, step, epoch, owner, number, head, attempts, seal,
                  lease_ms, wake_at, heartbeat_at, created_at, updated_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (run_id) DO NOTHING;

-- append: the guarded update of a run that runs on under its owner, and waits for no time
UPDATE runs SET step = ?, number = ?, head = ?, attempts = ?, seal = ?, wake_at = CASE WHEN posted > ? THEN ? END,
                heartbeat_at = ?, updated_at = ?
WHERE key = ? AND epoch = ? AND owner = ? AND number = ? AND head = ? AND status = 1 AND step BETWEEN ? - 1 AND ?;

-- append_many: the same for many runs; there is a row of values for each, and what is the same for all comes first
UPDATE runs SET step = n.column6, number = n.column7, head = n.column8, attempts = n.column9, seal = n.column10,
                wake_at = CASE WHEN posted > n.column11 THEN ?1 END, heartbeat_at = ?2, updated_at = ?1
FROM (VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)) AS n
WHERE runs.key = n.column1 AND runs.epoch = n.column2 AND runs.owner = n.column3 AND runs.number = n.column4
  AND runs.head = n.column5 AND runs.status = 1 AND runs.step BETWEEN n.column6 - 1 AND n.column6;

-- append_any: the guarded update that may change status, epoch, owner and key as well
UPDATE runs SET format = ?, key_id = ?, status = ?, epoch = ?, lease_ms = ?, owner = ?,
                step = ?, number = ?, head = ?, attempts = ?, seal = ?, wake_at = CASE WHEN posted > ? THEN ? ELSE ? END,
                heartbeat_at = ?, updated_at = ?
WHERE key = ? AND epoch = ? AND owner = ? AND number = ? AND head = ? AND status < 8 AND step BETWEEN ? - 1 AND ?
  AND heartbeat_at = coalesce(?, heartbeat_at);

-- append_settled: the guarded update of a final run, which keeps its status, step, epoch and owner
UPDATE runs SET key_id = ?, number = ?, head = ?, seal = ?, updated_at = ?
WHERE key = ? AND epoch = ? AND owner = ? AND epoch = ? AND owner = ? AND number = ? AND head = ? AND step = ?
  AND status = ? AND status BETWEEN 8 AND 10;

-- insert_record: one record of the journal
INSERT INTO journal (key, number, epoch, kind, call, attempt, body, seal) VALUES (?, ?, ?, ?, ?, ?, ?, ?);

-- keep_checkpoint: the latest state of a run
INSERT INTO checkpoints (key, step, body, seal) VALUES (?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET step = excluded.step, body = excluded.body, seal = excluded.seal;

-- select_run: one run's row, with how long its owner has been silent
SELECT run_id, format, key_id, tenant, kind, name, status, step, epoch, owner, number, head, attempts, seal,
       lease_ms, wake_at, heartbeat_at, (? - heartbeat_at) / 1000, posted, created_at, updated_at, key
FROM runs WHERE run_id = ?;

-- select_checkpoint: the latest state of a run
SELECT step, body, seal FROM checkpoints WHERE key = ?;

-- select_records: the records past a number
SELECT number, epoch, kind, call, attempt, body, seal FROM journal WHERE key = ? AND number > ? ORDER BY number;

-- select_strays: the first record that is left of each run whose row is gone; the index leads from run to run
WITH RECURSIVE k (key) AS (
    SELECT min(key) FROM journal
    UNION ALL
    SELECT (SELECT min(key) FROM journal WHERE key > k.key) FROM k WHERE k.key IS NOT NULL
)
SELECT j.number, j.epoch, j.kind, j.call, j.attempt, j.body, j.seal FROM k
JOIN journal j ON j.key = k.key AND j.number = (SELECT min(number) FROM journal f WHERE f.key = k.key)
WHERE NOT EXISTS (SELECT 1 FROM runs r WHERE r.key = k.key) LIMIT ?;

-- list_unfinished: rows that are not final, by id
SELECT run_id, format, key_id, tenant, kind, name, status, step, epoch, owner, number, head, attempts, seal,
       lease_ms, wake_at, heartbeat_at, (? - heartbeat_at) / 1000, posted, created_at, updated_at
FROM runs WHERE status < 8 AND run_id > ? AND (? IS NULL OR name = ?) ORDER BY run_id LIMIT ?;

-- list_awake: the same without those that wait for somebody, and for no time that has come
SELECT run_id, format, key_id, tenant, kind, name, status, step, epoch, owner, number, head, attempts, seal,
       lease_ms, wake_at, heartbeat_at, (? - heartbeat_at) / 1000, posted, created_at, updated_at
FROM runs WHERE status < 8 AND run_id > ? AND (? IS NULL OR name = ?)
  AND (status NOT IN (2, 3, 4) OR (status <> 4 AND wake_at <= ?)) ORDER BY run_id LIMIT ?;

-- list_runs: rows of all runs, by id; deleted ones only where asked for
SELECT run_id, format, key_id, tenant, kind, name, status, step, epoch, owner, number, head, attempts, seal,
       lease_ms, wake_at, heartbeat_at, (? - heartbeat_at) / 1000, posted, created_at, updated_at
FROM runs WHERE run_id > ? AND status = coalesce(?, status) AND (status < 11 OR ? = 11) ORDER BY run_id LIMIT ?;

-- list_ended: rows of final runs of one status, the newest first, from the first before a time and an id
SELECT run_id, format, key_id, tenant, kind, name, status, step, epoch, owner, number, head, attempts, seal,
       lease_ms, wake_at, heartbeat_at, (? - heartbeat_at) / 1000, posted, created_at, updated_at
FROM runs WHERE status = ? AND status >= 8 AND (updated_at, run_id) < (?, ?) ORDER BY updated_at DESC, run_id DESC LIMIT ?;

-- list_newest: the same of runs that are not final, of one status or of all
SELECT run_id, format, key_id, tenant, kind, name, status, step, epoch, owner, number, head, attempts, seal,
       lease_ms, wake_at, heartbeat_at, (? - heartbeat_at) / 1000, posted, created_at, updated_at
FROM runs INDEXED BY unfinished
WHERE status < 8 AND status = coalesce(?, status) AND (updated_at, run_id) < (?, ?)
ORDER BY updated_at DESC, run_id DESC LIMIT ?;

-- find_columns: the columns of all tables
SELECT m.name, c.name FROM sqlite_master m, pragma_table_info(m.name) c WHERE m.type = 'table';

-- renew: the owner lives; guarded by epoch and owner alone
UPDATE runs SET heartbeat_at = ?, wake_at = CASE WHEN posted = ? THEN ? ELSE wake_at END
WHERE key = ? AND epoch = ? AND owner = ? AND status < 8 RETURNING posted;

-- renew_all: the same of many runs, which tell nothing back
UPDATE runs SET heartbeat_at = ? WHERE key = ? AND epoch = ? AND owner = ? AND status < 8;

-- select_posted: how many messages a run has had
SELECT posted FROM runs WHERE key = ?;

-- newest_message: whether any run has messages at all
SELECT max(id) FROM inbox;

-- find_message: whether a message has come already
SELECT id FROM inbox WHERE key = ? AND digest = ?;

-- insert_message: a message, once by its digest
INSERT INTO inbox (key, digest, kind, body, seal) VALUES (?, ?, ?, ?, ?);

-- raise_posted: one more message, and reason to look at the run
UPDATE runs SET posted = posted + 1, wake_at = ? WHERE key = ? RETURNING posted;

-- select_messages: the messages of a run in the order they came
SELECT digest, kind, body, seal FROM inbox WHERE key = ? ORDER BY id;

-- last_message: the newest message that is there
SELECT id, key, digest FROM inbox ORDER BY id DESC LIMIT 1;

-- message_at: which message has an id; once a run is deleted, another may get the id of its messages
SELECT key, digest FROM inbox WHERE id = ?;

-- runs_posted_to: the runs that got messages past an id
SELECT DISTINCT r.run_id FROM inbox m JOIN runs r ON r.key = m.key WHERE m.id > ?;

-- find_posted: how many messages a run has had that is not deleted
SELECT posted FROM runs WHERE run_id = ? AND status < 11;

-- bury_run: what is left of a deleted run, so that its id is not used again
UPDATE runs SET status = 11, number = 0, owner = zeroblob(16), head = zeroblob(32), seal = x'', wake_at = NULL, updated_at = ?
WHERE key = ? AND epoch = ? AND owner = ? AND number = ? AND head = ? AND status < 11;

-- delete_records: the journal of a deleted run
DELETE FROM journal WHERE key = ?;

-- delete_checkpoint: the state of a deleted run
DELETE FROM checkpoints WHERE key = ?;

-- delete_messages: the messages of a deleted run
DELETE FROM inbox WHERE key = ?;

-- vacuum: write the file anew, without the room of what was removed
VACUUM;
