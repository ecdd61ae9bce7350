-- Hooks: what a floor does for the features above it, which it does not name.
--
-- A function of this file is called where its header says. What it does is written by make docs (python -m tests.docs),
-- from lines of features' files, in the order of install.sql: "-- on drop_stream: <statement>", and below it lines that
-- go on with it, indented by four. So a call is plain text: it is looked up nowhere, and costs a call. A table with a
-- stream_id or consumer_id has such a line for the end of its stream or consumer; tests/sql/test_hooks.py looks at all.

-- A claim begins for a consumer whose row says that its stream has schedules (consumers.scheduled).
create or replace function _pgqueue.on_claim(p_stream_id int) returns void
language plpgsql
as $$
begin
    -- on claim
    -- publish/schedules.sql
    perform _pgqueue.run_schedules(p_stream_id);
    -- end
end $$;

-- When a claim for such a consumer has something to do; null: never.
create or replace function _pgqueue.on_due(p_stream_id int) returns timestamptz
language sql stable
as $$
    select least(null::timestamptz
        -- on due
        -- publish/schedules.sql
        , _pgqueue.schedule_due(p_stream_id)
        -- end
    )
$$;

-- A try to delete a consumer: its row and its runs are gone, and its lock is held.
create or replace function _pgqueue.on_drop_consumer(p_consumer_id int) returns void
language plpgsql
as $$
begin
    -- on drop_consumer
    -- tables/consumers.sql
    delete from pgqueue.consumer_filters where consumer_id = p_consumer_id;
    delete from pgqueue.consumer_cursors where consumer_id = p_consumer_id;
    delete from pgqueue.consumer_gaps where consumer_id = p_consumer_id;
    delete from pgqueue.key_tokens where consumer_id = p_consumer_id;
    delete from pgqueue.newest_of_keys where consumer_id = p_consumer_id;
    delete from pgqueue.dead_messages where consumer_id = p_consumer_id;
    -- tables/groups.sql
    delete from pgqueue.group_partitions where consumer_id = p_consumer_id;
    delete from pgqueue.group_workers where consumer_id = p_consumer_id;
    -- tables/spark.sql
    delete from pgqueue.claims
    where reader in (select reader from pgqueue.readers where consumer_id = p_consumer_id);
    delete from pgqueue.readers where consumer_id = p_consumer_id;
    -- tables/retention.sql
    delete from pgqueue.skips where consumer_id = p_consumer_id;
    -- tables/history.sql
    delete from pgqueue.archived_messages where consumer_id = p_consumer_id;
    -- publish/key_capacity.sql
    perform _pgqueue.forget_entries(p_consumer_id);
    -- end
end $$;

-- A stream is to be deleted: raises what forbids it. Nothing is locked.
create or replace function _pgqueue.before_drop_stream(p_stream pgqueue.streams) returns void
language plpgsql
as $$
begin
    -- on before_drop_stream
    -- functions/capture.sql
    perform _pgqueue.refuse_captured(p_stream);
    -- end
end $$;

-- A try to delete a stream: its row is there and locked, its consumers are gone.
create or replace function _pgqueue.on_drop_stream(p_stream_id int) returns void
language plpgsql
as $$
begin
    -- on drop_stream
    -- tables/streams.sql
    delete from pgqueue.incarnations where stream_id = p_stream_id;
    delete from pgqueue.decided where stream_id = p_stream_id;  -- lock: decided
    -- tables/retention.sql
    delete from pgqueue.retention where stream_id = p_stream_id;
    delete from pgqueue.segments where stream_id = p_stream_id;
    delete from pgqueue.trims where stream_id = p_stream_id;
    -- tables/archive.sql
    delete from pgqueue.archives where stream_id = p_stream_id;
    perform _pgqueue.leave_files(a) from pgqueue.archive_segments a where a.stream_id = p_stream_id;
    delete from pgqueue.archive_segments where stream_id = p_stream_id;
    -- tables/schedules.sql
    delete from pgqueue.schedules where stream_id = p_stream_id;
    delete from pgqueue.schedule_turns where stream_id = p_stream_id;
    -- tables/capture.sql
    delete from pgqueue.captured where stream_id = p_stream_id;
    -- end
end $$;

-- A stream was dropped, and no transaction is left that may have seen it (upkeep/dropped.sql).
create or replace function _pgqueue.on_clear_stream(p_stream_id int) returns void
language plpgsql
as $$
begin
    -- on clear_stream
    -- tables/streams.sql
    delete from pgqueue.publications where stream_id = p_stream_id;
    delete from pgqueue.dedup_keys where stream_id = p_stream_id;
    -- tables/spark.sql
    delete from pgqueue.reservations where stream_id = p_stream_id;
    delete from pgqueue.staged_chunks where stream_id = p_stream_id;
    delete from pgqueue.sink_batches where stream_id = p_stream_id;
    -- tables/archive.sql
    delete from pgqueue.archive_publications where stream_id = p_stream_id;
    delete from pgqueue.archive_packs where stream_id = p_stream_id;
    -- end
end $$;

-- Chores of maintain(), before it trims.
create or replace function _pgqueue.on_maintain() returns void
language plpgsql
as $$
begin
    -- on maintain
    -- publish/key_capacity.sql
    perform _pgqueue.chore('select 0 from _pgqueue.tend_key_backlog()');
    -- functions/capture.sql
    perform _pgqueue.chore('select 0 from _pgqueue.capture_partitions()');
    -- end
end $$;

-- Chores of maintain(), after it trimmed.
--   p_stream_ids  the streams whose turn it is
--   p_age         of what failed writers left
create or replace function _pgqueue.on_maintained(p_stream_ids int[], p_age interval) returns void
language plpgsql
as $$
begin
    -- on maintained
    -- publish/back_pressure.sql
    perform _pgqueue.chore('select 0 from _pgqueue.forget_rooms()');
    -- publish/schedules.sql
    perform _pgqueue.chore('select 0 from _pgqueue.run_schedules($1::int)', t.stream_id)
    from (select distinct stream_id from pgqueue.schedules
          where not paused and next_at <= clock_timestamp() and stream_id = any (p_stream_ids)) t;
    -- spark/table_sink.sql
    perform _pgqueue.chore('select to_jsonb(_pgqueue.drop_staged_rows(($2 -> 0)::bigint, $2 ->> 1))', null,
                           jsonb_build_array(w.write_no, w.staged_by))
    from _pgqueue.left_table_writes(p_age) w;
    -- end
end $$;
