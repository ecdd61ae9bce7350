-- Groups: consumers whose messages nobody claims. Workers lease partitions of the keys, read the consumer's bundles
-- in their order, and note for each partition how far they are. A bundle is deleted when all partitions have passed it.
-- See functions/groups.sql.

-- The partitions of a group, and how far each has been worked off. Rows are never updated, as those of
-- consumer_cursors: the newest version counts.
-- on drop_consumer
create table if not exists pgqueue.group_partitions (
    consumer_id  int         not null,
    partition    int         not null,
    version      bigint      not null,
    line_no      bigint      not null,  -- all messages up to this place are done: by bundle ...
    seq          bigint      not null,  -- ... and of that one up to this number
    lease_id     bigint,                -- who has it commits
    worker       text,                  -- null: nobody has it
    committed_at timestamptz,           -- with line_no 0: by an offset reader (note_offset)
    primary key (consumer_id, partition, version)
);

-- The workers of a group, and until when each one's lease lasts.
-- on drop_consumer
create table if not exists pgqueue.group_workers (
    consumer_id int         not null,
    worker      text        not null,
    lease_until timestamptz not null,
    joined_at   timestamptz not null default clock_timestamp(),
    primary key (consumer_id, worker)
);
