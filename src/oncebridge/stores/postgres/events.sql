-- Delivered events, each generation of a key once.

CREATE TABLE IF NOT EXISTS @events@ (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    inserted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    key         bytea       NOT NULL,  -- the same for every attempt; empty if nothing is deduplicated
    generation  bytea       NOT NULL,  -- another one if the same event is delivered again after its window
    route       text        NOT NULL,
    attempt     integer     NOT NULL,
    unprotected boolean     NOT NULL,  -- sent while the store was down; may be here twice
    event_id    text,
    source      text,
    detail_type text,
    topic       text,
    event_time  timestamptz,
    version     numeric,
    raw         bytea       NOT NULL,  -- the bytes as they were received
    body        jsonb                  -- the same, unless jsonb cannot hold it
);

-- Recognises an event that is sent again. An event without a generation cannot be recognised.
CREATE UNIQUE INDEX IF NOT EXISTS @events_key@ ON @events@ (key, generation)
WHERE generation <> '';
