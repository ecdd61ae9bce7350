-- Cancelling: messages are taken from a consumer that has not finished them.

-- Takes messages from a consumer for good, wherever it has them: what is new, ready, delayed or waiting is not delivered any more; what is claimed
-- leaves its claim, whose owner is told when it extends or settles it, by smaller numbers, and is not stopped. Of an ordered consumer, what follows of
-- their keys goes on. All or nothing. Passed over are dead letters, what a Spark query has in hand, and numbers that are not the consumer's.
-- seek and replay may deliver them again.
--   p_seqs  the messages
-- Returns how many messages that were. Errors: PQ001, PQ002, PQ003, PQ006 for a group, PQ007; 55P03 when a transaction that claims or settles some of
-- them stays open for 10 s. Locks: the claims that hold some of them; then the consumer.
create or replace function pgqueue.cancel(p_stream text, p_consumer text, p_seqs bigint[]) returns bigint
language plpgsql
as $$
declare
    v_consumer pgqueue.consumers := pgqueue._consumer(p_stream, p_consumer);
    v_set      int8multirange := pgqueue._set_of(p_seqs);
    v_until    timestamptz := clock_timestamp() + interval '10 s';
begin
    perform pgqueue._check_isolation();
    if v_consumer.partitions is not null then
        perform pgqueue._refuse_group(v_consumer);
    elsif v_set is null then
        raise exception 'p_seqs is an array of the numbers of messages, not null'
            using errcode = 'PQ003', column = 'p_seqs', hint = 'Nothing was changed. seek takes all messages from a consumer.';
    end if;
    v_set := pgqueue._existing(v_consumer.stream_id, v_set);
    if v_consumer.filtered then
        v_set := pgqueue._passing(v_consumer, v_set);
    end if;
    while v_set <> '{}' loop
        begin
            return pgqueue._cancel(v_consumer, v_set);
        exception when lock_not_available or deadlock_detected or sqlstate 'PQ099' then
            -- somebody claims or settles some of them, and may need a lock that this had: it is let go here
            if clock_timestamp() > v_until then
                raise exception 'for 10 s a transaction that claims or settles some of these messages of % stays open',
                                pgqueue._consumer_name(v_consumer.consumer_id)
                    using errcode = 'lock_not_available', hint = 'End that transaction, and cancel again. Nothing was changed.';
            end if;
            perform pg_sleep(0.002);
        end;
    end loop;
    return 0;
end $$;

-- Those of some messages that are stored.
create or replace function pgqueue._existing(p_stream_id int, p_set int8multirange) returns int8multirange
language plpgsql
as $$
declare
    v_set int8multirange;
begin
    execute format('select range_agg(int8range(m.seq, m.seq + 1)) from unnest($1) g cross join lateral ('
                   'select seq from pgqueue.messages_%s where seq >= lower(g) and seq < upper(g)) m', p_stream_id)
    into v_set using p_set;
    return coalesce(v_set, '{}');
end $$;

-- One try to cancel messages; see cancel. Errors: PQ099 when somebody is claiming some of them.
create or replace function pgqueue._cancel(p_consumer pgqueue.consumers, p_set int8multirange) returns bigint
language plpgsql
set lock_timeout = '300ms'
as $$
declare
    v_claims pgqueue.claims[];
    v_claim  pgqueue.claims;
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_taken  record;
    v_away   record;
    v_gone   int8multirange := '{}';  -- of what it had taken
    v_most   int := 0;
    v_new    record;
begin
    for v_claim in
        select c.* from pgqueue.claims c
        where c.consumer_id = p_consumer.consumer_id and c.live and c.reader is null
          and exists (select from pgqueue.consumer_messages m where m.claim_id = c.claim_id and m.state = 'claimed' and m.seqs && p_set)
        order by c.claim_id
        for update of c
    loop
        v_claims := v_claims || v_claim;
    end loop;
    perform pg_advisory_xact_lock(pgqueue._lock_class_consumer(), p_consumer.consumer_id);
    v_stored := pgqueue._cursor(p_consumer.consumer_id);
    foreach v_claim in array coalesce(v_claims, '{}') loop
        select range_agg(seqs) as seqs, coalesce(sum(message_count), 0)::bigint as message_count, max(deliver_count) as most into v_taken
        from pgqueue._take_out(v_claim.claim_id, p_set);
        v_gone := v_gone + coalesce(v_taken.seqs, '{}');
        v_most := greatest(v_most, v_taken.most);
        perform pgqueue._shrink_claim(v_claim, v_claim.remaining - v_taken.message_count);
    end loop;
    v_away := pgqueue._take_away(p_consumer, v_stored, p_set);
    v_cursor := v_away.o_cursor;
    v_gone := v_gone + v_away.o_gone;
    if exists (select from pgqueue._owed(p_consumer.consumer_id, upper(p_set)) m left join pgqueue.claims c using (claim_id)
               where m.seqs && p_set and c.reader is null) then
        raise exception using errcode = 'PQ099';
    end if;
    v_cursor.forgotten := v_cursor.forgotten + pgqueue._cardinality(v_gone);
    v_new := pgqueue._pass_over(p_consumer, v_cursor, p_set - v_gone);
    perform pgqueue._save_cursor(v_stored, v_new.p_cursor, true);
    perform pgqueue._note_cancelled(p_consumer, v_gone + v_new.o_gone, greatest(v_most, v_away.o_most));
    if p_consumer.by_key and v_gone <> '{}' then
        perform pg_notify(pgqueue._channel(p_consumer.stream_id), '');  -- what waited for them
    end if;
    return pgqueue._cardinality(v_gone + v_new.o_gone);
end $$;

-- Lets a consumer pass over messages that it has not taken: their publications are in a gap then, which keeps them from it, as what it has in hand
-- when it is moved (core/positions.sql). So it costs a look for them, however much is new.
-- Returns the cursor, and the messages. Needs the consumer's lock.
create or replace function pgqueue._pass_over(p_consumer pgqueue.consumers, inout p_cursor pgqueue.consumer_cursors, p_set int8multirange,
                                              out o_gone int8multirange)
language plpgsql
as $$
declare
    v_found record := pgqueue._find_new(p_consumer, p_cursor, p_set);
    v_gap   pgqueue.consumer_gaps;
    v_kept  int8multirange;
    v_last  bigint := upper(v_found.o_ids) - 1;
begin
    o_gone := v_found.o_seqs;
    for v_gap in
        select * from pgqueue.consumer_gaps
        where consumer_id = p_cursor.consumer_id and gap_no = any (p_cursor.gaps) and publication_ids && v_found.o_ids
    loop
        v_kept := o_gone * (select range_agg(p.seqs) from unnest(v_gap.publication_ids * v_found.o_ids) g
                            cross join lateral (select seqs from pgqueue.publications
                                                where stream_id = p_consumer.stream_id and publication_id >= lower(g) and publication_id < upper(g)) p);
        p_cursor := pgqueue._forget_gap(p_cursor, v_gap.gap_no);
        p_cursor := pgqueue._note_gap(p_cursor, v_gap.publication_ids, v_gap.publishers, v_gap.look, coalesce(v_gap.kept, '{}') + v_kept);
    end loop;
    if v_last >= p_cursor.next_publication then
        v_kept := o_gone * (select range_agg(p.seqs) from unnest(v_found.o_ids * int8multirange(int8range(p_cursor.next_publication, null))) g
                            cross join lateral (select seqs from pgqueue.publications
                                                where stream_id = p_consumer.stream_id and publication_id >= lower(g) and publication_id < upper(g)) p);
        p_cursor := pgqueue._note_gap(p_cursor, int8multirange(int8range(p_cursor.next_publication, v_last, '[]')),
                                      pgqueue._publishers(p_consumer.stream_id), true, v_kept);
        p_cursor.next_publication := v_last + 1;
    end if;
end $$;

-- The publications of messages that are new for a consumer, and those messages. It looks where their numbers say; one that a sink wrote long before it
-- was published is found by reading all that is new.
create or replace function pgqueue._find_new(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_set int8multirange,
                                             out o_ids int8multirange, out o_seqs int8multirange)
language plpgsql
as $$
declare
    v_new  int8multirange := pgqueue._gap_ids(p_cursor) + int8multirange(int8range(p_cursor.next_publication, null));
    v_left int8multirange := p_set;
    v_late int8multirange := '{}';
    v_from bigint;
    v_look record;
begin
    o_ids := '{}';
    o_seqs := '{}';
    if p_cursor.gaps = '{}'
       and (pg_sequence_last_value(format('pgqueue.publication_%s', p_consumer.stream_id)::regclass) >= p_cursor.next_publication) is not true then
        return;
    end if;
    while v_left <> '{}' or v_late <> '{}' loop
        v_from := case when v_left = '{}' then lower(v_new) else pgqueue._below_position(p_consumer.stream_id, null, lower(v_left)) end;
        select coalesce(range_agg(p.seqs), '{}') as seqs,
               coalesce(range_agg(p.seqs) filter (where p.mine), '{}') as new_seqs,
               coalesce(range_agg(int8range(p.publication_id, p.publication_id, '[]')) filter (where p.mine), '{}') as ids
        into v_look
        from (select f.publication_id, f.seqs * (v_left + v_late) as seqs,
                     v_new @> f.publication_id and pgqueue._is_for(f.consumers, p_consumer.consumer_id) as mine
              from (select publication_id, seqs, consumers from pgqueue.publications
                    where stream_id = p_consumer.stream_id and publication_id >= v_from
                    order by publication_id limit case when v_left <> '{}' then pgqueue._limit_unseen() end) f
              where f.seqs && (v_left + v_late)) p;
        o_seqs := o_seqs + v_look.new_seqs;
        o_ids := o_ids + v_look.ids;
        exit when v_left = '{}';
        v_late := v_late + int8multirange(int8range(lower(v_left), lower(v_left), '[]')) - v_look.seqs;
        v_left := v_left - v_late - v_look.seqs;
    end loop;
    o_seqs := o_seqs - coalesce(pgqueue._kept(p_cursor), '{}');
end $$;

-- Keeps what was cancelled, and notifies, as the consumer's settings say.
--   p_deliver_count  of the message that was delivered most often
create or replace function pgqueue._note_cancelled(p_consumer pgqueue.consumers, p_seqs int8multirange, p_deliver_count int) returns void
language plpgsql
as $$
begin
    if p_seqs = '{}' then
        return;
    end if;
    if p_consumer.keep_history is not null then
        insert into pgqueue.archived_messages (consumer_id, done_at, seqs, message_count, deliver_count, owner)
        values (p_consumer.consumer_id, clock_timestamp(), p_seqs, pgqueue._cardinality(p_seqs), p_deliver_count, current_setting('application_name'));
    end if;
    if p_consumer.notify_done then
        perform pg_notify(pgqueue._done_channel(p_consumer.consumer_id), '');
    end if;
end $$;
