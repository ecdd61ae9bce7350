-- Installs or upgrades the schema pgqueue:  psql -f sql/install.sql
-- One transaction; run it again at any time. The files are in reading order.
\set ON_ERROR_STOP on
begin;
set local client_min_messages = warning;
\ir 00_schema.sql
\ir 10_tables.sql
\ir 15_upgrades.sql
\ir 20_sets.sql
\ir 30_streams.sql
\ir 40_publish.sql
\ir 50_take.sql
\ir 60_claim.sql
\ir 65_claim_ordered.sql
\ir 70_settle.sql
\ir 80_source.sql
\ir 85_sink.sql
\ir 90_views.sql
\ir 95_maintain.sql
\ir 99_version.sql
commit;
