-- Postponing: unclaimed messages are delivered later.

-- Postpones unclaimed messages of a consumer: they are not delivered before a given time.
-- New, ready, delayed and waiting messages are delayed until then, whether that is later or sooner than before. This
-- does not count as a delivery. In an ordered consumer, later messages of the same keys wait for them. The call ignores
-- claimed messages (see defer), dead letters, and numbers that are not the consumer's. seek and replay may deliver
-- postponed messages sooner.
--   p_seqs   the messages
--   p_until  the earliest time of delivery; a time in the past: they are due at once
-- Returns how many messages were postponed. Errors: PQ001, PQ002, PQ003, PQ006 for a group, PQ007; 55P03 when a
-- transaction that claims some of the messages, or, with an ordering, claims or settles the messages before them, stays
-- open for 10 s. Locks: the consumer.
create or replace function pgqueue.postpone(p_stream text, p_consumer text, p_seqs bigint[], p_until timestamptz)
returns bigint language plpgsql as $$
declare
    v_consumer pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
    v_set      int8multirange := _pgqueue.validate_seqs(v_consumer, p_seqs, 'pause stops a whole consumer.');
begin
    if isfinite(p_until) is not true then
        raise exception 'p_until must be a finite time, not %', coalesce(p_until::text, 'null')
            using errcode = 'PQ003', column = 'p_until';
    elsif v_set = '{}' then
        return 0;
    end if;
    -- in tries: a session that claims some of the messages may need a lock that this session holds
    return _pgqueue.await('a claim, or the lock, of ' || _pgqueue.consumer_name(v_consumer.consumer_id),
        'select _pgqueue.postpone(c, ($2 ->> 0)::int8multirange, ($2 ->> 1)::timestamptz) '
        'from pgqueue.consumers c where c.consumer_id = $1', v_consumer.consumer_id,
        jsonb_build_array(v_set, p_until), p_try => interval '1 ms', p_limit => interval '10 s',
        p_class => _pgqueue.lock_class_consumer())::bigint;
end $$;

-- One try to postpone messages; see postpone. Errors: PQ099 while another session claims some of the messages.
create or replace function _pgqueue.postpone(p_consumer pgqueue.consumers, p_set int8multirange, p_until timestamptz)
returns bigint language plpgsql as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_new    record;
    v_taken  record;
    v_bundle pgqueue.consumer_messages;
    v_one    pgqueue.consumer_messages;
    v_part   record;
    v_count  bigint := 0;
begin
    perform _pgqueue.lock_consumer_alone(p_consumer.consumer_id);
    p_consumer := _pgqueue.consumer_now(p_consumer);
    v_stored := _pgqueue.cursor(p_consumer.consumer_id);
    v_new := _pgqueue.take_early(p_consumer, _pgqueue.pass_taken(v_stored, true), p_set);
    v_cursor := v_new.p_cursor;
    if p_consumer.ordering <> 'none' then
        v_cursor.hints := _pgqueue.unassign(p_consumer, v_cursor.hints);  -- so that each bundle has one key
    end if;
    v_taken := _pgqueue.take_unclaimed(p_consumer, v_cursor.hints, case
        when p_consumer.ordering = 'none' then p_set
        else (select p_set + coalesce(range_agg(seqs), '{}') from pgqueue.consumer_messages
              where consumer_id = p_consumer.consumer_id and first_seq < upper(p_set) and token is null
                and _pgqueue.meets(seqs, p_set)) end);
    v_cursor.hints := v_taken.o_hints;
    if exists (select from pgqueue.consumer_messages
               where consumer_id = p_consumer.consumer_id and first_seq < upper(p_set) and token is null
                 and _pgqueue.meets(seqs, p_set)) then
        raise exception using errcode = 'PQ099';
    end if;
    foreach v_bundle in array v_taken.o_bundles || v_new.o_bundles loop
        if v_bundle.key is not null then
            v_bundle.lane := _pgqueue.lane_waiting();
            v_bundle.place := _pgqueue.place_behind();
        end if;
        -- with an ordering, the messages in between are stored separately too: bundles do not interleave
        for v_part in select * from _pgqueue.split_by(v_bundle.seqs, p_set) loop
            v_one := v_bundle;
            if v_part.inside then
                v_count := v_count + _pgqueue.cardinality(v_part.seqs);
                v_one.not_visible_until := p_until;
            end if;
            if v_one.lane is distinct from _pgqueue.lane_unfiltered()
               and (v_one.key is null or (v_part.inside and p_consumer.ordering = 'none')) then
                v_one := _pgqueue.placed(p_consumer, v_one);
            end if;
            v_cursor.hints := _pgqueue.store_placed(v_cursor.hints, v_one, v_part.seqs);
        end loop;
    end loop;
    if _pgqueue.is_keyed(p_consumer.profile) then
        v_cursor.hints := _pgqueue.mark_firsts(p_consumer, v_cursor.hints, array(
            select distinct b.key from unnest(v_taken.o_bundles) b where b.key is not null));
    end if;
    perform _pgqueue.save_cursor(v_stored, _pgqueue.raise_hints(p_consumer, v_cursor), true);
    return v_count;
end $$;

-- Takes new messages of a set out of order. A consumer with an ordering, or with per_key_latest, also takes all that
-- was published before them, because earlier messages of their keys come first. Returns the cursor, and the messages as
-- bundles that are not stored. (An ordered consumer's messages are stored, and not returned.) Needs the consumer's
-- lock.
create or replace function _pgqueue.take_early(p_consumer pgqueue.consumers, inout p_cursor pgqueue.consumer_cursors,
                                               p_set int8multirange, out o_bundles pgqueue.consumer_messages[])
language plpgsql as $$
declare
    v_new    record;
    v_before pgqueue.consumer_cursors;
begin
    while p_consumer.ordering <> 'none' or p_consumer.per_key_latest loop
        v_new := _pgqueue.find_new(p_consumer, p_cursor, p_set);
        v_before := p_cursor;
        exit when v_new.o_seqs = '{}';
        p_cursor := (_pgqueue.take(p_consumer, p_cursor, upper(v_new.o_ids) - 1, _pgqueue.limit_take())).o_cursor;
        if p_cursor is not distinct from v_before and (v_before.hints).filter_from is null then
            raise exception using errcode = 'PQ099';  -- they are in a gap that is not due for a check yet
        end if;
    end loop;
    v_new := _pgqueue.take_out(p_consumer, p_cursor, p_set);
    p_cursor := v_new.p_cursor;
    o_bundles := array(select _pgqueue.placed(p_consumer, b) from unnest(v_new.o_bundles) b);
end $$;
