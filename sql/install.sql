-- Installs or upgrades the schema pgqueue:  psql -f sql/install.sql
-- One transaction; run it again at any time. The files are in reading order.
\set ON_ERROR_STOP on
\set QUIET on
begin isolation level read committed read write;
set local client_min_messages = warning;
set local search_path = pg_catalog, pg_temp;
-- Names, literals and patterns have their default meaning, whatever the role and the database set.
set local quote_all_identifiers = off;
set local standard_conforming_strings = on;
set local array_nulls = on;
set local transform_null_equals = off;
-- Without the check, which triples the time. tests/sql/test_install.py checks all bodies, as `create function` does by
-- default.
set local check_function_bodies = off;
\ir schema.sql
\ir upgrade.sql
\ir migrations/2.sql
\ir migrations/3.sql
\ir base/limits.sql
\ir base/sets.sql
\ir base/streams.sql
\ir base/consumers.sql
\ir base/names.sql
\ir base/json.sql
\ir base/conditions.sql
\ir base/checks.sql
\ir base/locks.sql
\ir base/settings.sql
\ir log/messages.sql
\ir log/cursors.sql
\ir log/gaps.sql
\ir log/trims.sql
\ir log/numbers.sql
\ir log/dedup.sql
\ir log/stream_functions.sql
\ir log/segments.sql
\ir reading/readable.sql
\ir reading/offsets.sql
\ir reading/reading.sql
\ir reading/positions.sql
\ir reading/read.sql
\ir queue/state/consumer_messages.sql
\ir queue/state/states.sql
\ir queue/state/bundles.sql
\ir queue/state/cursor.sql
\ir queue/state/placing.sql
\ir queue/state/history.sql
\ir queue/keys/key_sets.sql
\ir queue/keys/waiting.sql
\ir queue/keys/long_claims.sql
\ir queue/keys/newest.sql
\ir queue/keys/key_tokens.sql
\ir queue/keys/key_limits.sql
\ir queue/keys/free_keys.sql
\ir queue/keys/assigning.sql
\ir queue/take/filters.sql
\ir queue/take/passing.sql
\ir queue/take/take.sql
\ir queue/settle/failures.sql
\ir queue/settle/return.sql
\ir queue/settle/settle.sql
\ir queue/settle/leases.sql
\ir queue/settle/acknowledge.sql
\ir queue/send/backlog.sql
\ir queue/send/back_pressure.sql
\ir queue/send/key_capacity.sql
\ir queue/send/publish.sql
\ir queue/send/written.sql
\ir queue/send/send.sql
\ir queue/claim/throttle.sql
\ir queue/claim/drop_oldest.sql
\ir queue/claim/begin.sql
\ir queue/claim/making.sql
\ir queue/claim/by_key.sql
\ir queue/claim/matching.sql
\ir queue/claim/due_work.sql
\ir queue/claim/ahead.sql
\ir queue/claim/free.sql
\ir queue/claim/claims.sql
\ir queue/claim/receive.sql
\ir queue/claim/receive_where.sql
\ir queue/claim/listen.sql
\ir operate/seek.sql
\ir operate/consumer_lifecycle.sql
\ir operate/stream_lifecycle.sql
\ir groups/groups.sql
\ir groups/group_workers.sql
\ir operate/skipping.sql
\ir operate/retention.sql
\ir operate/bindings.sql
\ir operate/dead_letters.sql
\ir operate/cancel.sql
\ir operate/postpone.sql
\ir operate/consumer_lag.sql
\ir operate/peek.sql
\ir operate/explain.sql
\ir operate/outcome.sql
\ir operate/scan.sql
\ir operate/scan_where.sql
\ir operate/recover.sql
\ir spark/reader.sql
\ir spark/quarantine.sql
\ir spark/checkpoint.sql
\ir spark/admission.sql
\ir spark/claim_back.sql
\ir spark/source.sql
\ir spark/batches.sql
\ir spark/unstage.sql
\ir spark/sink.sql
\ir spark/actions.sql
\ir operate/views.sql
\ir schedules/cron.sql
\ir schedules/schedules.sql
\ir schedules/create_schedule.sql
\ir capture/capture_function.sql
\ir capture/capture_triggers.sql
\ir capture/capture.sql
\ir archive/archived.sql
\ir archive/aging.sql
\ir archive/archive_files.sql
\ir archive/set_archive.sql
\ir archive/export.sql
\ir table_sink/table_fit.sql
\ir table_sink/table_plan.sql
\ir table_sink/table_sink.sql
\ir table_sink/table_apply.sql
\ir typed/schemas.sql
\ir operate/maintain.sql
\ir migrations/3_after.sql
\ir indexes.sql
\ir hooks.sql
\ir version.sql
\ir access.sql
\ir roles.sql
\ir function_settings.sql
\ir comments.sql
\ir view_comments.sql
commit;
