-- Postponing: messages that nobody has claimed come later.

-- Postpones messages of a consumer that nobody has claimed: none is delivered before a time.
-- New, ready, delayed and waiting messages are delayed until then, whether that is later or sooner than before. This
-- counts as no delivery. In an ordered consumer, later messages of the same keys wait for them. The call passes over
-- claimed messages (see defer), dead letters, and numbers that are not the consumer's. seek and replay may deliver
-- postponed messages again sooner.
--   p_seqs   the messages
--   p_until  not before then; a time that has passed: they are due at once
-- Returns how many messages were postponed. Errors: PQ001, PQ002, PQ003, PQ006 for a group, PQ007; 55P03 when a
-- transaction that claims some of the messages, or with an order claims or settles the ones before them, stays open for
-- 10 s. Locks: the consumer.
create or replace function pgqueue.postpone(p_stream text, p_consumer text, p_seqs bigint[], p_until timestamptz)
returns bigint
language plpgsql
as $$
declare
    v_consumer pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
    v_set      int8multirange := _pgqueue.chosen(v_consumer, p_seqs, 'pause stops a whole consumer.');
begin
    if isfinite(p_until) is not true then
        raise exception 'p_until is a time, not %', coalesce(p_until::text, 'null')
            using errcode = 'PQ003', column = 'p_until';
    elsif v_set = '{}' then
        return 0;
    end if;
    -- in tries: another session claims some of the messages, and may need a lock that this has
    return _pgqueue.await('a claim, or the lock, of ' || _pgqueue.consumer_name(v_consumer.consumer_id),
        'select n from pgqueue.consumers c '
        'cross join lateral _pgqueue.postpone(c, ($2 ->> 0)::int8multirange, ($2 ->> 1)::timestamptz) n '
        'where c.consumer_id = $1',
        v_consumer.consumer_id, jsonb_build_array(v_set::text, p_until), p_try => interval '1 ms',
        p_limit => interval '10 s')::bigint;
end $$;

-- One try to postpone messages; see postpone. Errors: PQ099 when another session is claiming some of the messages.
create or replace function _pgqueue.postpone(p_consumer pgqueue.consumers, p_set int8multirange, p_until timestamptz)
returns bigint
language plpgsql
as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_new    record;
    v_taken  record;
    v_cursor pgqueue.consumer_cursors;
    v_runs   pgqueue.consumer_messages[];
    v_run    pgqueue.consumer_messages;
    v_each   pgqueue.consumer_messages;
    v_part   int8multirange;
    v_due    boolean;
    v_parts  pgqueue.consumer_messages[] := '{}';
    v_keyed  pgqueue.consumer_messages[] := '{}';  -- of pieces: the keys of these are read
    v_count  bigint := 0;
begin
    perform _pgqueue.own_consumer(p_consumer.consumer_id);
    v_stored := _pgqueue.cursor(p_consumer.consumer_id);
    v_new := _pgqueue.take_early(p_consumer, v_stored, p_set);
    v_taken := _pgqueue.take_unclaimed(p_consumer, v_new.p_cursor, _pgqueue.with_their_keys(p_consumer, p_set));
    if exists (select from _pgqueue.unfinished(p_consumer.consumer_id)
               where state <> 'claimed' and seqs && p_set) then
        raise exception using errcode = 'PQ099';
    end if;
    v_runs := v_taken.o_runs || v_new.o_runs;
    foreach v_run in array v_runs loop
        -- the messages that are postponed, and those that went along; of a key that waits, cut where the others come
        -- between, because a dealer takes a run of such a key whole
        for v_due, v_part in
            select due, range_agg(r)
            from (select due, r, case when v_run.key is not null then row_number() over (order by r)
                                                                      - row_number() over (partition by due order by r)
                                 end as island
                  from (select true as due, r from unnest(v_run.seqs * p_set) r
                        union all
                        select false, r from unnest(v_run.seqs - p_set) r) e) p
            group by due, island
        loop
            v_each := v_run;
            v_each.seqs := v_part;
            v_each.first_seq := lower(v_part);
            v_each.message_count := _pgqueue.cardinality(v_part);
            if v_due then
                v_count := v_count + v_each.message_count;
                v_each.not_visible_until := p_until;
            end if;
            if v_run.piece is not null and p_consumer.ordering = 'key' then
                v_keyed := v_keyed || v_each;
            else
                v_parts := v_parts || v_each;
            end if;
        end loop;
    end loop;
    v_cursor := _pgqueue.put_off(p_consumer, v_taken.o_cursor, v_parts || _pgqueue.with_key(p_consumer, v_keyed));
    v_cursor.due_from := least(v_cursor.due_from, p_until);
    perform _pgqueue.save_cursor(v_stored, v_cursor, true);
    return v_count;
end $$;

-- Takes new messages of a set out of their turn. A consumer with an ordering, or with per_key_latest, takes all that
-- was published before them, too: otherwise they would stand before earlier messages of their key, or beside them.
-- Returns the cursor; and the messages as runs that are not stored, except those of an ordered consumer, which are
-- stored. Needs the consumer's lock.
create or replace function _pgqueue.take_early(p_consumer pgqueue.consumers, inout p_cursor pgqueue.consumer_cursors,
                                               p_set int8multirange, out o_runs pgqueue.consumer_messages[])
language plpgsql
as $$
declare
    v_look   record;
    v_before pgqueue.consumer_cursors;
    v_run    pgqueue.consumer_messages;
    v_part   record;
begin
    o_runs := '{}';
    while p_consumer.ordering <> 'none' or p_consumer.per_key_latest loop
        v_look := _pgqueue.find_new(p_consumer, p_cursor, p_set);
        v_before := p_cursor;
        exit when v_look.o_seqs = '{}';
        p_cursor := (_pgqueue.take(p_consumer, p_cursor, upper(v_look.o_ids) - 1, _pgqueue.limit_take())).o_cursor;
        if p_cursor is not distinct from v_before and v_before.filter_from is null then
            raise exception using errcode = 'PQ099';  -- a gap has them that is not to be looked into yet
        end if;
    end loop;
    v_look := _pgqueue.pass_over(p_consumer, p_cursor, p_set);
    p_cursor := v_look.p_cursor;
    p_cursor.last_line_no := p_cursor.last_line_no + 1;
    for v_part in
        select p.priority, p.expires_at, range_agg(p.seqs * v_look.o_gone) as seqs
        from _pgqueue.published(p_consumer.stream_id, v_look.o_ids) p
        where p.seqs && v_look.o_gone
        group by p.priority, p.expires_at
    loop
        v_run.consumer_id := p_consumer.consumer_id;
        v_run.state := 'ready';
        v_run.lane := case when _pgqueue.is_keyed(p_consumer.way) then 1 else -v_part.priority end;
        v_run.priority := v_part.priority;
        v_run.deliver_count := 0;
        v_run.arrival_no := p_cursor.last_line_no;
        v_run.line_no := p_cursor.last_line_no;
        v_run.seqs := v_part.seqs;
        v_run.note := case when v_part.expires_at is not null then _pgqueue.expiry(v_part.expires_at) end;
        o_runs := o_runs || v_run;
        p_cursor.taken := p_cursor.taken + _pgqueue.cardinality(v_part.seqs);
    end loop;
end $$;

-- A set of messages, and those that have to be taken out with them to keep the order of their keys: all of a piece
-- that is ready, and all messages of a run of a key that is delayed or waits.
create or replace function _pgqueue.with_their_keys(p_consumer pgqueue.consumers, p_set int8multirange)
returns int8multirange
language plpgsql
as $$
begin
    if p_consumer.ordering <> 'key' then
        return p_set;
    end if;
    return p_set + coalesce((
        with run as materialized (
            select state, key, piece, seqs from _pgqueue.unfinished(p_consumer.consumer_id) where state <> 'claimed')
        select range_agg(seqs) from run
        where (state = 'ready' and piece in (select piece from run where state = 'ready' and seqs && p_set))
           or (key is not null and seqs && p_set)), '{}');
end $$;

-- Splits runs of pieces by key. Returns them as runs of no piece, each with the hash of its key.
create or replace function _pgqueue.with_key(p_consumer pgqueue.consumers, p_runs pgqueue.consumer_messages[])
returns pgqueue.consumer_messages[]
language plpgsql
as $$
declare
    v_keyed pgqueue.keyed_messages;
    v_run   pgqueue.consumer_messages;
    v_runs  pgqueue.consumer_messages[] := '{}';
begin
    if p_runs <> '{}' then
        v_keyed := _pgqueue.by_key(p_consumer, p_runs);
        for i in 1..cardinality(v_keyed.keys) loop
            v_run := v_keyed.runs[v_keyed.run_nos[i]];
            v_run.key := v_keyed.keys[i];
            v_run.piece := null;
            v_run.seqs := v_keyed.seqs[i];
            v_runs := v_runs || v_run;
        end loop;
    end if;
    return v_runs;
end $$;

-- Stores runs whose messages are not to be delivered before their not_visible_until. Messages of a key that has been
-- dealt wait, and all others of a consumer that goes by key go into its line, where a dealer finds the time. Returns
-- the cursor. Needs the consumer's lock.
create or replace function _pgqueue.put_off(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                            p_runs pgqueue.consumer_messages[])
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_run    pgqueue.consumer_messages;
    v_places pgqueue.line_place[] := '{}';
begin
    foreach v_run in array p_runs loop
        if p_consumer.ordering = 'key' and v_run.key is not null then
            v_run.state := 'waiting';
            v_run.lane := 0;
        elsif v_run.state <> 'unfiltered' and _pgqueue.is_keyed(p_consumer.way) then
            v_run.state := 'ready';
            v_run.lane := 1;
            v_run.line_no := v_run.arrival_no;
            v_run.key := null;
            v_run.piece := null;
            v_places := v_places || (1, v_run.line_no, lower(v_run.seqs))::pgqueue.line_place;
        elsif v_run.state <> 'unfiltered' then
            v_run.state := 'delayed';
        end if;
        perform _pgqueue.store_run(v_run, v_run.seqs);
    end loop;
    return _pgqueue.lower_scan_from(p_cursor, v_places);
end $$;
