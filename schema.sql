-- The tables of the Postgres store, as it makes them itself. Loaded by hand, they are accepted:
--   psql postgresql://durable:durable@localhost:5433/durable -f schema.sql

BEGIN;

CREATE TABLE agent_runtime_store (
    format integer NOT NULL
);

CREATE TABLE agent_runtime_runs (
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

CREATE INDEX agent_runtime_unfinished ON agent_runtime_runs (run_id) WHERE status < 8;

CREATE INDEX agent_runtime_ended ON agent_runtime_runs (status, ended_at, run_id) WHERE status >= 8;

CREATE TABLE agent_runtime_journal (
    place bigint NOT NULL CHECK (place >> 24 >= 1 AND place & 16777215 >= 1),
    epoch integer NOT NULL CHECK (epoch >= 1),
    attempt integer NOT NULL,
    kind smallint NOT NULL,
    call text NOT NULL,
    body bytea NOT NULL,
    seal bytea NOT NULL
);

CREATE UNIQUE INDEX agent_runtime_numbers ON agent_runtime_journal (place);

CREATE TABLE agent_runtime_checkpoints (
    key bigint PRIMARY KEY,
    step bigint NOT NULL,
    body bytea NOT NULL,
    seal bytea NOT NULL
);

CREATE TABLE agent_runtime_inbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key bigint NOT NULL,
    digest bytea NOT NULL,
    kind text NOT NULL,
    body bytea NOT NULL,
    seal bytea NOT NULL,
    UNIQUE (key, digest)
);

INSERT INTO agent_runtime_store (format) VALUES (2);

COMMIT;
