-- Hooks: calls of the floors for optional features (schedules, capture, the archive, tables as sinks, schemas of
-- streams), which no other file names, and for all tables with rows of a stream or consumer that is dropped.
--
-- The header of a hook says when it is called. make docs (python -m tests.docs) writes its body from comments in the
-- files of features, in the order of install.sql: "-- on drop_stream: <statement>", and continuation lines, indented by
-- four. So a call needs no lookup at run time. A table with a stream_id or consumer_id has such a comment for the end
-- of its stream or consumer; tests/sql/test_hooks.py checks that.
--
-- Sends and claims call a hook only for a stream or consumer whose row requires it: schema_path, scheduled.

-- A claim begins for a consumer whose stream has schedules (consumers.scheduled).
create or replace function _pgqueue.on_claim(p_stream_id int) returns void
language plpgsql as $$ begin
    -- on claim
    -- schedules/schedules.sql
    perform _pgqueue.run_schedules(p_stream_id);
    -- end
end $$;

-- When the next schedule of a stream is due; null: never.
create or replace function _pgqueue.on_due(p_stream_id int) returns timestamptz
language sql stable as $$ select least(null::timestamptz
        -- on due
        -- schedules/schedules.sql
        , _pgqueue.schedules_sendable(p_stream_id)
        -- end
    ) $$;

-- A setting has a type that base/settings.sql does not know: whether a text is a value of that type.
create or replace function _pgqueue.on_setting(p_type text, p_text text) returns boolean
language sql immutable as $$ select case
        when p_type is null then null::boolean
        -- on setting
        -- typed/schemas.sql
        when p_type = 'schema' then _pgqueue.read_schema(p_text) is not null
        -- end
    end $$;

-- Settings of a stream are to be changed: raises errors. For a stream that is to be created, only its kind is given.
create or replace function _pgqueue.before_set_stream(p_stream pgqueue.streams, p_settings jsonb) returns void
language plpgsql as $$ begin
    -- on before_set_stream
    -- typed/schemas.sql
    perform _pgqueue.check_schema(p_stream.kind, p_stream.schema, p_settings);
    -- end
end $$;

-- Settings of a stream are to be stored, and the row has them. Returns the row, with derived columns.
create or replace function _pgqueue.on_set_stream(p_stream pgqueue.streams, p_settings jsonb) returns pgqueue.streams
language plpgsql as $$ begin
    -- on set_stream
    -- typed/schemas.sql
    if p_settings ? 'schema' then
        p_stream.schema_path := _pgqueue.schema_path(_pgqueue.read_schema(p_stream.schema));
    end if;
    -- end
    return p_stream;
end $$;

-- Whether all messages of a stream may be copied to another one.
create or replace function _pgqueue.on_bind(p_from pgqueue.streams, p_to pgqueue.streams) returns boolean
language sql stable as $$ select true
        -- on bind
        -- typed/schemas.sql
        and _pgqueue.schema_includes(p_from.schema, p_to.schema)
        -- end
$$;

-- A payload does not match the schema_path of its stream: raises an error. (Sends evaluate the path first.)
create or replace function _pgqueue.on_misfit(p_stream pgqueue.streams, p_data jsonb) returns void
language plpgsql as $$ begin
    -- on misfit
    -- typed/schemas.sql
    perform _pgqueue.refuse_misfit(p_stream, p_data);
    -- end
end $$;

-- For a reader without a consumer: the publications of a stream that are stored elsewhere, from an id on and below
-- another one. (In PL/pgSQL, as the next two: see reading/readable.sql.)
create or replace function _pgqueue.on_read(p_stream_id int, p_from bigint, p_below bigint)
returns table (publication_id bigint, message_count bigint, data_bytes bigint, published_at timestamptz,
               seqs int8multirange, consumers int[])
language plpgsql stable as $$ begin
    -- on read
    -- archive/archived.sql
    return query select * from _pgqueue.archived(p_stream_id, p_from, p_below);
    -- end
end $$;

-- The first of these, in no order: at least p_rows, and the other parts of the last one.
create or replace function _pgqueue.on_read_first(p_stream_id int, p_from bigint, p_below bigint, p_rows bigint)
returns table (publication_id bigint, message_count bigint, published_at timestamptz, seqs int8multirange,
               consumers int[])
language plpgsql stable as $$ begin
    -- on read_first
    -- archive/archived.sql
    return query select a.publication_id, a.message_count, a.published_at, a.seqs, a.consumers
                 from _pgqueue.archived(p_stream_id, p_from, p_below, p_rows) a;
    -- end
end $$;

-- The last of these below an id, in the same way.
create or replace function _pgqueue.on_read_last(p_stream_id int, p_below bigint, p_rows bigint)
returns table (publication_id bigint, published_at timestamptz, seqs int8multirange)
language plpgsql stable as $$ begin
    -- on read_last
    -- archive/archived.sql
    return query select * from _pgqueue.last_in_archive(p_stream_id, p_below, p_rows);
    -- end
end $$;

-- The first message of a stream that is stored elsewhere; null: none is.
create or replace function _pgqueue.on_first_seq(p_stream_id int) returns bigint
language sql stable as $$ select least(null::bigint
        -- on first_seq
        -- archive/archived.sql
        , (select min((f ->> 'lo')::bigint)
           from pgqueue.archive_segments a cross join jsonb_array_elements(a.files) f where a.stream_id = p_stream_id)
        -- end
    ) $$;

-- Where features store numbers of sequences, as in number_holders() (log/numbers.sql).
create or replace function _pgqueue.on_numbers() returns table (numbers text, quick boolean, query text)
language sql immutable as $$ select null, false, null where false
    -- on numbers
    -- schedules/schedules.sql
    union all values ('seq_%s', false, 'select max(seq) from pgqueue.schedules where stream_id = %1$s')
    -- archive/archived.sql
    union all values
        ('seq_%s', true, 'select max(hi) - 1 from pgqueue.archive_segments where stream_id = %1$s'),
        ('publication_%s', true, 'select max(last_publication) from pgqueue.archive_segments where stream_id = %1$s')
    union all values
        ('seq_%s', false, 'select max(upper(seqs)) - 1 from pgqueue.archive_publications where stream_id = %1$s'),
        ('publication_%s', true, 'select max(publication_id) from pgqueue.archive_publications '
                                 'where stream_id = %1$s'),
        ('consumers_consumer_id_seq', false, 'select max(c) from pgqueue.archive_publications cross join lateral '
                                             'unnest(consumers) c')
    union all values
        ('publication_%s', true, 'select max(last_publication) from pgqueue.archive_packs where stream_id = %1$s')
    -- table_sink/table_sink.sql
    union all values ('table_write_numbers', false, 'select max(write_no >> 24) from pgqueue.table_writes')
    -- end
$$;

-- A segment of a stream is due, and sealed: why it cannot be trimmed yet; null: it can.
create or replace function _pgqueue.on_hold(p_stream_id int, p_segment int) returns text
language sql stable as $$ select coalesce(null::text
        -- on hold
        -- archive/aging.sql
        , _pgqueue.awaits_export(p_stream_id, p_segment)
        -- end
    ) $$;

-- Publications of a stream are to be trimmed: the numbers of messages that are stored elsewhere too.
create or replace function _pgqueue.on_trim(p_stream_id int) returns int8multirange
language sql stable as $$ select int8multirange()
        -- on trim
        -- archive/archived.sql
        + (select coalesce(range_agg(int8range(lo, hi)), '{}') from pgqueue.archive_segments
           where stream_id = p_stream_id)
        -- end
$$;

-- Publications were trimmed whose messages are all stored elsewhere (on_trim()). The messages are still in the table.
create or replace function _pgqueue.on_trimmed(p_stream_id int, p_publications pgqueue.publications[]) returns void
language plpgsql as $$ begin
    -- on trimmed
    -- archive/aging.sql
    perform _pgqueue.move_to_archive(p_stream_id, p_publications);
    -- end
end $$;

-- Streams for which retain() is called, even if they have no retention.
create or replace function _pgqueue.on_retain() returns setof int
language sql stable as $$ select null::int where false
    -- on retain
    -- archive/archived.sql
    union all select stream_id from pgqueue.archives
    union all select s.stream_id from pgqueue.streams s
              where exists (select from pgqueue.archive_segments a where a.stream_id = s.stream_id)
    -- end
$$;

-- A stream was trimmed, and its maintenance is locked. Returns whether there may be more to do.
create or replace function _pgqueue.on_retained(p_stream_id int) returns boolean
language plpgsql as $$
declare
    v_more boolean := false;
begin
    -- on retained
    -- archive/aging.sql
    v_more := _pgqueue.expire_archive(p_stream_id) or v_more;
    v_more := _pgqueue.pack(p_stream_id) or v_more;
    -- end
    return v_more;
end $$;

-- recover() gave each stream a new incarnation.
create or replace function _pgqueue.on_recover() returns void
language plpgsql as $$ begin
    -- on recover
    -- archive/archived.sql
    delete from pgqueue.archive_attempts;  -- another server may use their files now
    -- end
end $$;

-- A try to delete a consumer: its row and its bundles are deleted, and its lock is held.
create or replace function _pgqueue.on_drop_consumer(p_consumer_id int) returns void
language plpgsql as $$ begin
    -- on drop_consumer
    -- base/consumers.sql
    delete from pgqueue.consumer_filters where consumer_id = p_consumer_id;
    -- log/cursors.sql
    delete from pgqueue.consumer_cursors where consumer_id = p_consumer_id;
    delete from pgqueue.consumer_gaps where consumer_id = p_consumer_id;
    delete from pgqueue.taken_ahead where consumer_id = p_consumer_id;
    -- queue/state/history.sql
    delete from pgqueue.completed_messages where consumer_id = p_consumer_id;
    -- queue/keys/newest.sql
    delete from pgqueue.newest_of_keys where consumer_id = p_consumer_id;
    -- queue/keys/key_tokens.sql
    delete from pgqueue.key_tokens where consumer_id = p_consumer_id;
    -- queue/send/key_capacity.sql
    perform _pgqueue.delete_old_entries(p_consumer_id);
    -- groups/groups.sql
    delete from pgqueue.group_partitions where consumer_id = p_consumer_id;
    delete from pgqueue.group_workers where consumer_id = p_consumer_id;
    -- operate/skipping.sql
    delete from pgqueue.skips where consumer_id = p_consumer_id;
    -- operate/dead_letters.sql
    delete from pgqueue.dead_messages where consumer_id = p_consumer_id;
    -- spark/reader.sql
    delete from pgqueue.readers where consumer_id = p_consumer_id;
    delete from pgqueue.reader_claims where consumer_id = p_consumer_id;
    -- end
end $$;

-- A stream is to be deleted: raises errors. Nothing is locked.
create or replace function _pgqueue.before_drop_stream(p_stream pgqueue.streams) returns void
language plpgsql as $$ begin
    -- on before_drop_stream
    -- capture/capture.sql
    perform _pgqueue.refuse_captured(p_stream);
    -- end
end $$;

-- A try to delete a stream: its row is locked, its consumers are deleted.
create or replace function _pgqueue.on_drop_stream(p_stream_id int) returns void
language plpgsql as $$ begin
    -- on drop_stream
    -- base/streams.sql
    delete from pgqueue.incarnations where stream_id = p_stream_id;
    -- log/messages.sql
    delete from pgqueue.resolved where stream_id = p_stream_id;  -- lock: resolved
    -- log/trims.sql
    delete from pgqueue.trims where stream_id = p_stream_id;
    -- log/segments.sql
    delete from pgqueue.segments where stream_id = p_stream_id;
    -- operate/retention.sql
    delete from pgqueue.retention where stream_id = p_stream_id;
    -- schedules/schedules.sql
    delete from pgqueue.schedules where stream_id = p_stream_id;
    delete from pgqueue.schedule_turns where stream_id = p_stream_id;
    -- capture/capture_triggers.sql
    delete from pgqueue.captured where stream_id = p_stream_id;
    -- archive/archived.sql
    delete from pgqueue.archives where stream_id = p_stream_id;
    perform _pgqueue.discard_files(a) from pgqueue.archive_segments a where a.stream_id = p_stream_id;
    delete from pgqueue.archive_segments where stream_id = p_stream_id;
    -- end
end $$;

-- A stream was dropped, and all transactions that may have seen it have ended (operate/stream_lifecycle.sql).
create or replace function _pgqueue.on_clear_stream(p_stream_id int) returns void
language plpgsql as $$ begin
    -- on clear_stream
    -- log/messages.sql
    delete from pgqueue.publications where stream_id = p_stream_id;
    -- log/dedup.sql
    delete from pgqueue.dedup_keys where stream_id = p_stream_id;
    -- spark/batches.sql
    delete from pgqueue.reservations where stream_id = p_stream_id;
    delete from pgqueue.staged_chunks where stream_id = p_stream_id;
    delete from pgqueue.sink_batches where stream_id = p_stream_id;
    -- archive/archived.sql
    delete from pgqueue.archive_publications where stream_id = p_stream_id;
    delete from pgqueue.archive_packs where stream_id = p_stream_id;
    -- end
end $$;

-- Tasks of maintain(), before it trims.
create or replace function _pgqueue.on_maintain() returns void
language plpgsql as $$ begin
    -- on maintain
    -- queue/send/key_capacity.sql
    perform _pgqueue.run_task('select 0 from _pgqueue.maintain_key_backlog()');
    -- capture/capture.sql
    perform _pgqueue.run_task('select 0 from _pgqueue.capture_partitions()');
    -- end
end $$;

-- Tasks of maintain(), after it trimmed.
--   p_stream_ids  the streams of this round
--   p_age         the age from which data of failed writers is deleted
create or replace function _pgqueue.on_maintained(p_stream_ids int[], p_age interval) returns void
language plpgsql as $$ begin
    -- on maintained
    -- queue/send/back_pressure.sql
    perform _pgqueue.run_task('select 0 from _pgqueue.drop_backlog_sequences()');
    -- schedules/schedules.sql
    perform _pgqueue.run_task('select 0 from _pgqueue.run_schedules($1::int)', t.stream_id)
    from (select distinct stream_id from pgqueue.schedules
          where not paused and next_at <= clock_timestamp() and stream_id = any (p_stream_ids)) t;
    perform _pgqueue.run_task('select 0 from _pgqueue.correct_schedules($1::int)', t.stream_id)
    from (select distinct stream_id from pgqueue.schedules
          where not paused and greatest(sent_at, timed_at) > clock_timestamp() + interval '1 minute'
            and stream_id = any (p_stream_ids)) t;
    -- table_sink/table_sink.sql
    perform _pgqueue.run_task('select to_jsonb(_pgqueue.drop_staged_rows(($2 -> 0)::bigint, $2 ->> 1))', null,
                           jsonb_build_array(w.write_no, w.staged_by))
    from _pgqueue.abandoned_table_writes(p_age) w;
    -- end
end $$;
