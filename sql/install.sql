-- Installs or upgrades the schema pgqueue:  psql -f sql/install.sql
-- One transaction; run it again at any time. The files are in reading order.
\set ON_ERROR_STOP on
\set QUIET on
begin isolation level read committed read write;
set local client_min_messages = warning;
set local search_path = pg_catalog, pg_temp;
-- Whatever the role and the database set: names, literals and patterns mean here what they mean by default.
set local quote_all_identifiers = off;
set local standard_conforming_strings = on;
set local array_nulls = on;
set local transform_null_equals = off;
-- A third of the time. tests/sql/test_install.py checks all bodies, as `create function` does by default.
set local check_function_bodies = off;
\ir schema.sql
\ir tables/streams.sql
\ir tables/consumers.sql
\ir tables/groups.sql
\ir tables/spark.sql
\ir tables/table_sink.sql
\ir tables/retention.sql
\ir tables/archive.sql
\ir tables/schedules.sql
\ir tables/history.sql
\ir tables/capture.sql
\ir upgrade.sql
\ir migrations/2.sql
\ir migrations/3.sql
\ir tables/indexes.sql
\ir base/limits.sql
\ir base/sets.sql
\ir base/names.sql
\ir base/json.sql
\ir base/schemas.sql
\ir base/ways.sql
\ir base/checks.sql
\ir base/locks.sql
\ir base/bundles.sql
\ir base/settings.sql
\ir log/gaps.sql
\ir log/trims.sql
\ir log/numbers.sql
\ir log/archive.sql
\ir log/readable.sql
\ir log/offsets.sql
\ir log/reading.sql
\ir log/positions.sql
\ir log/dedup.sql
\ir log/payloads.sql
\ir log/segments.sql
\ir queue/states.sql
\ir queue/bundles.sql
\ir queue/cursor.sql
\ir queue/placing.sql
\ir queue/key_sets.sql
\ir queue/waiting.sql
\ir queue/held.sql
\ir queue/history.sql
\ir queue/newest.sql
\ir queue/filters.sql
\ir queue/passing.sql
\ir queue/take.sql
\ir queue/failures.sql
\ir queue/key_tokens.sql
\ir queue/key_limits.sql
\ir queue/free_keys.sql
\ir queue/dealing.sql
\ir queue/return.sql
\ir queue/settle.sql
\ir queue/leases.sql
\ir queue/throttle.sql
\ir publish/backlog.sql
\ir publish/back_pressure.sql
\ir publish/key_capacity.sql
\ir publish/publish.sql
\ir publish/written.sql
\ir publish/cron.sql
\ir publish/schedules.sql
\ir claim/owed.sql
\ir claim/begin.sql
\ir claim/archive.sql
\ir claim/retention.sql
\ir claim/drop_oldest.sql
\ir claim/making.sql
\ir claim/by_key.sql
\ir claim/matching.sql
\ir claim/refresh.sql
\ir claim/ahead.sql
\ir claim/free.sql
\ir claim/claims.sql
\ir functions/positions.sql
\ir functions/consumers.sql
\ir functions/streams.sql
\ir functions/schemas.sql
\ir functions/publish.sql
\ir functions/schedules.sql
\ir functions/filters.sql
\ir functions/capture_function.sql
\ir functions/capture_triggers.sql
\ir functions/capture.sql
\ir functions/waiting.sql
\ir functions/receive.sql
\ir functions/receive_where.sql
\ir functions/settle.sql
\ir functions/dead.sql
\ir functions/cancel.sql
\ir functions/postpone.sql
\ir functions/read.sql
\ir functions/groups.sql
\ir functions/group_workers.sql
\ir spark/reader.sql
\ir spark/quarantine.sql
\ir spark/checkpoint.sql
\ir spark/admission.sql
\ir spark/claim_back.sql
\ir spark/archive.sql
\ir spark/source.sql
\ir spark/batches.sql
\ir spark/unstage.sql
\ir spark/sink.sql
\ir spark/actions.sql
\ir spark/table_fit.sql
\ir spark/table_plan.sql
\ir spark/table_sink.sql
\ir spark/table_apply.sql
\ir inspect/backlog.sql
\ir inspect/views.sql
\ir inspect/schedules.sql
\ir inspect/capture.sql
\ir inspect/seeing.sql
\ir inspect/peeking.sql
\ir inspect/history.sql
\ir inspect/scanning.sql
\ir inspect/where.sql
\ir upkeep/retention.sql
\ir upkeep/archive.sql
\ir upkeep/export.sql
\ir upkeep/dropped.sql
\ir upkeep/maintain.sql
\ir upkeep/recover.sql
\ir hooks.sql
\ir version.sql
\ir access.sql
\ir roles.sql
\ir settings.sql
\ir comments.sql
\ir view_comments.sql
commit;
