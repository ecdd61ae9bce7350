-- Spark's sink into a table (spark/table_sink.sql).

-- The writes to tables that have staged rows: each has a table of its own for them, staged_rows_<write_no>. The rows of
-- a write that was killed stay until the next write of its batch, or until maintain().
-- on numbers: union all values ('write_numbers', false, 'select max(write_no >> 32) from pgqueue.table_writes')
create table if not exists pgqueue.table_writes (
    write_no  bigint      primary key,      -- of open_table(): a try of a batch
    sink      text        not null,
    batch     bigint      not null,
    given     jsonb       not null,         -- what open_table() was given
    plan      jsonb       not null,         -- the target as it was then (spark/table_plan.sql)
    role      text        not null,         -- fills the table of staged rows, and reads it
    staged_by text        not null default session_user,
    staged_at timestamptz not null default clock_timestamp()
);
