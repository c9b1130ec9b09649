-- Named statements in SQL instead of SQLAlchemy's constructs: `database.query(name)` gives one.
-- A {word} is an identifier, a number or a fragment, composed and quoted by psycopg; a :word is a bound parameter.

-- name: statement_timeout
-- The statement time-out of the rest of this transaction, in milliseconds. Not set_config(): that is a query, before
-- which the isolation level would have to be chosen.
SET LOCAL statement_timeout = {timeout_ms}

-- name: insert_missing
-- Rows of one table, sent as one JSON array, less those that are stored already. One parameter instead of one a value
-- takes a tenth of the time of a statement a row, on both sides.
INSERT INTO {table} ({columns})
SELECT {columns} FROM json_populate_recordset(CAST(NULL AS {table}), CAST(:rows AS json))
ON CONFLICT DO NOTHING

-- name: posted_totals
-- Nano-dollars posted in each scope: charges, uncertain ones included, less credits.
SELECT scope ->> 0, sum(CASE kind WHEN 'credit' THEN -amount_nano ELSE amount_nano END)
FROM ledger, jsonb_array_elements(scopes) AS scope
WHERE kind IN ('posted', 'uncertain', 'credit')
GROUP BY 1

-- name: cosine
-- Fragment of experience_near: the likeness of a stored question; 0 for a vector of another embedder. The question asked is a sub-select so that a prepared
-- statement turns the array into a vector once, not once a row.
coalesce(CASE WHEN e.embedder = :embedder
  THEN 1 - (e.embedding <=> (SELECT CAST(CAST(:embedding AS real[]) AS vector))) END, 0)

-- name: experience_near
-- Means over each worker's latest `recent` judged steps, weighted by how near and how new they are;
-- core/loop/experience.py says what that means. {cosine} is the fragment of that name, or 0 without pgvector.
WITH wanted AS (
  SELECT worker, version, coalesce((SELECT at FROM experience AS e WHERE e.worker = named.worker
    ORDER BY at DESC OFFSET :recent - 1 LIMIT 1), '-infinity') AS since
  FROM unnest(CAST(:workers AS text[]), CAST(:versions AS text[])) AS named (worker, version)
), searched AS MATERIALIZED (
  SELECT e.worker, e.rollout_id, e.step, e.success, e.cost_nano, e.latency_ms, e.at,
    {cosine} + CASE WHEN e.task_type = :task_type THEN :same_type ELSE 0 END AS similarity
  FROM wanted JOIN experience AS e
    ON e.worker = wanted.worker AND e.worker_version = wanted.version AND e.at >= wanted.since
), spread AS (
  SELECT avg(similarity) AS mean, max(similarity) - avg(similarity) AS width FROM searched
), placed AS (
  SELECT searched.*, CASE WHEN width <= :spread_min THEN 1 ELSE (similarity - mean) / width END AS likeness
  FROM searched CROSS JOIN spread WHERE width <= :spread_min OR similarity > mean
), ordered AS (
  SELECT *, sum(likeness) OVER latest - likeness AS newer, count(*) FILTER (WHERE likeness > :near) OVER latest AS place
  FROM placed WINDOW latest AS (PARTITION BY worker ORDER BY at DESC, rollout_id DESC, step DESC
    ROWS UNBOUNDED PRECEDING)
), counted AS (
  SELECT *, least(1, (likeness - :near) / (:nearest - :near))
    * power(0.5, newer / CAST(:half_life AS double precision)) AS weight
  FROM ordered WHERE likeness > :near AND place <= :k
)
SELECT worker, sum(weight), sum(weight * success) / sum(weight), sum(weight * cost_nano) / sum(weight),
  sum(weight * latency_ms) / sum(weight)
FROM counted GROUP BY worker HAVING sum(weight) >= :least ORDER BY worker

-- name: plans_near
-- Plans of one key's latest `recent` requests that were judged well: the nearest questions first, then the cheapest. A
-- plan that another one followed did not win alone. {cosine} is the fragment of that name, or 0 without pgvector.
WITH latest AS (
  SELECT id, request, pool, cost_nano, task_type FROM rollouts
  WHERE key_id = :key_id AND depth = 0 AND status = 'done' AND fallback IS NULL AND log_mode IN ('full', 'redacted')
  ORDER BY created_at DESC LIMIT :recent
), placed AS (
  SELECT l.request, l.pool, l.cost_nano, p.plan,
    {cosine} + CASE WHEN l.task_type = :task_type THEN :same_type ELSE 0 END AS similarity
  FROM latest AS l
  JOIN LATERAL (SELECT value FROM outcomes AS o WHERE o.rollout_id = l.id AND o.value IS NOT NULL
    ORDER BY o.created_at DESC LIMIT 1) AS judged ON judged.value >= :won
  JOIN LATERAL (SELECT x.embedding, x.embedder FROM experience AS x WHERE x.rollout_id = l.id LIMIT 1) AS e ON true
  JOIN rounds AS p ON p.rollout_id = l.id AND p.round = 1 AND p.plan IS NOT NULL
  WHERE NOT EXISTS (SELECT 1 FROM rounds AS q WHERE q.rollout_id = l.id AND q.round = 2
    AND jsonb_array_length(q.plan -> 'steps') > 0)
)
SELECT request, plan, pool, cost_nano FROM placed WHERE similarity >= :near ORDER BY similarity DESC, cost_nano LIMIT :k

-- name: planner_rewards
-- Rewards of the latest `recent` judged requests to `baton`, by pool, task type and the planner of the first plan. The
-- latest judgement of a request counts. The index on the rollout's id gives the newest requests first.
SELECT pool_name, task_type, planner, count(*), sum(reward), sum(reward * reward)
FROM (
  SELECT r.pool_name, r.task_type, p.planner,
    CAST(:success AS double precision) * j.value - CAST(:cost AS double precision) * r.cost_nano / 1e9 AS reward
  FROM (
    SELECT DISTINCT ON (rollout_id) rollout_id, value FROM outcomes WHERE value IS NOT NULL
    ORDER BY rollout_id DESC, created_at DESC LIMIT :recent
  ) AS j
  JOIN rollouts AS r ON r.id = j.rollout_id AND r.depth = 0 AND r.policy_requested = 'baton' AND r.train
  JOIN rounds AS p ON p.rollout_id = j.rollout_id AND p.round = 1 AND p.planner IN ('conductor', 'rule')
) AS judged
GROUP BY pool_name, task_type, planner

-- name: parts_of_rollouts
-- Names of the tables that hold the rollouts of one month each, and of the one that holds the rest.
SELECT c.relname FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
WHERE i.inhparent = CAST('rollouts' AS regclass)

-- name: part_create
-- A table for one month, like the whole, not attached to it yet.
CREATE TABLE {part}
(LIKE {whole} INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE INCLUDING COMPRESSION)

-- name: part_attach
-- The month's table becomes the part of the whole that holds these ids.
ALTER TABLE {whole} ATTACH PARTITION {part} FOR VALUES FROM ({first_id}) TO ({end_id})

-- name: part_drop
DROP TABLE {part}

-- name: part_refer
-- A month's rounds or steps refer to the same month's rollouts, so that parts can go without the rest being read.
ALTER TABLE {part} ADD CONSTRAINT {constraint} FOREIGN KEY (rollout_id) REFERENCES {rollouts} (id) ON DELETE CASCADE

-- name: reference_drop
-- Take the reference of a table to `rollouts` off.
ALTER TABLE {table} DROP CONSTRAINT {constraint}

-- name: reference_restore
-- Put the reference back without reading the table again.
ALTER TABLE {table}
ADD CONSTRAINT {constraint} FOREIGN KEY (rollout_id) REFERENCES rollouts (id) ON DELETE CASCADE NOT VALID

-- name: lock_exclusive
-- Until the transaction ends nobody else reads or writes these tables.
LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE

-- name: lock_share
-- Until the transaction ends these tables can be read, and not written.
LOCK TABLE {tables} IN SHARE MODE
