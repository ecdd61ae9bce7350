-- Installs the schema pgmq: an interface to this queue for clients of pgmq 1.13. psql -f sql/pgmq/install.sql, after
-- sql/install.sql. One transaction; run it again at any time, and after each upgrade of the schema pgqueue. It is not
-- installed by default.
\set ON_ERROR_STOP on
\set QUIET on
begin isolation level read committed read write;
set local client_min_messages = warning;
set local search_path = pg_catalog, pg_temp;
set local quote_all_identifiers = off;
set local standard_conforming_strings = on;
set local array_nulls = on;
set local transform_null_equals = off;
set local check_function_bodies = on;
\ir schema.sql
\ir queues.sql
\ir messages.sql
\ir reading.sql
\ir settling.sql
\ir sending.sql
\ir topics.sql
\ir access.sql
commit;
