-- Installs or upgrades the schema pgqueue:  psql -f sql/install.sql
-- One transaction; run it again at any time. The files are in reading order.
\set ON_ERROR_STOP on
\set QUIET on
begin;
set local client_min_messages = warning;
set local search_path = pg_catalog, pg_temp;
\ir schema.sql
\ir tables/streams.sql
\ir tables/consumers.sql
\ir tables/groups.sql
\ir tables/spark.sql
\ir tables/retention.sql
\ir tables/schedules.sql
\ir tables/history.sql
\ir migrations/2.sql
\ir tables/indexes.sql
\ir core/limits.sql
\ir core/sets.sql
\ir core/names.sql
\ir core/checks.sql
\ir core/settings.sql
\ir core/locks.sql
\ir core/back_pressure.sql
\ir core/publish.sql
\ir core/dedup.sql
\ir core/runs.sql
\ir core/cursor.sql
\ir core/gaps.sql
\ir core/positions.sql
\ir core/offsets.sql
\ir core/take.sql
\ir core/line.sql
\ir core/keys.sql
\ir core/key_limits.sql
\ir core/key_capacity.sql
\ir core/leases.sql
\ir core/throttle.sql
\ir core/filters.sql
\ir core/history.sql
\ir core/settle.sql
\ir core/cron.sql
\ir core/schedules.sql
\ir core/claims.sql
\ir core/leaves.sql
\ir core/retention.sql
\ir functions/streams.sql
\ir functions/consumers.sql
\ir functions/positions.sql
\ir functions/publish.sql
\ir functions/schedules.sql
\ir functions/filters.sql
\ir functions/capture.sql
\ir functions/waiting.sql
\ir functions/receive.sql
\ir functions/receive_where.sql
\ir functions/settle.sql
\ir functions/dead.sql
\ir functions/cancel.sql
\ir functions/read.sql
\ir functions/peeking.sql
\ir functions/export.sql
\ir functions/groups.sql
\ir spark/quarantine.sql
\ir spark/source.sql
\ir spark/admission.sql
\ir spark/checkpoint.sql
\ir spark/sink.sql
\ir spark/actions.sql
\ir views/backlog.sql
\ir views/views.sql
\ir functions/seeing.sql
\ir functions/history.sql
\ir functions/scanning.sql
\ir functions/retention.sql
\ir functions/maintain.sql
\ir functions/recover.sql
\ir version.sql
\ir roles.sql
\ir settings.sql
\ir comments.sql
commit;
