-- Cancelling: removing messages from a consumer that has not finished them.

-- Cancels unfinished messages of a consumer. New, ready, delayed and waiting messages are no longer
-- delivered. Claimed messages leave their claims; the workers are not stopped, but extending or settling the claim
-- returns smaller numbers. In an ordered consumer, the later messages of the same key are delivered. The call cancels
-- all of the messages or none. It ignores dead letters, messages that a Spark query holds, and numbers that are not the
-- consumer's. seek and replay may deliver cancelled messages again.
--   p_seqs  the messages
-- Returns how many messages were cancelled. Errors: PQ001, PQ002, PQ003, PQ006 for a group, PQ007; 55P03 when a
-- transaction that claims or settles some of the messages, or with an order the ones before them, stays open for 10 s.
-- Locks: the consumer; then the claims that hold some of the messages.
create or replace function pgqueue.cancel(p_stream text, p_consumer text, p_seqs bigint[]) returns bigint
language plpgsql as $$
declare
    v_consumer pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
    v_set      int8multirange := _pgqueue.validate_seqs(v_consumer, p_seqs, 'seek takes all messages from a consumer.');
begin
    if v_set = '{}' then
        return 0;
    end if;
    -- in tries: a session that claims or settles some of the messages may need a lock that this session holds
    return _pgqueue.await('a claim, or the lock, of ' || _pgqueue.consumer_name(v_consumer.consumer_id),
        'select _pgqueue.cancel(c, ($2 ->> 0)::int8multirange) from pgqueue.consumers c where c.consumer_id = $1',
        v_consumer.consumer_id, jsonb_build_array(v_set), p_try => interval '1 ms', p_limit => interval '10 s',
        p_class => _pgqueue.lock_class_consumer())::bigint;
end $$;

-- The messages of an array of numbers that are stored, and that pass the consumer's filter.
--   p_instead  what to call for all messages, as a sentence for the hint
-- Errors: PQ003 for null; PQ006 for a group; PQ007.
create or replace function _pgqueue.validate_seqs(p_consumer pgqueue.consumers, p_seqs bigint[], p_instead text)
returns int8multirange language plpgsql as $$
declare
    v_set int8multirange := _pgqueue.set_of(p_seqs);
begin
    perform _pgqueue.check_isolation();
    perform _pgqueue.check_kind('claim', p_consumer);
    if v_set is null then
        raise exception 'p_seqs must be an array of the seqs of messages, not null'
            using errcode = 'PQ003', column = 'p_seqs', hint = 'Nothing was changed. ' || p_instead;
    end if;
    v_set := _pgqueue.stored_messages(p_consumer.stream_id, v_set);
    return case when p_consumer.filtered then _pgqueue.passing(p_consumer, v_set) else v_set end;
end $$;

-- The messages of a set that are stored.
create or replace function _pgqueue.stored_messages(p_stream_id int, p_set int8multirange) returns int8multirange
language plpgsql as $$
declare
    v_set int8multirange;
begin
    execute format('select range_agg(int8range(m.seq, m.seq + 1)) from unnest($1) g cross join lateral ('
                   'select seq from pgqueue.messages_%s where seq >= lower(g) and seq < upper(g) offset 0) m',
                   p_stream_id)
    into v_set using p_set;
    return coalesce(v_set, '{}');
end $$;

-- The number of messages of a set that are stored.
create or replace function _pgqueue.count_stored(p_stream_id int, p_set int8multirange) returns bigint
language plpgsql as $$
declare
    v_count bigint;
begin
    execute format('select count(*) from unnest($1) g cross join lateral ('
                   'select from pgqueue.messages_%s where seq >= lower(g) and seq < upper(g) offset 0) m', p_stream_id)
    into v_count using p_set;
    return v_count;
end $$;

-- One try to cancel messages; see cancel. Errors: PQ099 while another session claims some of the messages.
create or replace function _pgqueue.cancel(p_consumer pgqueue.consumers, p_set int8multirange) returns bigint
language plpgsql as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_taken  pgqueue.consumer_messages[];
    v_freed  record;
    v_gone   int8multirange;  -- the cancelled messages that the consumer had taken
    v_new    record;
    v_none   pgqueue.consumer_messages;  -- no claim: the messages count as cancelled
begin
    perform _pgqueue.lock_consumer_alone(p_consumer.consumer_id);
    p_consumer := _pgqueue.consumer_now(p_consumer);
    v_stored := _pgqueue.cursor(p_consumer.consumer_id);
    v_taken := _pgqueue.take_claimed(p_consumer.consumer_id, p_set);
    v_freed := _pgqueue.remove_unclaimed(p_consumer, _pgqueue.pass_taken(v_stored, true), p_set);
    v_cursor := v_freed.o_cursor;
    v_gone := _pgqueue.seqs_of(v_taken) + v_freed.o_gone;
    if exists (select from pgqueue.consumer_messages
               where consumer_id = p_consumer.consumer_id and first_seq < upper(p_set) and _pgqueue.meets(seqs, p_set)
                 and reader is null) then
        raise exception using errcode = 'PQ099';
    end if;
    if _pgqueue.is_keyed(p_consumer.profile) and v_taken <> '{}' then
        v_cursor.hints := _pgqueue.reread_keys(p_consumer, v_cursor.hints);
    end if;
    v_cursor.forgotten := v_cursor.forgotten + _pgqueue.cardinality(v_gone);
    v_new := _pgqueue.exclude_new(p_consumer, v_cursor, p_set - v_gone);
    perform _pgqueue.save_cursor(v_stored, _pgqueue.raise_hints(p_consumer, v_new.p_cursor), true);
    v_none.consumer_id := p_consumer.consumer_id;
    v_none.owner := current_setting('application_name');
    perform _pgqueue.record_done(v_none, null, v_gone + v_new.o_gone, _pgqueue.cardinality(v_gone + v_new.o_gone),
                                 greatest(v_freed.o_most, (select max(_pgqueue.one_more(b.deliver_count))
                                                          from unnest(v_taken) b)), null);
    if _pgqueue.is_keyed(p_consumer.profile) and v_gone <> '{}' then
        perform _pgqueue.wake(p_consumer.stream_id);  -- the messages that waited for them
    end if;
    return _pgqueue.cardinality(v_gone + v_new.o_gone);
end $$;

-- Removes messages from the claims of workers. Returns them as bundles, as they were. Locks the claims, and waits for
-- sessions that settle them.
create or replace function _pgqueue.take_claimed(p_consumer_id int, p_set int8multirange)
returns pgqueue.consumer_messages[] language sql as $$
    select array(
        select b
        from (select distinct h.bundle_no, h.token
              from pgqueue.consumer_messages m
              cross join lateral _pgqueue.bundles(array[coalesce(m.head, m.bundle_no)]) h
              where m.consumer_id = p_consumer_id and m.token is not null and m.reader is null
                and _pgqueue.meets(m.seqs, p_set)
              order by h.bundle_no) h
        cross join lateral unnest(_pgqueue.remove_messages(_pgqueue.lock_bundles(h.bundle_no, h.token), p_set)) b)
$$;

-- Excludes messages from what is new for a consumer. Their publications go into gaps, which exclude the messages, as
-- when a consumer is moved (reading/positions.sql). The cost is a search for these messages, however many messages are
-- new. Returns the cursor, the messages, and their publications. Needs the consumer's lock.
create or replace function _pgqueue.exclude_new(p_consumer pgqueue.consumers, inout p_cursor pgqueue.consumer_cursors,
                                                p_set int8multirange, out o_gone int8multirange,
                                                out o_ids int8multirange)
language plpgsql as $$
declare
    v_found record := _pgqueue.find_new(p_consumer, p_cursor, p_set);
    v_gap   pgqueue.consumer_gaps;
begin
    o_gone := v_found.o_seqs;
    o_ids := v_found.o_ids;
    if upper(o_ids) > p_cursor.next_publication then
        p_cursor := _pgqueue.record_gap(p_cursor, int8multirange(int8range(p_cursor.next_publication, upper(o_ids))),
                                        _pgqueue.publishers(p_consumer.stream_id), true);
        p_cursor.next_publication := upper(o_ids);
    end if;
    for v_gap in
        select * from pgqueue.consumer_gaps
        where consumer_id = p_cursor.consumer_id and gap_no = any (p_cursor.gaps) and publication_ids && o_ids
    loop
        p_cursor := _pgqueue.delete_gaps(p_cursor, array[v_gap.gap_no]);
        p_cursor := _pgqueue.record_gap(p_cursor, v_gap.publication_ids, v_gap.publishers, v_gap.look,
                                        coalesce(v_gap.excluded, '{}') + o_gone * (
                                            select range_agg(seqs)
                                            from _pgqueue.published(p_consumer.stream_id,
                                                                    v_gap.publication_ids * o_ids)));
    end loop;
end $$;

-- Takes new messages of a set out of turn: they are no longer new for the consumer, and those before them still are.
-- Returns the cursor, and the messages as bundles that are not stored. Needs the locks of the consumer and of what is
-- new for it, and pass_taken().
create or replace function _pgqueue.take_out(p_consumer pgqueue.consumers, inout p_cursor pgqueue.consumer_cursors,
                                             p_set int8multirange, out o_bundles pgqueue.consumer_messages[])
language plpgsql as $$
declare
    v_new  record := _pgqueue.exclude_new(p_consumer, p_cursor, p_set);
    v_part record;
begin
    o_bundles := '{}';
    p_cursor := v_new.p_cursor;
    p_cursor.last_arrival := p_cursor.last_arrival + 1;
    for v_part in
        select p.priority, p.expires_at, _pgqueue.common(range_agg(p.seqs), v_new.o_gone) as seqs
        from _pgqueue.published(p_consumer.stream_id, v_new.o_ids) p
        where _pgqueue.meets(p.seqs, v_new.o_gone)
        group by p.priority, p.expires_at
    loop
        o_bundles := o_bundles || _pgqueue.taken_bundle(
            p_consumer, p_cursor.last_arrival, v_part.priority, null, v_part.expires_at, v_part.seqs);
        p_cursor.taken := p_cursor.taken + _pgqueue.cardinality(v_part.seqs);
    end loop;
end $$;

-- Finds those messages of a set that are new for a consumer, and their publications. The search starts at the
-- publication that the messages' numbers suggest. A message that a sink wrote long before its publication is found by
-- reading all new publications.
create or replace function _pgqueue.find_new(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                             p_set int8multirange, out o_ids int8multirange, out o_seqs int8multirange)
language plpgsql as $$
declare
    v_new  int8multirange := _pgqueue.new_ids(p_cursor);
    v_left int8multirange := p_set;
    v_late int8multirange := '{}';
    v_both int8multirange;
    v_from bigint;
    v_page record;
begin
    o_ids := '{}';
    o_seqs := '{}';
    if p_cursor.gaps = '{}' and _pgqueue.last_publication_id(p_consumer.stream_id) < p_cursor.next_publication then
        return;
    end if;
    while v_left <> '{}' or v_late <> '{}' loop
        v_from := case when v_left = '{}' then lower(v_new)
                       else _pgqueue.search_publication(p_consumer.stream_id, null, lower(v_left)) end;
        v_both := v_left + v_late;
        select coalesce(range_agg(p.seqs), '{}') * v_both as seqs,
               coalesce(range_agg(p.seqs) filter (where p.mine), '{}') * v_both as new_seqs,
               coalesce(range_agg(int8range(p.publication_id, p.publication_id, '[]')) filter (where p.mine),
                        '{}') as ids
        into v_page
        from (select f.publication_id, f.seqs,
                     v_new @> f.publication_id and _pgqueue.is_for(f.consumers, p_consumer.consumer_id) as mine
              from (select publication_id, seqs, consumers from pgqueue.publications
                    where stream_id = p_consumer.stream_id and publication_id >= v_from
                    order by publication_id limit case when v_left <> '{}' then _pgqueue.limit_unseen() end) f
              where _pgqueue.meets(f.seqs, v_both)) p;
        o_seqs := o_seqs + v_page.new_seqs;
        o_ids := o_ids + v_page.ids;
        exit when v_left = '{}';
        v_late := v_late + int8multirange(int8range(lower(v_left), lower(v_left), '[]')) - v_page.seqs;
        v_left := v_left - v_late - v_page.seqs;
    end loop;
    o_seqs := o_seqs - coalesce(_pgqueue.excluded(p_cursor), '{}');
end $$;
