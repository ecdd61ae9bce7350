-- Capture: which tables are captured. The triggers themselves stand at the tables, and belong to the tables' owners.

-- The captured tables, and those partitions of them that are captured for writes straight into them. Only
-- note_captures() writes here, after it has looked at the triggers: anybody may give a trigger the name of ours.
-- A table is known by its OID, which a dump writes as the table's name. A row whose table or trigger is gone counts
-- for nothing; maintain() deletes it.
-- on drop_stream
create table if not exists pgqueue.captured (
    relation  regclass not null,
    stream_id int      not null references pgqueue.streams,
    root      regclass not null,  -- the captured table; of a partition the table whose capture it belongs to
    primary key (relation, stream_id)
);
