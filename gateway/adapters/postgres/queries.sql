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

-- name: insert_continuations
-- The marks of answers, sent in the same way; the latest answer under a mark counts.
INSERT INTO {table} AS known ({columns})
SELECT {columns} FROM json_populate_recordset(CAST(NULL AS {table}), CAST(:rows AS json))
ON CONFLICT (key_id, mark) DO UPDATE
SET worker = excluded.worker, rollout_id = excluded.rollout_id, until = excluded.until, facts = excluded.facts
WHERE known.until <= excluded.until

-- name: copy_rows
-- Rows of one table in the binary form of COPY, which takes half the time of insert_missing, but refuses a row that is
-- stored already.
COPY {table} ({columns}) FROM STDIN (FORMAT BINARY)

-- name: posted_totals
-- Nano-dollars posted in each scope: charges, uncertain ones included, less credits.
SELECT scope ->> 0, sum(CASE kind WHEN 'credit' THEN -amount_nano ELSE amount_nano END)
FROM ledger, jsonb_array_elements(scopes) AS scope
WHERE kind IN ('posted', 'uncertain', 'credit')
GROUP BY 1

-- name: cosine
-- Fragment of plans_near: the likeness of a stored question; 0 for a vector of another embedder. The question asked is a
-- sub-select so that a prepared statement turns the array into a vector once, not once a row.
coalesce(CASE WHEN e.embedder = :embedder
  THEN 1 - (e.embedding <=> (SELECT CAST(CAST(:embedding AS real[]) AS vector))) END, 0)

-- name: judged_step
-- Fragment: the columns of a step in memory, in the order of `recall.JudgedStep`; a vector as its bytes, times in
-- microseconds.
CAST(rollout_id AS text), round, step, org, key_id, pool_name, worker, worker_version, task_type, embedder,
  array_send(CAST(embedding AS real[])), success, cost_nano, latency_ms, weight, source,
  CAST(extract(epoch FROM at) * 1000000 AS bigint), CAST(extract(epoch FROM changed_at) * 1000000 AS bigint)

-- name: experience_recent
-- The organisations of the `recent` latest changes of experience, the latest first.
SELECT org FROM (SELECT org, changed_at FROM experience ORDER BY changed_at DESC LIMIT :recent) AS latest
GROUP BY org ORDER BY max(changed_at) DESC LIMIT :most

-- name: experience_begin
-- The clock, and the workers of whom an owner has experience: one step in the index for each. {owner} is the column.
SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint), ARRAY(
  WITH RECURSIVE known AS (
    SELECT (SELECT min(worker) FROM experience WHERE {owner} = :name) AS worker
    UNION ALL
    SELECT (SELECT min(worker) FROM experience WHERE {owner} = :name AND worker > known.worker)
    FROM known WHERE known.worker IS NOT NULL
  )
  SELECT worker FROM known WHERE worker IS NOT NULL LIMIT :most)

-- name: experience_latest
-- The latest judged steps of a worker that an owner has.
SELECT {step} FROM experience WHERE {owner} = :name AND worker = :worker ORDER BY at DESC LIMIT :most

-- name: experience_changes
-- Which steps of these organisations and pools changed after a time, the oldest change first.
SELECT CAST(rollout_id AS text), round, step, CAST(extract(epoch FROM changed_at) * 1000000 AS bigint), org, pool_name
FROM experience
WHERE changed_at > timestamptz 'epoch' + CAST(:since_us AS bigint) * interval '1 microsecond'
  AND (org = ANY(:orgs) OR pool_name = ANY(:pools))
ORDER BY changed_at LIMIT :most

-- name: experience_of_rollouts
-- All judged steps of these rollouts.
SELECT {step} FROM experience WHERE rollout_id = ANY(CAST(:ids AS uuid[]))

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
  JOIN LATERAL (SELECT value FROM outcomes AS o WHERE o.rollout_id = l.id AND o.value IS NOT NULL AND o.step IS NULL
    AND NOT starts_with(o.source, 'signal:') ORDER BY starts_with(o.source, 'judge:'), o.created_at DESC LIMIT 1
  ) AS judged ON judged.value >= :won
  JOIN LATERAL (SELECT x.embedding, x.embedder FROM experience AS x WHERE x.rollout_id = l.id LIMIT 1) AS e ON true
  JOIN rounds AS p ON p.rollout_id = l.id AND p.round = 1 AND p.plan IS NOT NULL
  WHERE NOT EXISTS (SELECT 1 FROM rounds AS q WHERE q.rollout_id = l.id AND q.round = 2
    AND jsonb_array_length(q.plan -> 'steps') > 0)
)
SELECT request, plan, pool, cost_nano FROM placed WHERE similarity >= :near ORDER BY similarity DESC, cost_nano LIMIT :k

-- name: won_exists
-- Those of these keys of whom a request was judged well.
SELECT name FROM unnest(CAST(:names AS text[])) AS named (name)
WHERE EXISTS (SELECT FROM outcomes WHERE key_id = name AND value >= :won)

-- name: planner_rewards
-- Rewards of the latest `recent` judged requests to `baton`, by organisation, pool, task type and the planner of the
-- first plan. The latest judgement of a request counts. Dollars in a pool without a worth count for nothing. The index on the rollout's id gives the newest requests first.
SELECT pool_name, task_type, planner, count(*), sum(reward), sum(reward * reward), org
FROM (
  SELECT r.org, r.pool_name, r.task_type, p.planner,
    j.value - coalesce(r.cost_nano / 1e9 / CAST(CAST(:right_usd AS jsonb) ->> r.pool_name AS double precision), 0) AS reward
  FROM (
    SELECT DISTINCT ON (rollout_id) rollout_id, value FROM outcomes
    WHERE value IS NOT NULL AND step IS NULL AND NOT starts_with(source, 'signal:')
    ORDER BY rollout_id DESC, starts_with(source, 'judge:'), created_at DESC LIMIT :recent
  ) AS j
  JOIN rollouts AS r ON r.id = j.rollout_id AND r.depth = 0 AND r.policy_requested = 'baton' AND r.train
  JOIN rounds AS p ON p.rollout_id = j.rollout_id AND p.round = 1 AND p.planner IN ('conductor', 'rule')
) AS judged
GROUP BY org, pool_name, task_type, planner

-- name: judged_plans
-- Rounds whose plans were used, of the latest `recent` judged requests to `baton` in a pool and an organisation, of one
-- key or of all of it (NULL), by the task type of a rollout or, if it has none, with the vectors of their tasks.
SELECT j.rollout_id, j.value, r.pool, r.fallback, p.planner, p.plan, p.plan_logprobs, p.decision_mask, p.sampling,
  p.decision, CASE WHEN CAST(:task_type AS text) IS NULL THEN r.task_embedding END AS embedding
FROM (
  SELECT DISTINCT ON (rollout_id) rollout_id, value FROM outcomes
  WHERE value IS NOT NULL AND step IS NULL AND NOT starts_with(source, 'signal:')
  ORDER BY rollout_id DESC, starts_with(source, 'judge:'), created_at DESC LIMIT :recent
) AS j
JOIN rollouts AS r ON r.id = j.rollout_id AND r.depth = 0 AND r.pool_name = :pool AND r.id <> CAST(:rollout AS uuid)
  AND r.org = :org AND (CAST(:key AS text) IS NULL OR r.key_id = :key)
  AND (r.task_type = :task_type OR (CAST(:task_type AS text) IS NULL AND r.task_embedder = :embedder))
JOIN rounds AS p ON p.rollout_id = j.rollout_id AND p.plan IS NOT NULL AND p.refusal IS NULL
ORDER BY j.rollout_id DESC, p.round LIMIT :most

-- name: said_together
-- What sources said of the latest `recent` judged requests that several of them judged, each source's latest word: by
-- organisation the sources, the values, and of how many requests. Values are rounded, so that there are few groups.
WITH latest AS (
  SELECT DISTINCT rollout_id FROM outcomes WHERE value IS NOT NULL AND step IS NULL ORDER BY rollout_id DESC LIMIT :recent
), said AS (
  SELECT DISTINCT ON (o.rollout_id, o.source) o.rollout_id, o.source, round(CAST(o.value AS numeric), 1) AS value
  FROM latest JOIN outcomes AS o ON o.rollout_id = latest.rollout_id AND o.value IS NOT NULL AND o.step IS NULL
  ORDER BY o.rollout_id, o.source, o.created_at DESC
), together AS (
  SELECT rollout_id, array_agg(source ORDER BY source) AS sources,
    array_agg(CAST(value AS double precision) ORDER BY source) AS values
  FROM said GROUP BY rollout_id HAVING count(*) > 1
)
SELECT r.org, t.sources, t.values, count(*)
FROM together AS t JOIN rollouts AS r ON r.id = t.rollout_id
GROUP BY r.org, t.sources, t.values ORDER BY count(*) DESC LIMIT :most

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

-- name: figures
-- What dashboards show of the stores, as (gauge, value of its label, number). Ids are of UUID version 7, so their order
-- is that of time and the primary keys find the rows of the last hour and day.
WITH recent AS (
  SELECT id, policy_assigned FROM rollouts
  WHERE created_at > :day AND policy_assigned IS NOT NULL AND depth = 0 ORDER BY created_at DESC LIMIT :rollouts_max
), judged AS (
  SELECT policy_assigned, (SELECT o.value FROM outcomes AS o WHERE o.rollout_id = recent.id AND o.value IS NOT NULL
    AND NOT starts_with(o.source, 'signal:') ORDER BY starts_with(o.source, 'judge:'), o.created_at DESC LIMIT 1) AS value
  FROM recent
), open_holds AS (
  SELECT max(h.amount_nano) AS amount_nano FROM ledger AS h
  WHERE h.event_id > CAST(:hour_id AS uuid) AND h.kind = 'hold' AND NOT EXISTS (
    SELECT FROM ledger AS s WHERE s.hold_id = h.hold_id AND s.kind IN ('posted', 'voided', 'uncertain'))
  GROUP BY h.hold_id
), uncertain AS (
  SELECT u.amount_nano FROM ledger AS u
  WHERE u.event_id > CAST(:day_id AS uuid) AND u.kind = 'uncertain' AND NOT EXISTS (
    SELECT FROM ledger AS c WHERE c.hold_id = u.hold_id AND c.kind = 'credit')
)
SELECT 'holds', NULL, count(*) FROM open_holds
UNION ALL SELECT 'held_usd', NULL, coalesce(sum(amount_nano), 0) / 1e9 FROM open_holds
UNION ALL SELECT 'uncertain', NULL, count(*) FROM uncertain
UNION ALL SELECT 'uncertain_usd', NULL, coalesce(sum(amount_nano), 0) / 1e9 FROM uncertain
UNION ALL SELECT 'version_requests', policy_assigned, count(*) FROM recent GROUP BY 2
UNION ALL SELECT 'outcomes', policy_assigned, count(value) FROM judged GROUP BY 2
UNION ALL SELECT 'reward', policy_assigned, avg(value) FROM judged WHERE value IS NOT NULL GROUP BY 2
UNION ALL SELECT 'jobs', state, count(*) FROM policy_jobs
  WHERE state IN ('queued', 'running') OR ended_at > :day GROUP BY 2
UNION ALL SELECT 'source_agreement', source, sum(right_accepted + wrong_rejected)
    / sum(right_accepted + right_rejected + wrong_accepted + wrong_rejected) FROM sources
  WHERE right_accepted + right_rejected + wrong_accepted + wrong_rejected > 0 GROUP BY 2
UNION ALL SELECT 'source_weight', source, avg(weight_right + weight_wrong) / 2 FROM sources GROUP BY 2
UNION ALL SELECT 'gradings', state, count(*) FROM gradings
  WHERE state = 'waiting' OR created_at > :day GROUP BY 2

-- name: database_facts
-- What `baton doctor` says of a database.
SELECT current_setting('server_version') AS version, current_user AS role,
  has_database_privilege(current_database(), 'CREATE') AND has_schema_privilege('public', 'CREATE') AS may_create,
  EXISTS (SELECT FROM pg_available_extensions WHERE name = 'vector') AS has_vector,
  extract(epoch FROM clock_timestamp()) AS now_s

-- name: sum_day
-- The sums of one UTC day by key and by worker, child loops included; what a step on `self` cost counts with the steps of
-- its own loop. A sum that is there grows and never shrinks.
WITH own AS MATERIALIZED (
  SELECT id, key_id, depth, cost_nano FROM rollouts WHERE created_at >= :since AND created_at < :until
), sums AS (
  SELECT 'day' AS kind, '' AS name, count(*) AS count, coalesce(sum(cost_nano), 0) AS cost_nano
  FROM own WHERE depth = 0
  UNION ALL
  SELECT 'key', key_id, count(*), coalesce(sum(cost_nano), 0) FROM own WHERE depth = 0 GROUP BY key_id
  UNION ALL
  SELECT 'worker', s.worker, count(*), coalesce(sum(s.cost_nano), 0)
  FROM own JOIN steps AS s ON s.rollout_id = own.id
  WHERE s.child_rollout_id IS NULL
    AND s.rollout_id >= CAST(:since_id AS uuid) AND s.rollout_id < CAST(:until_id AS uuid)
  GROUP BY s.worker
)
INSERT INTO spend_days AS d (day, kind, name, count, cost_nano, summed_at)
SELECT CAST(:day AS date), kind, name, count, cost_nano, CAST(:now AS timestamptz) FROM sums
ON CONFLICT (day, kind, name) DO UPDATE SET count = greatest(d.count, excluded.count),
  cost_nano = greatest(d.cost_nano, excluded.cost_nano), summed_at = excluded.summed_at

-- name: spend_by_key
-- Dollars by UTC day and key: of days that were summed, and of the latest requests since the last of these.
WITH recent AS (
  SELECT created_at, key_id, cost_nano FROM rollouts
  WHERE created_at >= :live_since AND depth = 0 ORDER BY created_at DESC LIMIT :rollouts_max
), days AS (
  SELECT day, name AS key_id, count AS requests, cost_nano, false AS live
  FROM spend_days WHERE kind = 'key' AND day >= CAST(:first AS date)
  UNION ALL
  SELECT CAST(created_at AT TIME ZONE 'UTC' AS date), key_id, count(*), sum(cost_nano), true FROM recent GROUP BY 1, 2
)
SELECT to_char(d.day, 'YYYY-MM-DD') AS day, d.key_id, k.name AS key_name, d.requests, d.cost_nano, d.live
FROM days AS d LEFT JOIN keys AS k ON k.public_id = d.key_id ORDER BY 1, 5 DESC, 2

-- name: spend_by_worker
-- The same by UTC day and worker. Ids begin with their time: without the lowest one all steps would be read.
WITH recent AS (
  SELECT id, created_at FROM rollouts WHERE created_at >= :live_since ORDER BY created_at DESC LIMIT :rollouts_max
)
SELECT to_char(day, 'YYYY-MM-DD') AS day, name AS worker, count AS calls, cost_nano
FROM spend_days WHERE kind = 'worker' AND day >= CAST(:first AS date)
UNION ALL
SELECT to_char(CAST(r.created_at AT TIME ZONE 'UTC' AS date), 'YYYY-MM-DD'), s.worker, count(*), sum(s.cost_nano)
FROM recent AS r JOIN steps AS s ON s.rollout_id = r.id
WHERE s.child_rollout_id IS NULL AND s.rollout_id >= CAST(:live_since_id AS uuid)
GROUP BY CAST(r.created_at AT TIME ZONE 'UTC' AS date), s.worker
ORDER BY 1, 4 DESC, 2

-- name: open_holds
-- Holds that nothing settled, as large as they have grown, newest first. Ids are of UUID version 7, so the primary key
-- finds those since a time.
SELECT h.hold_id, h.rollout_id, h.amount_nano, h.at, h.scopes FROM ledger AS h
WHERE h.event_id > CAST(:since_id AS uuid) AND h.kind = 'hold' AND NOT EXISTS (
  SELECT FROM ledger AS s WHERE s.hold_id = h.hold_id AND (s.kind IN ('posted', 'voided', 'uncertain')
    OR s.kind = 'hold' AND (s.amount_nano, s.event_id) > (h.amount_nano, h.event_id)))
ORDER BY h.event_id DESC LIMIT :most

-- name: worker_success
-- How well each worker did each kind of task, of its latest judged steps, each by what its source weighs.
SELECT n.worker, e.task_type, count(*) AS n, sum(e.weight * e.success) / sum(e.weight) AS success, avg(e.cost_nano) AS cost_nano,
  avg(e.latency_ms) AS latency_ms
FROM unnest(CAST(:workers AS text[])) AS n(worker) CROSS JOIN LATERAL (
  SELECT task_type, success, weight, cost_nano, latency_ms FROM experience
  WHERE worker = n.worker AND weight > 0 ORDER BY at DESC LIMIT :recent) AS e
GROUP BY 1, 2 ORDER BY 1, 3 DESC

-- name: worker_errors
-- The errors of each worker among the latest requests since a time, child loops included.
WITH recent AS (
  SELECT id FROM rollouts WHERE created_at > :since ORDER BY created_at DESC LIMIT :rollouts_max
)
SELECT s.worker, s.error, count(*) AS n, max(s.finished_at) AS latest
FROM recent AS r JOIN steps AS s ON s.rollout_id = r.id
WHERE s.status = 'failed' AND s.rollout_id >= CAST(:since_id AS uuid)
GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2 LIMIT :most

-- name: trains
-- Fragment: whether the rollout `r` has a plan that policy gradients can be computed of: one that the conductor sampled
-- with log-probs under the prompt `:prompt` (NULL: any), or one that the rule drew with a known propensity.
EXISTS (SELECT FROM rounds AS p WHERE p.rollout_id = r.id AND p.planner = 'conductor'
  AND cardinality(p.plan_token_ids) > 0 AND cardinality(p.prompt_token_ids) > 0
  AND cardinality(p.plan_logprobs) = cardinality(p.plan_token_ids) AND p.allowed IS NOT NULL
  AND coalesce(CAST(p.sampling ->> 'temperature' AS double precision), 1) >= :greedy_below
  AND coalesce(CAST(p.sampling ->> 'top_p' AS double precision), 1) >= 1
  AND CAST(p.sampling ->> 'top_k' AS double precision) IN (-1, 0)
  AND CAST(p.sampling ->> 'min_p' AS double precision) = 0
  AND CAST(p.sampling ->> 'repetition_penalty' AS double precision) = 1
  AND (CAST(:prompt AS text) IS NULL OR p.prompt_hash = :prompt)
  AND (CAST(:versions AS text[]) IS NULL OR p.policy_version = ANY(CAST(:versions AS text[])))) AS sampled,
CAST(:versions AS text[]) IS NULL AND r.fallback IS NULL AND r.log_mode = 'full'
  AND EXISTS (SELECT FROM rounds AS p WHERE p.rollout_id = r.id AND p.planner = 'rule' AND p.round = 1
    AND p.plan IS NOT NULL AND p.refusal IS NULL AND CAST(p.decision ->> 'propensity' AS double precision) > 0) AS drawn

-- name: judged_requests
-- The latest `recent` judged requests that may train, with what a retraining can make of each. A question is its words,
-- as `policy.dataset.read.group_of` has them; what is no text, or was asked with the client's tools, the gate cannot ask.
SELECT r.created_at, r.key_id, {trains},
  r.log_mode = 'full' AND jsonb_array_length(coalesce(r.request -> 'messages', '[]')) > 0
    AND coalesce(r.request ->> 'tools', '[]') = '[]' AND coalesce(r.request ->> 'functions', '[]') = '[]'
    AND NOT jsonb_path_exists(r.request, '$.messages[*] ? (!exists(@.content) || @.content == null)')
    AND NOT jsonb_path_exists(r.request, '$.messages[*].content[*] ? (@.type != "text")') AS askable,
  md5(coalesce(nullif(btrim(regexp_replace(lower(CASE WHEN jsonb_typeof(q.content) = 'string'
    THEN q.content #>> '{{}}' ELSE CAST(q.content AS text) END), '\s+', ' ', 'g')), ''), CAST(r.id AS text))) AS question
FROM (
  SELECT DISTINCT rollout_id FROM outcomes WHERE value IS NOT NULL AND step IS NULL
  ORDER BY rollout_id DESC LIMIT :recent
) AS j
JOIN rollouts AS r ON r.id = j.rollout_id AND r.parent_id IS NULL AND r.status = 'done' AND r.train
CROSS JOIN LATERAL (
  SELECT jsonb_path_query_array(r.request, '$.messages[*] ? (@.role == "user")') -> -1 -> 'content' AS content) AS q
WHERE NOT EXISTS (SELECT FROM keys AS k WHERE k.public_id = r.key_id AND NOT k.train)
  AND (CAST(:since AS timestamptz) IS NULL OR r.created_at >= :since)
  AND (CAST(:until AS timestamptz) IS NULL OR r.created_at < :until)
  AND (CAST(:pools AS text[]) IS NULL OR r.pool_name = ANY(CAST(:pools AS text[])))
  AND (CAST(:keys AS text[]) IS NULL OR r.key_id = ANY(CAST(:keys AS text[])))
  AND (CAST(:versions AS text[]) IS NULL OR r.policy_version = ANY(CAST(:versions AS text[])))
  AND r.tags @> CAST(:tags AS jsonb)
ORDER BY r.created_at, r.id

-- name: trainable_requests
-- How many of the latest `recent` judged requests can be trained on, counted up to `most`, and whether any was judged.
SELECT count(*), EXISTS (SELECT FROM outcomes WHERE value IS NOT NULL AND step IS NULL) FROM (
  SELECT 1 FROM (
    SELECT r.id, {trains} FROM (
      SELECT DISTINCT rollout_id FROM outcomes WHERE value IS NOT NULL AND step IS NULL
      ORDER BY rollout_id DESC LIMIT :recent
    ) AS j
    JOIN rollouts AS r ON r.id = j.rollout_id AND r.parent_id IS NULL AND r.status = 'done' AND r.train
    WHERE NOT EXISTS (SELECT FROM keys AS k WHERE k.public_id = r.key_id AND NOT k.train)
  ) AS judged WHERE sampled OR drawn LIMIT :most
) AS counted
