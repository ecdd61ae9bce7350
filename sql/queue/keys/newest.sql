-- Latest wins: of a consumer with per_key_latest, only the newest message of a key waits: the one with the highest
-- number. send assigns numbers, so a transaction that commits late does not make its messages newer.
--
-- Messages are screened where a filter screens them, after the publication is taken and before they are ready
-- (apply_filter()). The table newest_of_keys has the newest message of each key that the consumer has taken. An older
-- message is replaced: it is deleted, or does not become ready, and the history has the number of the message that
-- replaced it. The same happens when a message is returned or redriven after the consumer has taken a newer one, even
-- if that one is done. Claimed messages and dead letters stay.
--
-- For an exact result, a claim of such a consumer needs its lock, and first screens everything published before
-- (has_unscreened()). So no message is delivered while a newer one of its key waits, and the numbers delivered for a
-- key rise. (Senders could replace messages themselves. But ordering all senders of a key needs a lock from each send
-- to its commit; and a message is stored once for all consumers, most of which want every message.)
--
-- A claim that replaces messages looks for them in all waiting bundles, as cancel does.

-- The newest message of each key that a consumer with per_key_latest has taken. (With the key itself: if two keys had
-- one hash, a message would be lost silently.)
-- on drop_consumer
create table if not exists pgqueue.newest_of_keys (
    consumer_id int         not null,
    key         text        collate "C" not null,
    seq         bigint      not null,
    noted_at    timestamptz not null,  -- the end of the hour in which the row was written
    primary key (consumer_id, key)
);

-- The value of noted_at: by the hour, so that most updates do not change the index on it.
create or replace function _pgqueue.end_of_hour() returns timestamptz
language sql volatile as $$ select date_trunc('hour', clock_timestamp()) + interval '1 hour' $$;

-- Records the newest messages of keys, and replaces older ones.
--   p_seqs     messages that are screened; or that are not finished
--   p_bundles  those of p_seqs that the caller takes out of the bundles, and counts
-- Returns the cursor, and the messages of p_seqs that are not replaced. A message without a key is never replaced.
-- Needs the consumer's lock.
create or replace function _pgqueue.keep_newest(p_consumer pgqueue.consumers, inout p_cursor pgqueue.consumer_cursors,
                                                p_seqs int8multirange, p_bundles pgqueue.consumer_messages[],
                                                out o_newest int8multirange)
language plpgsql as $$
declare
    v_keys  pgqueue.key_texts := _pgqueue.key_texts(p_consumer.stream_id, p_seqs);
    v_seqs  bigint[];  -- the replaced messages, ...
    v_by    bigint[];  -- ... and the newest message of the key of each
    v_taken record;
begin
    with given as materialized (
        select key collate "C" as key, seq from unnest(v_keys.keys, v_keys.seqs) k (key, seq)
    ), newest as materialized (
        select key, max(seq) as seq from given group by key
    ), recorded as materialized (
        select n.key, b.ctid, b.seq as before, greatest(n.seq, b.seq) as seq
        from newest n left join lateral (
            -- the order selects the primary key: of an empty table, the other index looks as good to the planner
            select ctid, seq from pgqueue.newest_of_keys
            where consumer_id = p_consumer.consumer_id and key >= n.key and key <= n.key
            order by key limit 1) b on true
    ), changed as (
        update pgqueue.newest_of_keys k set seq = n.seq, noted_at = _pgqueue.end_of_hour()
        from recorded n where k.ctid = n.ctid
    ), added as (
        insert into pgqueue.newest_of_keys (consumer_id, key, seq, noted_at)
        select p_consumer.consumer_id, key, seq, _pgqueue.end_of_hour() from recorded where ctid is null order by key
    )
    select array_agg(seq order by seq), array_agg(newest order by seq) into v_seqs, v_by
    from (select seq, max(seq) over (partition by key) as newest
          from (select key, seq from given union select key, before from recorded) k) m
    where seq < newest;
    o_newest := p_seqs;
    if v_seqs is null then
        return;
    end if;
    o_newest := p_seqs - _pgqueue.set_of(v_seqs);
    v_taken := _pgqueue.take_unclaimed(p_consumer, p_cursor.hints, _pgqueue.set_of(v_seqs));
    p_cursor.hints := v_taken.o_hints;
    p_cursor.forgotten := p_cursor.forgotten + _pgqueue.count_of(v_taken.o_bundles);
    if p_consumer.keep_history is not null then
        insert into pgqueue.completed_messages (consumer_id, done_at, seqs, message_count, deliver_count, result)
        select p_consumer.consumer_id, clock_timestamp(), range_agg(int8range(m.seq, m.seq, '[]')), count(*),
               r.deliver_count, jsonb_build_object('replaced_by', m.by)
        from unnest(v_seqs, v_by) m (seq, by)
        join (select s as seq, deliver_count from unnest(p_bundles || v_taken.o_bundles) r
              cross join lateral unnest(r.seqs) g
              cross join lateral generate_series(lower(g), upper(g) - 1) s) r using (seq)
        group by m.by, r.deliver_count;
    end if;
    if p_consumer.notify_done then
        perform pg_notify(_pgqueue.done_channel(p_consumer.consumer_id), '');
    end if;
end $$;

-- Replaces messages that are being returned from a claim, if the consumer has taken a newer message of their key.
--   p_set  the messages; null: all of the claim
-- Returns the cursor, and the bundles that the claim has then. Needs the claim's lock and the consumer's.
create or replace function _pgqueue.replace_returned(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                     p_bundles pgqueue.consumer_messages[], p_set int8multirange,
                                                     out o_cursor pgqueue.consumer_cursors,
                                                     out o_bundles pgqueue.consumer_messages[])
language plpgsql as $$
declare
    v_set      int8multirange := _pgqueue.seqs_of(p_bundles) * coalesce(p_set, '{(,)}');
    v_newest   record := _pgqueue.keep_newest(p_consumer, p_cursor, v_set, p_bundles);
    v_replaced int8multirange := v_set - v_newest.o_newest;
begin
    o_cursor := v_newest.p_cursor;
    o_bundles := p_bundles;
    if v_replaced <> '{}' then
        perform _pgqueue.remove_messages(p_bundles, v_replaced);
        o_cursor.forgotten := o_cursor.forgotten + _pgqueue.cardinality(v_replaced);
        o_bundles := array(select b from _pgqueue.bundles_of(p_bundles[1].bundle_no, p_bundles[1].token) b);
    end if;
end $$;

-- Whether published messages are not screened yet.
--   p_upto  up to this publication; null: nothing was published
create or replace function _pgqueue.has_unscreened(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                   p_upto bigint) returns boolean
language plpgsql as $$
begin
    return (p_cursor.hints).filter_from is not null
        or exists (select from unnest((_pgqueue.gap_ids(p_cursor)
                                       + int8multirange(int8range(p_cursor.next_publication, null)))
                                      * int8multirange(int8range(1, p_upto, '[]'))) g
                   cross join lateral (select from pgqueue.publications
                                       where stream_id = p_consumer.stream_id and publication_id >= lower(g)
                                         and publication_id < upper(g) limit 1) p);
end $$;

-- Applies a change of per_key_latest to the messages that the consumer has taken. Errors: PQ003 unless the consumer is
-- paused and has no claims. Locks: the consumer.
create or replace function _pgqueue.change_latest(p_consumer pgqueue.consumers) returns void
language plpgsql as $$
declare
    v_stored pgqueue.consumer_cursors;
begin
    perform _pgqueue.lock_consumer_alone(p_consumer.consumer_id);
    if not exists (select from pgqueue.consumer_cursors where consumer_id = p_consumer.consumer_id) then
        return;  -- the consumer is being created
    end if;
    perform _pgqueue.check_idle(p_consumer, 'per_key_latest is changed only');
    if p_consumer.per_key_latest then
        v_stored := _pgqueue.cursor(p_consumer.consumer_id);
        perform _pgqueue.save_cursor(v_stored, (_pgqueue.keep_newest(p_consumer, v_stored, (
            select coalesce(range_agg(seqs), '{}') from _pgqueue.unfinished(p_consumer.consumer_id)
            where state not in ('claimed', 'unfiltered')), '{}')).p_cursor, true);
    else
        delete from pgqueue.newest_of_keys where consumer_id = p_consumer.consumer_id;
    end if;
end $$;

-- Raises PQ003 unless a consumer is paused and has no claims, nor claims that are being made. Needs the locks of
-- lock_consumer_alone(). Locks all messages that the consumer has taken, so it waits for sessions that are claiming
-- some.
--   p_what  the change, for the message
create or replace function _pgqueue.check_idle(p_consumer pgqueue.consumers, p_what text) returns void
language plpgsql as $$
declare
    v_claims bigint;
begin
    perform from pgqueue.consumer_messages where consumer_id = p_consumer.consumer_id for update;  -- lock: bundle
    -- a statement of its own: it sees the claims for which the first statement waited
    v_claims := (select count(*) from _pgqueue.live_claims(p_consumer.consumer_id))
        + (select count(*) from _pgqueue.advisory_locks(_pgqueue.lock_class_consumer(), p_consumer.consumer_id)
           where not granted);
    if not p_consumer.paused or v_claims > 0 then
        raise exception 'p_settings: % while the consumer is paused and has no claims, but % is %, open claims: %',
                        p_what,
                        quote_literal(p_consumer.name), case when p_consumer.paused then 'paused' else 'not paused' end,
                        v_claims
            using errcode = 'PQ003', column = 'p_settings',
                  hint = 'Pause it, and wait until its claims are settled or expired, or create it with these settings.'
                         ' Nothing was changed.';
    end if;
end $$;

-- Deletes the rows for keys of which a consumer has no unfinished message, because it moved to another position.
create or replace function _pgqueue.delete_newest(p_consumer_id int) returns void
language sql as $$
    delete from pgqueue.newest_of_keys
    where consumer_id = p_consumer_id
      and not coalesce((select range_agg(seqs) from _pgqueue.unfinished(p_consumer_id)), '{}') @> seq
$$;

-- Deletes the rows for keys of which no message was sent for p_age, at most limit_deleted() for each consumer. An
-- older message of such a key could only come from a write that began before, and maintain() deletes such writes.
-- Locks: these consumers; it skips those that others hold.
create or replace function _pgqueue.maintain_newest(p_age interval) returns void
language plpgsql as $$
declare
    v_id         int;
    v_keys       text[];
    v_unfinished int8multirange;
begin
    for v_id in
        select consumer_id from pgqueue.consumers c
        where per_key_latest
          and exists (select from pgqueue.newest_of_keys n
                      where n.consumer_id = c.consumer_id and noted_at < clock_timestamp() - p_age)
        order by consumer_id
    loop
        continue when not _pgqueue.try_lock_consumer(v_id);
        v_keys := array(select key from pgqueue.newest_of_keys
                        where consumer_id = v_id and noted_at < clock_timestamp() - p_age
                        order by noted_at limit _pgqueue.limit_deleted());
        v_unfinished := coalesce((select range_agg(seqs) from _pgqueue.unfinished(v_id)), '{}');
        update pgqueue.newest_of_keys set noted_at = _pgqueue.end_of_hour()
        where consumer_id = v_id and key = any (v_keys) and v_unfinished @> seq;
        delete from pgqueue.newest_of_keys
        where consumer_id = v_id and key = any (v_keys) and not v_unfinished @> seq;
    end loop;
end $$;
