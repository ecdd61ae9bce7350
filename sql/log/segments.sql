-- Segments: the messages of a stream with a retention, partitioned by range of seq, so that old messages are removed a
-- table at a time.
--
-- A stream is one table until it has a retention. Then maintain() makes that table the first segment of a partitioned
-- table, and always creates two more segments ahead. No other call creates or drops segments. A segment has 2^30
-- numbers, so that no burst exceeds the next two; numbers beyond them are in messages_<stream_id>_rest, which costs
-- time but loses nothing. A segment is closed when it has its share of the kept messages: then the sequence skips to
-- the next segment. So numbers increase, sometimes with large jumps.
--
-- The states of a segment:
--   ready    no message was written to it yet
--   open     the next number belongs to it
--   closed   none of its numbers is assigned any more. Transactions that have such numbers hold a lock of the sequence
--            until they end: these transactions are recorded
--   sealed   they have ended, and no reservation has a number of it: all its messages that will ever be published are
--            published, up to a recorded id
--   emptied  all these publications are trimmed (operate/retention.sql). Its table was truncated, which locks only this
--            segment
--   dropped  at a moment when no transaction writes to the stream. If objects of other roles depend on it, such as a
--            view, it is only detached, and dropped when these are gone
-- maintain() waits at most 50 ms for a lock that others need (maintain_segments()).
--
-- A statement that reads a stream's messages is planned each time (execute), or names one segment. Postgres (18.4)
-- caches a plan over a partitioned table that lacks a partition attached while the plan was made: the session would not
-- see messages of the new segment. (Attaching a partition does not lock out planning, so no session waits for it.)

-- The segments of a stream that has or had a retention: messages_<stream_id>_<segment> for the numbers from lo to
-- below hi. Numbers of no segment are in messages_<stream_id>_rest.
-- on drop_stream
create table if not exists pgqueue.segments (
    stream_id          int         not null,
    segment            int         not null,
    lo                 bigint      not null,
    hi                 bigint      not null,
    opened_at          timestamptz,                     -- when its first number was assigned; null: not yet
    closed_at          timestamptz,                     -- when it was closed; null: not yet
    last_seq           bigint,                          -- closed: the last one that was written
    closed_publication bigint,                          -- closed: the last publication id that was assigned then
    -- closed: virtual ids of transactions that may still write or publish some of it; null: none, ...
    writers            text[],
    -- ... and then all its publications have ids up to this one
    last_publication   bigint,
    emptied            boolean     not null default false,
    held_by            text[]      not null default '{}',  -- it is due to be trimmed, but these prevent it
    primary key (stream_id, segment)
);

-- The tables of a stream's messages, with their sizes. Locks: none that stays. (pg_partition_tree() locks each table
-- until the transaction ends, so one look at all streams could fill the lock table of the server.)
create or replace function _pgqueue.message_tables(p_stream_id int) returns table (name regclass, bytes bigint)
language sql stable rows 10 as $$
    select t.oid::regclass, t.bytes
    from (select x.oid, pg_total_relation_size(x.oid) as bytes
          from pg_class r
          cross join lateral (select r.oid where r.relkind <> 'p'
                              union all
                              select i.inhrelid from pg_inherits i where i.inhparent = r.oid) x
          where r.relname = format('messages_%s', p_stream_id)::name and r.relnamespace = 'pgqueue'::regnamespace) t
    where t.bytes is not null  -- null: it was dropped meanwhile
$$;

-- The open transactions that may have a number of a stream. nextval() locks the sequence until the transaction ends,
-- even a prepared one.
create or replace function _pgqueue.writers(p_stream_id int) returns text[]
language sql stable as $$
    select array(select distinct virtualtransaction from pg_locks
                 where locktype = 'relation' and relation = format('pgqueue.seq_%s', p_stream_id)::regclass
                   and database = (select oid from pg_database where datname = current_database()))
$$;

-- Maintains the segments of a stream: each step for which it gets the locks. Needs the stream's maintenance lock.
-- Returns whether it changed something, so that there may be more to do. Locks: it waits at most 50 ms for the locks of
-- a step, and holds them to the end of the transaction, which should end at once.
create or replace function _pgqueue.maintain_segments(p_stream_id int) returns boolean
language plpgsql as $$
declare
    v_step text;
    v_done boolean;
    v_some boolean := false;
begin
    foreach v_step in array array['check_bound', 'record_closed', 'close_segment', 'seal_segment', 'add_segment',
                                  'empty_segment', 'drop_segments'] loop
        if v_step = 'record_closed' then
            -- it blocks drop_stream, an installer, and create_consumer: only for short steps
            perform from pgqueue.streams where stream_id = p_stream_id for update skip locked;  -- lock: stream
            exit when not found;
        end if;
        begin
            v_done := false;
            execute format('select _pgqueue.%I($1)', v_step) into v_done using p_stream_id;
            v_some := v_some or v_done;
        exception
            when lock_not_available or deadlock_detected then
                null;
            when check_violation or numeric_value_out_of_range then
                -- a program wrote a number that was not reserved
                raise warning 'stream %, %: %', p_stream_id, v_step, sqlerrm;
        end;
        -- these may hold locks for which all other sessions wait, see convert_to_segment()
        exit when v_done and v_step in ('check_bound', 'add_segment');
    end loop;
    return v_some;
end $$;

-- Validates the bound of a large table that will become a segment, see convert_to_segment(). This reads the whole
-- table, which may take minutes. Returns whether there was such a table. Locks: nothing that sending, reading or
-- create_consumer needs.
create or replace function _pgqueue.check_bound(p_stream_id int) returns boolean
language plpgsql as $$
declare
    v_bound pg_constraint;
begin
    select * into v_bound from pg_constraint
    where conrelid in (to_regclass(format('pgqueue.messages_%s', p_stream_id)),
                       to_regclass('pgqueue.' || _pgqueue.segment_name(p_stream_id, null)))
      and contype = 'c' and conname like E'below\\_%' and not convalidated;
    if not found then
        return false;
    end if;
    -- lock: table
    execute format('alter table %s validate constraint %I', v_bound.conrelid::regclass, v_bound.conname);
    return true;
end $$;

-- Records that all numbers of a segment were assigned or skipped.
--   p_used_upto  the last one that was assigned; null: the last one that is stored
-- Returns whether there was such a segment.
create or replace function _pgqueue.record_closed(p_stream_id int, p_used_upto bigint default null) returns boolean
language plpgsql as $$
declare
    v_segment pgqueue.segments;
    v_last    bigint;
begin
    select * into v_segment from pgqueue.segments
    where stream_id = p_stream_id and closed_at is null and hi <= _pgqueue.last_seq(p_stream_id) + 1
    order by lo limit 1;
    if not found then
        return false;
    end if;
    execute format('select max(seq) from pgqueue.%I', _pgqueue.segment_name(p_stream_id, v_segment.segment))
    into v_last;
    v_last := coalesce(v_last, v_segment.lo - 1);
    update pgqueue.streams set unused_seqs = unused_seqs + v_segment.hi - 1 - coalesce(p_used_upto, v_last)
    where stream_id = p_stream_id;
    update pgqueue.segments
    set closed_at = clock_timestamp(), opened_at = coalesce(opened_at, clock_timestamp()),
        last_seq = v_last, writers = _pgqueue.writers(p_stream_id),
        closed_publication = _pgqueue.last_publication_id(p_stream_id)
    where stream_id = p_stream_id and segment = v_segment.segment;
    update pgqueue.segments set opened_at = clock_timestamp()
    where stream_id = p_stream_id and lo = v_segment.hi and opened_at is null;
    return true;
end $$;

-- Records which closed segments cannot get a new publication any more. Returns whether there was one.
create or replace function _pgqueue.seal_segment(p_stream_id int) returns boolean
language plpgsql as $$
declare
    v_segment pgqueue.segments;
    v_writers text[];
    v_sealed  boolean := false;
begin
    for v_segment in
        select * from pgqueue.segments
        where stream_id = p_stream_id and closed_at is not null and last_publication is null order by lo
    loop
        v_writers := case when v_segment.writers = '{}' then '{}'
                          else _pgqueue.still_open(v_segment.writers, _pgqueue.writers(p_stream_id)) end;
        -- If the writers have ended, this snapshot sees all their reservations and publications. Of a sink's batch it
        -- sees either the reservation or the publication.
        update pgqueue.segments
        set writers = nullif(v_writers, '{}'),
            last_publication = case when v_writers = '{}' then _pgqueue.last_publication_id(p_stream_id) end
        where stream_id = p_stream_id and segment = v_segment.segment
          and writers is distinct from nullif(v_writers, '{}')
          and (v_writers <> '{}'
               or not exists (select from pgqueue.reservations r
                              where r.stream_id = p_stream_id and r.seqs && int8range(v_segment.lo, v_segment.hi)));
        v_sealed := v_sealed or (found and v_writers = '{}');
    end loop;
    return v_sealed;
end $$;

-- Makes the table of a stream its first segment, or adds a segment when fewer than two are ready. Returns whether it
-- changed something.
create or replace function _pgqueue.add_segment(p_stream_id int) returns boolean
language plpgsql as $$
declare
    v_next bigint := _pgqueue.last_seq(p_stream_id) + 1;
    v_hi   bigint := (select max(hi) from pgqueue.segments where stream_id = p_stream_id);
    v_used boolean;
begin
    if v_hi is null then
        return exists (select from pgqueue.retention where stream_id = p_stream_id
                                                     and (keep_for is not null or keep_messages is not null
                                                          or keep_bytes is not null or until_done))
           and _pgqueue.convert_to_segment(p_stream_id, null);
    elsif (select count(*) from pgqueue.segments where stream_id = p_stream_id and lo > v_next) >= 2 then
        return false;
    end if;
    execute format('select exists (select from pgqueue.%I)', _pgqueue.segment_name(p_stream_id, null)) into v_used;
    if v_used then
        return _pgqueue.convert_to_segment(p_stream_id, v_hi);
    end if;
    perform _pgqueue.make_segment(p_stream_id,
                                  greatest(v_hi, (v_next / _pgqueue.segment_size() + 1) * _pgqueue.segment_size()));
    perform _pgqueue.make_stream_functions(p_stream_id);
    return true;
end $$;

-- Creates an empty segment that begins at a number. Locks nothing that sending or reading needs.
create or replace function _pgqueue.make_segment(p_stream_id int, p_lo bigint) returns void
language plpgsql as $$
declare
    v_segment int := (select coalesce(max(segment), 0) + 1 from pgqueue.segments where stream_id = p_stream_id);
    v_name    text := _pgqueue.segment_name(p_stream_id, v_segment);
    v_hi      bigint := p_lo + _pgqueue.segment_size();
begin
    perform _pgqueue.make_message_table(p_stream_id, v_name);
    -- lock: table
    execute format('alter table pgqueue.messages_%s attach partition pgqueue.%I for values from (%s) to (%s)',
                   p_stream_id, v_name, p_lo, v_hi);
    insert into pgqueue.segments (stream_id, segment, lo, hi) values (p_stream_id, v_segment, p_lo, v_hi);
end $$;

-- Creates a table that will become a partition of a stream's table.
create or replace function _pgqueue.make_message_table(p_stream_id int, p_name text) returns void
language plpgsql as $$
begin
    execute format('create table pgqueue.%I (like pgqueue.messages_%s including defaults, primary key (seq))', p_name,
                   p_stream_id);
    perform _pgqueue.revoke_defaults(array[format('pgqueue.%I', p_name)::regclass]);
end $$;

-- Makes a segment of a table without a bound that has messages: the only table of a stream, or _rest, when numbers
-- exceeded all segments. Postgres has to verify that no number in the table belongs to the segments that follow. It
-- reads a small table for that, under the lock. A large table needs a constraint that was validated before, while other
-- sessions write: its bound is so far away that numbers do not reach it, even if maintain() is not called any more.
-- Only after the validation do the numbers jump to the next segment (close_segment()).
--   p_lo  where _rest begins; null: the stream's only table
-- Returns whether it changed something. Locks: for a moment the stream, and for its only table all of messages. (More
-- than 60 lines: the statements that change tables, in the one order that Postgres allows.)
create or replace function _pgqueue.convert_to_segment(p_stream_id int, p_lo bigint) returns boolean
language plpgsql as $$
declare
    v_table   text := case when p_lo is null then format('messages_%s', p_stream_id)
                           else _pgqueue.segment_name(p_stream_id, null) end;
    v_last    bigint;  -- the highest number in it, even one that was not assigned
    v_segment int := (select coalesce(max(segment), 0) + 1 from pgqueue.segments where stream_id = p_stream_id);
    v_name    text := _pgqueue.segment_name(p_stream_id, v_segment);
    v_hi      bigint;
    v_bound   pg_constraint;
    v_role    text;
begin
    execute format('select max(seq) from pgqueue.%I', v_table) into v_last;
    -- limited, because numbers have a maximum
    v_last := greatest(_pgqueue.last_seq(p_stream_id),
                       least(coalesce(v_last, 0), _pgqueue.last_seq(p_stream_id) + (1::bigint << 50)));
    select * into v_bound from pg_constraint
    where conrelid = format('pgqueue.%I', v_table)::regclass and contype = 'c' and conname like E'below\\_%';
    if not found and pg_relation_size(format('pgqueue.%I', v_table)) > _pgqueue.segment_bytes_at_once() then
        v_hi := ((v_last + _pgqueue.segment_jump()) / _pgqueue.segment_size() + 1) * _pgqueue.segment_size();
        -- lock: table
        execute format('alter table pgqueue.%1$I add constraint below_%2$s '
                       'check (seq < %2$s and stream_id = %3$s) not valid', v_table, v_hi, p_stream_id);
        return true;
    elsif v_bound.convalidated = false then
        return false;  -- see check_bound()
    end if;
    v_hi := coalesce(substr(v_bound.conname, 7)::bigint,
                     ((v_last + _pgqueue.segment_size() / 1024) / _pgqueue.segment_size() + 1)
                         * _pgqueue.segment_size());

    -- lock: table
    execute format('alter table pgqueue.%I detach partition pgqueue.%I',
                   case when p_lo is null then 'messages' else format('messages_%s', p_stream_id) end, v_table);
    execute format('alter table pgqueue.%I rename to %I', v_table, v_name);  -- lock: table
    if p_lo is null then
        execute format('create table pgqueue.%I (like pgqueue.%I including defaults) partition by range (seq)', v_table,
                       v_name);
        perform _pgqueue.revoke_defaults(array[format('pgqueue.%I', v_table)::regclass]);
        -- lock: table
        execute format('alter table pgqueue.messages attach partition pgqueue.%I for values in (%s)', v_table,
                       p_stream_id);
        for v_role in select _pgqueue.roles() loop
            execute format('revoke all on pgqueue.%I from %I', v_name, v_role);
        end loop;
    end if;
    -- lock: table
    execute format('alter table pgqueue.messages_%s attach partition pgqueue.%I for values from (%s) to (%s)',
                   p_stream_id, v_name, coalesce(p_lo::text, 'minvalue'), v_hi);
    if v_bound.conname is not null then
        -- each insert would check the constraint
        execute format('alter table pgqueue.%I drop constraint %I', v_name, v_bound.conname);  -- lock: table
    end if;
    insert into pgqueue.segments (stream_id, segment, lo, hi, opened_at)
    values (p_stream_id, v_segment, coalesce(p_lo, 1), v_hi,
        case when p_lo is null then (select created_at from pgqueue.streams where stream_id = p_stream_id)
             else clock_timestamp() end);
    perform _pgqueue.make_message_table(p_stream_id, _pgqueue.segment_name(p_stream_id, null));
    -- lock: table
    execute format('alter table pgqueue.messages_%s attach partition pgqueue.%I default', p_stream_id,
                   _pgqueue.segment_name(p_stream_id, null));
    perform _pgqueue.make_segment(p_stream_id, v_hi);
    perform _pgqueue.make_segment(p_stream_id, v_hi + _pgqueue.segment_size());
    perform _pgqueue.grant_stream(p_stream_id);
    perform _pgqueue.make_stream_functions(p_stream_id);
    return true;
end $$;

-- Closes the open segment of a stream if it has its share of the kept messages: the next number will belong to the next
-- segment. Returns whether it closed one.
create or replace function _pgqueue.close_segment(p_stream_id int) returns boolean
language plpgsql as $$
declare
    v_rules   pgqueue.retention;
    v_last    bigint := _pgqueue.last_seq(p_stream_id);
    v_segment pgqueue.segments;
    v_bytes   bigint;
begin
    select * into v_rules from pgqueue.retention where stream_id = p_stream_id;
    select * into v_segment from pgqueue.segments where stream_id = p_stream_id and lo <= v_last and hi > v_last + 1;
    if v_rules.stream_id is null or v_segment.segment is null
       or not exists (select from pgqueue.segments where stream_id = p_stream_id and lo = v_segment.hi) then
        return false;
    elsif v_segment.opened_at > clock_timestamp() then  -- the clock was ahead, and was set back
        update pgqueue.segments set opened_at = clock_timestamp()
        where stream_id = p_stream_id and segment = v_segment.segment;
    end if;
    v_bytes := pg_total_relation_size(format('pgqueue.%I', _pgqueue.segment_name(p_stream_id, v_segment.segment)));
    if (v_segment.opened_at < clock_timestamp() - v_rules.keep_for / _pgqueue.segment_count()
        or v_last - v_segment.lo + 1 >= v_rules.keep_messages / _pgqueue.segment_count()
        or v_bytes >= v_rules.keep_bytes / _pgqueue.segment_count()
        or (v_rules.until_done
            and (v_bytes >= _pgqueue.segment_bytes_at_once()
                 or v_segment.opened_at < clock_timestamp() - interval '1 minute'))
        or v_segment.hi - v_last > 2 * _pgqueue.segment_size()) is not true
       -- while nothing can be trimmed, segments grow with the stored messages, so that their number stays limited
       or (v_bytes * _pgqueue.segment_count() < (select sum(bytes) from _pgqueue.message_tables(p_stream_id))
           and (select count(*) from pgqueue.segments where stream_id = p_stream_id and not emptied)
               > 4 * _pgqueue.segment_count())
    then
        return false;
    end if;
    -- (a rollback does not undo the jump: the next call records it)
    v_last := least(_pgqueue.last_seq(p_stream_id), v_segment.hi - 1);
    if v_segment.hi - _pgqueue.last_seq(p_stream_id) > 100000 then
        perform setval(format('pgqueue.seq_%s', p_stream_id)::regclass, v_segment.hi - 1);
    else
        -- other sessions may get numbers of the next segment now, and must not get them again
        perform nextval(format('pgqueue.seq_%s', p_stream_id)::regclass)
        from generate_series(v_last + 1, v_segment.hi - 1);
    end if;
    return _pgqueue.record_closed(p_stream_id, v_last);
end $$;

-- Drops the empty segments, if no transaction writes to the stream; or detaches one that cannot be dropped. Returns
-- whether it changed something.
create or replace function _pgqueue.drop_segments(p_stream_id int) returns boolean
language plpgsql as $$
declare
    v_segment record;
    v_changed boolean := false;
begin
    for v_segment in
        select s.segment, n.name, c.relispartition as attached
        from pgqueue.segments s
        cross join lateral _pgqueue.segment_name(s.stream_id, s.segment) n (name)
        left join pg_class c on c.oid = to_regclass(format('pgqueue.%I', n.name))
        where s.stream_id = p_stream_id and s.emptied order by s.segment
    loop
        if _pgqueue.try_drop(format('drop table if exists pgqueue.%I', v_segment.name)) then  -- lock: table
            delete from pgqueue.segments where stream_id = p_stream_id and segment = v_segment.segment;
            v_changed := true;
        elsif v_segment.attached then
            -- lock: table
            execute format('alter table pgqueue.messages_%s detach partition pgqueue.%I', p_stream_id, v_segment.name);
            v_changed := true;
        end if;
    end loop;
    if v_changed then
        perform _pgqueue.make_stream_functions(p_stream_id);
    end if;
    return v_changed;
end $$;

-- Drops what the queue does not use any more, for maintain(). Any role that may use the schema can create objects that
-- depend on it: a view, for which it needs no right on the table, or a default with a sequence. Then this function
-- warns. Returns whether it was dropped.
--   p_statement  drops it
create or replace function _pgqueue.try_drop(p_statement text) returns boolean
language plpgsql as $$
declare
    v_by text;
begin
    execute p_statement;
    return true;
exception when dependent_objects_still_exist then
    get stacked diagnostics v_by = pg_exception_detail;
    raise warning '%: %', sqlerrm, v_by using hint = 'Drop what depends on it. The next maintenance tries again.';
    return false;
end $$;
