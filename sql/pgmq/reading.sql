-- Reading: read, with a condition, and by groups; each also with polling.

-- Begins a claim of selected messages, with the locks of the consumer and of what is new for it: other reads take new
-- messages without the consumer's lock (../queue/claim/ahead.sql). Returns the consumer; null if it is paused, or if a
-- lock is not available. Locks: the consumer; what is new.
create or replace function pgmq._begin(p_consumer pgqueue.consumers) returns pgqueue.consumers
language plpgsql as $$
begin
    p_consumer := _pgqueue.begin_claim('claim', 1, null, p_consumer.stream_name, p_consumer.name);
    if p_consumer.paused then
        return null;
    end if;
    begin
        if not _pgqueue.lock_consumer_soon(p_consumer.consumer_id) then
            return null;
        end if;
        if not _pgqueue.try_lock_new(p_consumer.consumer_id) then
            perform _pgqueue.await('what is new for a consumer',
                                   'select 0 from pg_advisory_xact_lock(($2 -> 0)::int, $1::int)',  -- lock: new
                                   p_consumer.consumer_id, jsonb_build_array(_pgqueue.lock_class_new()),
                                   p_limit => _pgqueue.claim_patience());
        end if;
    exception when lock_not_available then  -- releases the consumer's lock
        return null;
    end;
    return _pgqueue.consumer_now(p_consumer);
end $$;

-- Claims those messages of a set that are not claimed, or whose leases have ended, as one claim, and returns them.
-- Needs the locks of _begin(). Locks: those claims, the bundles.
create or replace function pgmq._claim(p_consumer pgqueue.consumers, p_set int8multirange, p_lease interval)
returns setof pgmq.message_record language plpgsql as $$
declare
    v_stored  pgqueue.consumer_cursors := _pgqueue.cursor(p_consumer.consumer_id);
    v_cursor  pgqueue.consumer_cursors;
    v_new     record;
    v_taken   record;
    v_bundle  pgqueue.consumer_messages;
    v_bundles pgqueue.consumer_messages[] := '{}';
    v_claim   pgqueue.claimed;
begin
    if p_set = '{}' then
        return;
    end if;
    v_cursor := (_pgqueue.release_due(p_consumer, _pgqueue.pass_taken(v_stored, true), p_set)).o_cursor;
    v_new := _pgqueue.take_early(p_consumer, v_cursor, p_set);
    v_cursor := v_new.p_cursor;
    v_taken := _pgqueue.take_unclaimed(p_consumer, v_cursor.hints, p_set);
    v_cursor.hints := v_taken.o_hints;
    foreach v_bundle in array v_taken.o_bundles || v_new.o_bundles loop
        v_bundle.note := _pgqueue.merged_note(v_bundle.note, '{"at_most": null}');  -- pgmq does not bisect
        v_bundle.not_visible_until := null;
        v_bundle := _pgqueue.placed(p_consumer, v_bundle);
        v_bundles := v_bundles || _pgqueue.stored(v_bundle, v_bundle.seqs);
    end loop;
    if v_bundles = '{}' then
        perform _pgqueue.save_cursor(v_stored, v_cursor, true);
        return;
    end if;
    p_consumer.visibility_timeout := p_lease;
    v_claim := _pgqueue.claim_bundles(p_consumer, v_bundles);
    foreach v_bundle in array v_bundles loop
        v_cursor.hints := _pgqueue.record_place(v_cursor.hints, v_bundle.lane, v_bundle.place, v_bundle.first_seq,
                                                false);
    end loop;
    v_cursor.hints := _pgqueue.keep_in_reach(p_consumer, v_cursor.hints, v_bundles[1].bundle_no);
    perform _pgqueue.save_cursor(v_stored, _pgqueue.raise_hints(p_consumer, v_cursor), true);
    return query
        select r.seq, r.deliver_count, r.inserted_at, clock_timestamp(), clock_timestamp() + p_lease,
               pgmq._message(r.data), r.headers
        from _pgqueue.payloads(p_consumer.stream_id, v_claim.claim_id, v_claim.seqs, v_claim.priority,
                               v_claim.bundles) r order by r.seq;
end $$;

-- Reads messages, which are not visible to other reads for vt seconds.
--   conditional  only messages that contain this value
create or replace function pgmq.read(queue_name text, vt integer, qty integer, conditional jsonb default '{}')
returns setof pgmq.message_record language plpgsql as $$
declare
    v_consumer pgqueue.consumers := pgmq._consumer(queue_name);
    v_lease    interval := pgmq._lease(vt);
    v_left     int := coalesce(qty, 2147483647);
    v_row      pgqueue.received;
    v_claim    bigint;
    v_claims   bigint[] := '{}';
    v_until    timestamptz;
begin
    if conditional <> '{}' then
        v_consumer := pgmq._begin(v_consumer);
        if v_consumer.consumer_id is null then
            return;
        end if;
        return query
            select * from pgmq._claim(v_consumer, pgmq._set(array(
                select r.msg_id from pgmq._rows(v_consumer, null) r
                where r.vt <= clock_timestamp() and r.message @> conditional order by r.msg_id limit qty)), v_lease);
        return;
    end if;
    while v_left > 0 loop
        v_claim := null;
        for v_row in select * from pgqueue.receive(lower(queue_name), 'pgmq', v_left,
                                                   case when vt > 0 then v_lease else interval '1 min' end) loop
            v_claim := v_row.claim_id;
            v_until := coalesce(v_until, clock_timestamp());
            v_left := v_left - 1;
            return next (v_row.seq, v_row.deliver_count, v_row.inserted_at, v_until, v_until + v_lease,
                         pgmq._message(v_row.data), v_row.headers)::pgmq.message_record;
        end loop;
        v_claims := v_claims || v_claim;
        -- a failed claim is delivered in parts: the rest is another claim
        exit when v_claim is null or not pgqueue.is_suspected(v_claim);
    end loop;
    if (vt > 0) is not true then  -- visible at once, but only after this read, which would return them again
        perform _pgqueue.give_back(c, null, 'failed', '0', null) from unnest(v_claims) c where c is not null;
    end if;
end $$;

-- Reads by groups, the header x-pgmq-group: visible messages in their order, of each group whose first message is
-- visible.
--   how  grouped: as many as possible of the oldest group, then of the next; rr: one of each group, round robin; head:
--        the first of each group
create or replace function pgmq._read_grouped(queue_name text, vt integer, qty integer, how text)
returns setof pgmq.message_record language plpgsql as $$
declare
    v_consumer pgqueue.consumers := pgmq._begin(pgmq._consumer(queue_name));
    v_order    bigint[];
begin
    if v_consumer.consumer_id is null then
        return;
    end if;
    select array_agg(c.msg_id order by c.first, c.second) into v_order
    from (select g.msg_id, case how when 'rr' then g.rank else g.head end as first,
                 case how when 'rr' then g.head else g.rank end as second
          from (select m.msg_id, min(m.msg_id) over groups as head,
                       bool_or(m.is_head and m.is_visible) over groups as free, m.is_visible,
                       row_number() over (partition by m.name, m.is_visible order by m.msg_id) as rank
                from (select r.msg_id, r.headers ->> 'x-pgmq-group' as name, r.vt <= clock_timestamp() as is_visible,
                             r.msg_id = min(r.msg_id) over (partition by r.headers ->> 'x-pgmq-group') as is_head
                      from pgmq._rows(v_consumer, null) r) m
                window groups as (partition by m.name)) g
          where g.is_visible and g.free and (how <> 'head' or g.msg_id = g.head)
          order by 2, 3 limit qty) c;
    return query
        select r.* from pgmq._claim(v_consumer, pgmq._set(v_order), pgmq._lease(vt)) r
        order by case when how = 'rr' then array_position(v_order, r.msg_id) else r.msg_id end;
end $$;

-- The number of the last dead letter that this session has made; 0: none.
create or replace function pgmq._last_dead_id() returns bigint
language plpgsql as $$
begin
    return currval(pg_get_serial_sequence('pgqueue.dead_messages', 'dead_id'));
exception when object_not_in_prerequisite_state then
    return 0;
end $$;

-- Reads until there are messages, or the time has passed. A read without messages is rolled back, so that it does not
-- hold the consumer's lock while it waits. Its due work would then be repeated, and messages behind many that expired
-- would never be read: so the last read is kept, and a read that made dead letters is the last one.
create or replace function pgmq._poll(queue_name text, vt integer, qty integer, max_poll_seconds integer,
                                      poll_interval_ms integer, how text, conditional jsonb default '{}')
returns setof pgmq.message_record language plpgsql as $$
declare
    v_end  timestamptz := clock_timestamp() + make_interval(secs => max_poll_seconds);  -- null: none, as in pgmq
    v_id   int := (pgmq._consumer(queue_name)).consumer_id;
    v_dead bigint;
    v_last bigint;
begin
    while (max_poll_seconds > 0) is not false loop
        v_dead := pgmq._last_dead_id();
        begin
            if how = 'read' then
                return query select * from pgmq.read(queue_name, vt, qty, conditional);
            else
                return query select * from pgmq._read_grouped(queue_name, vt, qty, how);
            end if;
            if found or clock_timestamp() >= v_end then
                return;
            end if;
            v_last := pgmq._last_dead_id();
            if v_last > v_dead  -- else other sessions made those that are new
               and exists (select from pgqueue.dead_messages where dead_id = v_last and consumer_id = v_id) then
                return;
            end if;
            raise exception using errcode = 'PQ099';
        exception when sqlstate 'PQ099' then
            perform pg_sleep(coalesce(poll_interval_ms, 100) / 1000.0);
        end;
    end loop;
end $$;

create or replace function pgmq.read_with_poll(queue_name text, vt integer, qty integer,
                                               max_poll_seconds integer default 5, poll_interval_ms integer default 100,
                                               conditional jsonb default '{}') returns setof pgmq.message_record
language plpgsql as $$
begin
    return query select * from pgmq._poll(queue_name, vt, qty, max_poll_seconds, poll_interval_ms, 'read', conditional);
end $$;

-- Reading by groups in each way, at once and with polling.
do $do$
declare
    v_name text;
    v_how  text;
begin
    for v_name, v_how in values ('read_grouped', 'grouped'), ('read_grouped_rr', 'rr'), ('read_grouped_head', 'head')
    loop
        execute format('create or replace function pgmq.%I(queue_name text, vt integer, qty integer) '
                       'returns setof pgmq.message_record language plpgsql as $f$ begin '
                       'return query select * from pgmq._read_grouped(queue_name, vt, qty, %L); end $f$',
                       v_name, v_how);
        execute format('create or replace function pgmq.%I(queue_name text, vt integer, qty integer, '
                       'max_poll_seconds integer default 5, poll_interval_ms integer default 100) '
                       'returns setof pgmq.message_record language plpgsql as $f$ begin return query select * from '
                       'pgmq._poll(queue_name, vt, qty, max_poll_seconds, poll_interval_ms, %L); end $f$',
                       v_name || '_with_poll', v_how);
    end loop;
end $do$;

-- Reads and deletes messages. It returns them as they were before; if some were read before, the first read is rolled
-- back to look this up.
create or replace function pgmq.pop(queue_name text, qty integer default 1) returns setof pgmq.message_record
language plpgsql as $$
declare
    v_rows   pgmq.message_record[];
    v_before pgmq.message_record[];
begin
    begin
        v_rows := array(select r from pgmq.read(queue_name, 30, qty) r);
        if exists (select from unnest(v_rows) r where r.read_ct > 1) then
            raise exception using errcode = 'PQ099';
        end if;
    exception when sqlstate 'PQ099' then
        v_before := array(
            select r from pgmq._rows(pgmq._consumer(queue_name),
                                     pgmq._set(array(select r.msg_id from unnest(v_rows) r where r.read_ct > 1))) r);
        v_rows := array(select r from pgmq.read(queue_name, 30, qty) r);
    end;
    if v_rows <> '{}' then
        perform pgmq._settle(pgmq._consumer(queue_name), pgmq._set(array(select r.msg_id from unnest(v_rows) r)));
    end if;
    return query
        select r.msg_id, r.read_ct - 1, r.enqueued_at, b.last_read_at, coalesce(b.vt, r.enqueued_at), r.message,
               r.headers
        from unnest(v_rows) with ordinality r(msg_id, read_ct, enqueued_at, last_read_at, vt, message, headers, place)
        left join unnest(v_before) b on b.msg_id = r.msg_id order by r.place;
end $$;
