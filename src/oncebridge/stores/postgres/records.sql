-- The records, one row per key, and their operations. Each operation is one call for a whole batch
-- and uses the clock of this server.
--
-- A row is written twice, at the claim and at the commit. Half of every page is left free
-- (fillfactor), so that the second version fits on the page of the first and no index changes.
-- Columns of fixed width come first and nothing is NULL, which saves 16 bytes a row.

CREATE TABLE IF NOT EXISTS @records@ (
    until_ms      bigint   NOT NULL,  -- end of the lease, or of the window
    keep_until_ms bigint   NOT NULL,  -- from then on the row may be deleted
    hard_until_ms bigint   NOT NULL,
    attempts      integer  NOT NULL,
    fate          smallint NOT NULL,  -- 0: claimed, else done
    key           bytea    PRIMARY KEY,
    token         bytea    NOT NULL,
    generation    bytea    NOT NULL,
    hash          bytea    NOT NULL,
    memo          bytea    NOT NULL,
    whole_key     bytea    NOT NULL   -- of a key that is too long for an index; else empty
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);

-- The functions below all have the same settings. Plans are made once and do not depend on the
-- values: planning takes longer than a small batch, and a table that was empty at the time must not
-- be scanned sequentially later. Rows are locked in the order of their keys, as a nested loop does,
-- or two batches would wait for each other. A statement that still waits after its client has gone
-- releases its locks after lock_timeout.
--
-- Arrays are parallel, with one element per item, or one element that applies to all items; keys
-- always has all. An empty array means none. The memos of commits and releases may be NULL.
-- told is the time, if a test sets it. An operation returns (part, verdict) only for items with
-- another result than the usual one; the comments below have the numbers of those results.

CREATE OR REPLACE FUNCTION @now@(told bigint) RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(told, floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint)
$$;

-- Claim: one element per part. lasts has the last part of the want that a part belongs to, and
-- is empty if every want has one part. Returns the parts that are not simply "held as requested,
-- first attempt", and a last row with no part and the time:
--   1 held: attempts, generation, memo      2 duplicate: fate, memo
--   3 busy: milliseconds left               4 mismatch: memo
--   5 repeat the call with careful: another worker is changing this row
-- Without careful, new rows are inserted first, and then locks of other rows cannot be waited for:
-- that would be out of order. Wants of several parts, and sliding windows, need careful.
CREATE OR REPLACE FUNCTION @claim@(
    careful boolean, keys bytea[], tokens bytea[], generations bytea[], leases bigint[],
    keeps bigint[], memos bytea[], hashes bytea[], slides bigint[], lasts bigint[],
    wholes bytea[], told bigint
) RETURNS TABLE (
    now_ms bigint, part integer, verdict integer, number bigint, generation bytea, memo bytea
)
LANGUAGE plpgsql VOLATILE @settings@
AS $$
#variable_conflict use_column
DECLARE
    written integer;
    locked  boolean := false;
    rest    integer[];             -- parts that have no answer yet
    later   integer[];             -- those of them that need a write, and so a lock
    taken   integer[];             -- parts to take
    slid    integer[];             -- parts whose window is pushed
    ours    bytea[];               -- keys that this very call has put here,
    undone  bytea[];               -- and those among them whose want is refused after all
    seen    record;
    want    integer;
    against integer;               -- what decides the present want
    waits   boolean;
BEGIN
    now_ms := @now@(told);
    -- Nearly all keys are new: insert them, and return if none existed. ON CONFLICT would search
    -- the index once more for each, and so it is left to the rare call that another one overtakes.
    IF NOT careful THEN
        BEGIN
            INSERT INTO @records@
            SELECT now_ms + a.lease, now_ms + a.lease + coalesce(keeps[a.i], keeps[1]), 0, 1, 0,
                a.key, coalesce(tokens[a.i], tokens[1]), coalesce(generations[a.i], generations[1]),
                coalesce(hashes[a.i], hashes[1]), coalesce(memos[a.i], memos[1]),
                coalesce(wholes[a.i], '')
            FROM (
                SELECT u.key, u.i::integer AS i, coalesce(leases[u.i::integer], leases[1]) AS lease
                FROM unnest(keys) WITH ORDINALITY AS u(key, i)
            ) AS a
            -- An existing row is decided below, without waiting for its lock.
            WHERE NOT EXISTS (SELECT FROM @records@ AS k WHERE k.key = a.key)
            ORDER BY a.key;
            GET DIAGNOSTICS written = ROW_COUNT;
        EXCEPTION WHEN unique_violation THEN
            careful := true;  -- all inserts and their locks are undone
        END;
        IF written = cardinality(keys) THEN
            RETURN NEXT;
            RETURN;
        END IF;
    END IF;

    rest := ARRAY(SELECT generate_subscripts(keys, 1));
    LOOP
        -- Decide by the existing rows. The first time without a lock: most claims are refused
        -- here, and an answer that was true during the call is a true answer.
        now_ms := @now@(told);
        later := NULL;
        want := NULL;
        FOR seen IN
            SELECT p.* FROM (
                SELECT i AS part, coalesce(lasts[i]::integer, i) AS last,
                    r.key, r.generation, r.attempts, r.fate, r.memo,
                    r.until_ms - now_ms AS remaining,
                    -- 1 to 4 refuse the claim, in this order; 5 can be claimed, 6 is held
                    CASE
                        WHEN r.key IS NULL THEN 5
                        WHEN r.fate = 0 AND r.token = a.token AND r.token <> '' THEN 6
                        WHEN r.until_ms <= now_ms THEN 5
                        WHEN r.fate = 0 THEN 2
                        WHEN r.hash <> a.hash AND r.hash <> '' AND a.hash <> '' THEN 3
                        WHEN i = coalesce(lasts[i], i) THEN 1
                        ELSE 4
                    END AS objection,
                    r.fate <> 0 AND a.slide > 0 AND r.hard_until_ms > 0
                        AND least(now_ms + a.slide, r.hard_until_ms) > r.until_ms AS slides,
                    r.generation = a.generation AND r.attempts = 1 AND r.memo = a.memo AS as_asked
                FROM unnest(rest) AS i
                CROSS JOIN LATERAL (
                    SELECT coalesce(tokens[i], tokens[1]) AS token,
                        coalesce(generations[i], generations[1]) AS generation,
                        coalesce(memos[i], memos[1]) AS memo,
                        coalesce(hashes[i], hashes[1]) AS hash,
                        coalesce(slides[i], slides[1]) AS slide
                ) AS a
                LEFT JOIN @records@ AS r ON r.key = keys[i]
                OFFSET 0  -- keeps the planner from repeating these expressions below
            ) AS p
            WHERE p.objection <> 6 OR NOT p.as_asked OR cardinality(lasts) > 0
            ORDER BY p.last, p.objection,
                CASE p.objection WHEN 2 THEN -p.remaining WHEN 3 THEN -p.part ELSE p.part END,
                p.key DESC
        LOOP
            part := seen.part;
            memo := seen.memo;
            IF seen.last IS DISTINCT FROM want THEN
                want := seen.last;
                against := seen.objection;
                waits := NOT locked AND (against = 5 OR against IN (1, 4) AND seen.slides);
                IF against < 5 AND NOT waits THEN
                    IF against IN (1, 4) AND seen.slides THEN
                        slid := slid || seen.part;
                    END IF;
                    verdict := CASE against WHEN 2 THEN 3 WHEN 3 THEN 4 ELSE 2 END;
                    number := CASE against WHEN 2 THEN seen.remaining ELSE seen.fate END;
                    generation := '';
                    RETURN NEXT;
                END IF;
            END IF;
            IF waits THEN
                later := later || seen.part;
            ELSIF against < 5 THEN
                IF keys[seen.part] = ANY (ours) THEN
                    undone := undone || keys[seen.part];
                END IF;
            ELSIF seen.objection = 5 THEN
                taken := taken || seen.part;
            ELSIF NOT seen.as_asked THEN
                verdict := 1;
                number := seen.attempts;
                generation := seen.generation;
                RETURN NEXT;
            END IF;
        END LOOP;
        EXIT WHEN locked OR later IS NULL;

        -- Lock the rest and decide again, since time may have passed.
        IF careful THEN
            -- In one statement and in the order of keys: insert missing rows, lock existing ones.
            WITH put AS (
                INSERT INTO @records@ AS r
                SELECT now_ms + a.lease, now_ms + a.lease + coalesce(keeps[a.i], keeps[1]), 0, 1, 0,
                    keys[a.i], coalesce(tokens[a.i], tokens[1]),
                    coalesce(generations[a.i], generations[1]), coalesce(hashes[a.i], hashes[1]),
                    coalesce(memos[a.i], memos[1]), coalesce(wholes[a.i], '')
                FROM (
                    SELECT i, coalesce(leases[i], leases[1]) AS lease FROM unnest(later) AS i
                ) AS a
                ORDER BY keys[a.i]
                ON CONFLICT (key) DO UPDATE SET token = r.token WHERE false
                RETURNING r.key
            )
            SELECT array_agg(key) INTO ours FROM put;
            EXIT WHEN cardinality(ours) = cardinality(later);  -- all are new
            rest := later;
        ELSE
            rest := ARRAY(
                SELECT i FROM unnest(later) AS i JOIN @records@ AS r ON r.key = keys[i]
                FOR UPDATE OF r SKIP LOCKED
            );
            RETURN QUERY
            SELECT now_ms, i, 5, 0::bigint, ''::bytea, ''::bytea FROM unnest(later) AS i
            WHERE i <> ALL (rest);
        END IF;
        locked := true;
    END LOOP;

    IF taken IS NOT NULL THEN
        RETURN QUERY
        WITH changed AS (
            UPDATE @records@ AS r
            SET until_ms = now_ms + a.lease, keep_until_ms = now_ms + a.lease + a.keep,
                hard_until_ms = 0, fate = 0, token = coalesce(tokens[a.i], tokens[1]),
                -- Other content starts a new generation of the key, and so does a claim after the window.
                attempts = CASE WHEN a.goes_on THEN r.attempts + 1 ELSE 1 END,
                generation = CASE WHEN a.goes_on THEN r.generation ELSE a.generation END,
                hash = CASE WHEN a.goes_on AND r.hash <> '' THEN r.hash ELSE a.hash END,
                memo = CASE WHEN a.goes_on THEN r.memo ELSE a.memo END
            FROM (
                SELECT i, k.key, h.hash, coalesce(leases[i], leases[1]) AS lease,
                    coalesce(keeps[i], keeps[1]) AS keep, coalesce(memos[i], memos[1]) AS memo,
                    coalesce(generations[i], generations[1]) AS generation,
                    k.fate = 0 AND (k.hash = h.hash OR k.hash = '' OR h.hash = '') AS goes_on
                FROM unnest(taken) AS i
                CROSS JOIN LATERAL (SELECT coalesce(hashes[i], hashes[1]) AS hash) AS h
                JOIN @records@ AS k ON k.key = keys[i]
            ) AS a
            WHERE r.key = a.key
            RETURNING a.i, r.attempts, r.generation, r.memo,
                r.attempts = 1 AND r.generation = a.generation AND r.memo = a.memo AS as_asked
        )
        SELECT now_ms, c.i, 1, c.attempts::bigint, c.generation, c.memo FROM changed AS c
        WHERE NOT c.as_asked;
    END IF;
    IF slid IS NOT NULL THEN
        UPDATE @records@ AS r SET until_ms = a.until, keep_until_ms = a.until
        FROM (
            SELECT k.key,
                least(now_ms + coalesce(slides[i], slides[1]), k.hard_until_ms) AS until
            FROM unnest(slid) AS i JOIN @records@ AS k ON k.key = keys[i]
        ) AS a
        WHERE r.key = a.key;
    END IF;
    IF undone IS NOT NULL THEN
        DELETE FROM @records@ WHERE key = ANY (undone);
    END IF;
    part := NULL;
    RETURN NEXT;
END
$$;

-- Commit: 1 already, 2 fenced.
CREATE OR REPLACE FUNCTION @commit@(
    keys bytea[], generations bytea[], fates bigint[], windows bigint[], hards bigint[],
    memos bytea[], told bigint
) @operation@
    memo_of_all bytea := CASE WHEN cardinality(memos) = 1 THEN memos[1] END;
    done        integer[];
BEGIN
    WITH changed AS (
        UPDATE @records@ AS r
        SET until_ms = now_ms + a.kept, keep_until_ms = now_ms + a.kept, token = '',
            fate = coalesce(fates[a.i], fates[1]),
            hard_until_ms = CASE WHEN a.hard > 0 THEN now_ms + a.hard ELSE 0 END,
            memo = coalesce(memos[a.i], memo_of_all, r.memo)
        FROM (
            SELECT u.key, u.i::integer AS i, coalesce(windows[u.i::integer], windows[1]) AS kept,
                coalesce(hards[u.i::integer], hards[1]) AS hard
            FROM unnest(keys) WITH ORDINALITY AS u(key, i)
            ORDER BY u.key
        ) AS a
        WHERE r.key = a.key AND r.fate = 0 AND r.generation <> '' AND r.generation
            = substr(coalesce(generations[a.i], generations[1]), 1, length(r.generation))
        RETURNING a.i
    )
    SELECT array_agg(i) INTO done FROM changed;
    IF cardinality(done) = cardinality(keys) THEN
        RETURN;
    END IF;
    RETURN QUERY
    SELECT i,
        CASE
            WHEN r.fate <> 0 AND r.generation <> '' AND r.generation
                = substr(coalesce(generations[i], generations[1]), 1, length(r.generation)) THEN 1
            ELSE 2
        END
    FROM generate_subscripts(keys, 1) AS i
    LEFT JOIN @records@ AS r ON r.key = keys[i]
    WHERE i <> ALL (coalesce(done, '{}'));
END
$$;

-- Commits and releases, where those with the same item number are written together or not at all:
-- 1 a key was committed already, 2 a key or a register belongs to another worker now.
CREATE OR REPLACE FUNCTION @settle@(
    commit_items bigint[], release_items bigint[],
    release_keys bytea[], tokens bytea[], delays bigint[], keeps bigint[], release_memos bytea[],
    unsents bigint[], commit_keys bytea[], generations bytea[], fates bigint[], windows bigint[],
    hards bigint[], commit_memos bytea[], told bigint
) @operation@
    refused integer[] := '{}';
BEGIN
    PERFORM FROM @records@ AS r WHERE r.key = ANY (commit_keys || release_keys)
    ORDER BY r.key
    FOR UPDATE;
    now_ms := @now@(told);
    FOR part, verdict IN
        SELECT a.item, min(a.verdict) FROM (
            SELECT commit_items[i] AS item,
                CASE
                    WHEN coalesce(r.generation, '') = '' OR r.generation
                        <> substr(coalesce(generations[i], generations[1]), 1, length(r.generation))
                        THEN 2
                    WHEN r.fate <> 0 THEN 1
                END AS verdict
            FROM generate_subscripts(commit_keys, 1) AS i
            LEFT JOIN @records@ AS r ON r.key = commit_keys[i]
            UNION ALL
            SELECT release_items[i],
                CASE
                    WHEN coalesce(r.token, '') = '' OR r.token <> coalesce(tokens[i], tokens[1])
                        THEN 2
                END
            FROM generate_subscripts(release_keys, 1) AS i
            LEFT JOIN @records@ AS r ON r.key = release_keys[i]
        ) AS a
        WHERE a.verdict IS NOT NULL
        GROUP BY a.item
    LOOP
        refused := refused || part;
        RETURN NEXT;
    END LOOP;
    -- A key that is NULL matches no row.
    PERFORM FROM @commit@(
        ARRAY(
            SELECT CASE WHEN commit_items[i] <> ALL (refused) THEN commit_keys[i] END
            FROM generate_subscripts(commit_keys, 1) AS i
        ), generations, fates, windows, hards, commit_memos, now_ms
    );
    PERFORM FROM @release@(
        ARRAY(
            SELECT CASE WHEN release_items[i] <> ALL (refused) THEN release_keys[i] END
            FROM generate_subscripts(release_keys, 1) AS i
        ), tokens, delays, keeps, release_memos, unsents, now_ms
    );
END
$$;

-- Release: 1 fenced. unsents is 1 for an attempt that does not count.
CREATE OR REPLACE FUNCTION @release@(
    keys bytea[], tokens bytea[], delays bigint[], keeps bigint[], memos bytea[],
    unsents bigint[], told bigint
) @operation@
    memo_of_all bytea := CASE WHEN cardinality(memos) = 1 THEN memos[1] END;
BEGIN
    RETURN QUERY
    WITH changed AS (
        UPDATE @records@ AS r
        SET until_ms = now_ms + a.delay,
            keep_until_ms = now_ms + a.delay + coalesce(keeps[a.i], keeps[1]), token = '',
            attempts = greatest(r.attempts - coalesce(unsents[a.i], unsents[1]), 0),
            memo = coalesce(memos[a.i], memo_of_all, r.memo)
        FROM (
            SELECT u.key, u.i::integer AS i, coalesce(delays[u.i::integer], delays[1]) AS delay
            FROM unnest(keys) WITH ORDINALITY AS u(key, i)
            ORDER BY u.key
        ) AS a
        WHERE r.key = a.key AND r.token = coalesce(tokens[a.i], tokens[1]) AND r.token <> ''
        RETURNING a.i
    )
    SELECT i, 1 FROM generate_subscripts(keys, 1) AS i
    WHERE i NOT IN (SELECT c.i FROM changed AS c);
END
$$;

-- Extend: 1 fenced.
CREATE OR REPLACE FUNCTION @extend@(
    keys bytea[], tokens bytea[], leases bigint[], told bigint
) @operation@
BEGIN
    RETURN QUERY
    WITH changed AS (
        UPDATE @records@ AS r
        SET until_ms = now_ms + a.lease,
            keep_until_ms = r.keep_until_ms + greatest(now_ms + a.lease - r.until_ms, 0)
        FROM (
            SELECT u.key, u.i::integer AS i, coalesce(leases[u.i::integer], leases[1]) AS lease
            FROM unnest(keys) WITH ORDINALITY AS u(key, i)
            ORDER BY u.key
        ) AS a
        WHERE r.key = a.key AND r.token = coalesce(tokens[a.i], tokens[1]) AND r.token <> ''
        RETURNING a.i
    )
    SELECT i, 1 FROM generate_subscripts(keys, 1) AS i
    WHERE i NOT IN (SELECT c.i FROM changed AS c);
END
$$;

-- Remember, or load records of another store: 1 known. Known rows are not locked. The times of what
-- is remembered start now, and it also replaces free rows, which keep their attempts and generation.
CREATE OR REPLACE FUNCTION @put@(
    remembered boolean, keys bytea[], tokens bytea[], generations bytea[], untils bigint[],
    attempts bigint[], hashes bytea[], fates bigint[], memos bytea[], hard_untils bigint[],
    keep_untils bigint[], wholes bytea[], told bigint
) @operation@
    start bigint := CASE WHEN remembered THEN now_ms ELSE 0 END;
BEGIN
    RETURN QUERY
    WITH changed AS (
        INSERT INTO @records@ AS r
        SELECT start + coalesce(untils[a.i], untils[1]),
            start + coalesce(keep_untils[a.i], keep_untils[1]),
            coalesce(hard_untils[a.i], hard_untils[1]), coalesce(attempts[a.i], attempts[1]),
            coalesce(fates[a.i], fates[1]), a.key, coalesce(tokens[a.i], tokens[1]),
            coalesce(generations[a.i], generations[1]), coalesce(hashes[a.i], hashes[1]),
            coalesce(memos[a.i], memos[1]), coalesce(wholes[a.i], '')
        FROM (
            SELECT u.key, u.i::integer AS i FROM unnest(keys) WITH ORDINALITY AS u(key, i)
        ) AS a
        WHERE NOT EXISTS (
            SELECT FROM @records@ AS k
            WHERE k.key = a.key AND (k.until_ms > now_ms OR (k.fate = 0 AND NOT remembered))
        )
        ORDER BY a.key
        ON CONFLICT (key) DO UPDATE
        SET until_ms = excluded.until_ms, keep_until_ms = excluded.keep_until_ms,
            hard_until_ms = excluded.hard_until_ms, fate = excluded.fate, token = excluded.token,
            hash = excluded.hash, memo = excluded.memo,
            attempts = CASE WHEN r.fate = 0 THEN r.attempts ELSE excluded.attempts END,
            generation = CASE WHEN r.fate = 0 THEN r.generation ELSE excluded.generation END
        WHERE r.until_ms <= @now@(told) AND (r.fate <> 0 OR remembered)
        RETURNING r.key
    )
    SELECT i, 1 FROM generate_subscripts(keys, 1) AS i
    WHERE keys[i] NOT IN (SELECT key FROM changed);
END
$$;

-- Forget. Returns the keys that were removed.
CREATE OR REPLACE FUNCTION @forget@(keys bytea[], told bigint) RETURNS bytea[]
LANGUAGE plpgsql VOLATILE @settings@
AS $$
DECLARE
    locked bytea[] := ARRAY(
        SELECT r.key FROM @records@ AS r WHERE r.key = ANY (keys) ORDER BY r.key FOR UPDATE
    );
    now_ms bigint := @now@(told);
    done   bytea[];
BEGIN
    WITH gone AS (
        DELETE FROM @records@ AS r
        WHERE r.key = ANY (locked) AND (r.fate <> 0 OR r.until_ms <= now_ms)
        RETURNING r.key
    )
    SELECT array_agg(key) INTO done FROM gone;
    RETURN coalesce(done, '{}');
END
$$;

-- Purge: delete expired rows on the pages from first up to, not including, beyond. Returns
-- the number of deleted rows. Rows that another worker has locked stay until the next purge.
CREATE OR REPLACE FUNCTION @purge@(first bigint, beyond bigint, told bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off
AS $$
DECLARE
    now_ms bigint := @now@(told);
    start  tid    := format('(%s,0)', first)::tid;
    stop   tid    := format('(%s,0)', beyond)::tid;
    gone   bigint;
BEGIN
    DELETE FROM @records@
    WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM @records@
        WHERE ctid >= start AND ctid < stop AND keep_until_ms <= now_ms
        FOR UPDATE SKIP LOCKED
    )) AND keep_until_ms <= now_ms;
    GET DIAGNOSTICS gone = ROW_COUNT;
    RETURN gone;
END
$$;
