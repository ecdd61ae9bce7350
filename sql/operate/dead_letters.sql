-- Dead letters: messages that a consumer has given up. Their payloads are kept; see also keep_dead in
-- operate/retention.sql.

-- on drop_consumer
create table if not exists pgqueue.dead_messages (
    dead_id       bigint         generated always as identity primary key,
    stream_id     int            not null,
    consumer_id   int            not null,
    seqs          int8multirange not null,
    message_count bigint         not null,
    priority      int            not null,
    deliver_count int            not null,
    reason        text,           -- max deliveries, expired, poison, dropped; or the worker's reason (rejected)
    details       jsonb,
    claim_id      bigint,
    died_at       timestamptz    not null default clock_timestamp(),
    note          jsonb,          -- as it was in the bundle
    owner         text            -- of the claim
);

-- Removes dead letters of a consumer, those with the lowest numbers first. Needs the consumer's lock.
--   p_seqs, p_reason, p_before  only those; null: any
--   p_max  at most so many; null: all
-- Returns them as sets of messages that are alike.
create or replace function _pgqueue.take_dead(p_consumer_id int, p_seqs int8multirange, p_reason text,
                                              p_before timestamptz, p_max bigint)
returns table (priority int, deliver_count int, note jsonb, seqs int8multirange) language plpgsql as $$
#variable_conflict use_column
declare
    v_chosen bigint[];
    v_set    int8multirange;
begin
    select array_agg(dead_id), range_agg(seqs) into v_chosen, v_set
    from (select dead_id, coalesce(_pgqueue.common(seqs, p_seqs), seqs) as seqs from pgqueue.dead_messages
          where consumer_id = p_consumer_id and (p_seqs is null or _pgqueue.meets(seqs, p_seqs))
            and (p_reason is null or reason = p_reason)
            and (died_at < p_before or p_before is null)
          -- each row has at least one message, so p_max rows are enough
          order by lower(seqs) limit case when p_seqs is null then p_max end
          -- lock: dead
          for update skip locked) d;  -- maintain() may be deleting some
    if _pgqueue.cardinality(v_set) > p_max then
        v_set := _pgqueue.below(v_set, _pgqueue.bound_of(v_set, p_max));
    end if;
    return query
        delete from pgqueue.dead_messages where dead_id = any (v_chosen) and _pgqueue.less(seqs, v_set) = '{}'
        returning priority, deliver_count, note, seqs;
    return query
        update pgqueue.dead_messages d
        set seqs = d.seqs - v_set, message_count = _pgqueue.cardinality(d.seqs - v_set)
        from pgqueue.dead_messages before
        where d.dead_id = any (v_chosen) and _pgqueue.meets(d.seqs, v_set) and before.dead_id = d.dead_id
        returning d.priority, d.deliver_count, d.note, before.seqs * v_set;
end $$;

-- Delivers dead letters again to their consumer.
-- They are delivered after its other messages, in the order of their numbers, and to no other consumer.
--   p_seqs    only these messages; null: all
--   p_reason  only those with this reason; null: any reason
--   p_before  only those dead-lettered before this time; null: at any time
--   p_max     the maximum number, those with the lowest numbers first; null: all
--   p_reset   treat the messages as never delivered; false: keep their deliver_count, so that with max_deliver_count
--             their next failure is the last
-- Returns the number of messages. Concurrent calls deliver each message once. Errors: PQ001, PQ002, PQ003, PQ007.
-- Locks: the consumer.
create or replace function pgqueue.redrive(p_stream text, p_consumer text, p_seqs bigint[] default null,
                                           p_reason text default null, p_before timestamptz default null,
                                           p_max int default 1000, p_reset boolean default true) returns bigint
language plpgsql as $$
declare
    v_consumer pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
    v_stored   pgqueue.consumer_cursors;
    v_cursor   pgqueue.consumer_cursors;
    v_dead     record;
    v_bundle   pgqueue.consumer_messages;
    v_set      int8multirange := '{}';
    -- notes that would end a message at once, or limit the size of its claims, are removed
    v_notes    jsonb := '{"at_most": null, "expires": null}';
begin
    perform _pgqueue.check_isolation();
    perform _pgqueue.check_positive('p_max', p_max);
    if p_reset is not false then
        v_notes := v_notes || '{"error": null, "attempts": null, "spark": null}';
    end if;
    perform _pgqueue.lock_consumer(v_consumer.consumer_id);
    v_consumer := _pgqueue.consumer_now(v_consumer);
    v_stored := _pgqueue.cursor(v_consumer.consumer_id);
    v_cursor := _pgqueue.pass_taken(v_stored, false);  -- dead letters were taken before
    for v_dead in
        select priority, deliver_count, note, range_agg(seqs) as seqs
        from (select d.*, int8multirange(r) as seqs,
                     case when v_consumer.ordering <> 'none'  -- in the order of their numbers
                          then row_number() over (order by r) - row_number() over (
                                   partition by priority, deliver_count, note order by r) end as stretch
              from (select priority, case when p_reset is false then deliver_count else 0 end as deliver_count,
                           _pgqueue.merged_note(note, v_notes) as note, r
                    from _pgqueue.take_dead(v_consumer.consumer_id, _pgqueue.set_of(p_seqs), p_reason, p_before, p_max)
                    cross join lateral unnest(seqs) r) d) s
        group by priority, deliver_count, note, stretch
        order by min(lower(seqs))
    loop
        v_cursor.last_arrival := v_cursor.last_arrival + 1;
        -- with an order, this message comes after those that are unfiltered, and a filter applies to it again
        v_bundle := _pgqueue.taken_bundle(
            v_consumer, v_cursor.last_arrival, v_dead.priority, null, null, v_dead.seqs,
            v_consumer.per_key_latest
            or (v_consumer.ordering <> 'none' and (v_cursor.hints).filter_from is not null));
        v_bundle.note := v_dead.note;
        v_bundle.deliver_count := v_dead.deliver_count;
        v_cursor.hints := _pgqueue.store_placed(v_cursor.hints, v_bundle, v_dead.seqs);
        v_set := v_set + v_dead.seqs;
    end loop;
    if v_set <> '{}' then
        v_cursor.taken := v_cursor.taken + _pgqueue.cardinality(v_set);
        perform _pgqueue.save_cursor(v_stored, _pgqueue.raise_hints(v_consumer, v_cursor), true);
        perform _pgqueue.enter_keys(v_consumer, v_set);
        perform _pgqueue.wake(v_consumer.stream_id);
    end if;
    return _pgqueue.cardinality(v_set);
end $$;

-- Deletes dead letters: they can no longer be redriven, and retention no longer keeps their messages.
--   p_seqs, p_reason, p_before, p_max  as in redrive
-- Returns the number of messages. Errors: PQ001, PQ002, PQ003, PQ007. Locks: the consumer.
create or replace function pgqueue.purge_dead(p_stream text, p_consumer text, p_seqs bigint[] default null,
                                              p_reason text default null, p_before timestamptz default null,
                                              p_max int default null) returns bigint
language plpgsql as $$
declare
    v_id int := (_pgqueue.consumer(p_stream, p_consumer)).consumer_id;
begin
    perform _pgqueue.check_isolation();
    perform _pgqueue.check_positive('p_max', p_max);
    perform _pgqueue.lock_consumer(v_id);
    return (select coalesce(sum(_pgqueue.cardinality(seqs)), 0)
            from _pgqueue.take_dead(v_id, _pgqueue.set_of(p_seqs), p_reason, p_before, p_max));
end $$;

-- Reads dead letters with their payloads, in the order of their numbers, and changes nothing.
--   p_seqs, p_reason, p_before  as in redrive
--   p_max    the maximum number
--   p_after  only those with a higher number: the last number of the previous page
-- Returns a row per message: why and when it was dead-lettered, its last error, how often it was delivered, and the
-- last owner of its claim. inserted_at is null for a message that was deleted from the stream. Errors: PQ001, PQ002,
-- PQ003. Locks nothing.
create or replace function pgqueue.read_dead(p_stream text, p_consumer text, p_seqs bigint[] default null,
                                             p_reason text default null, p_before timestamptz default null,
                                             p_max int default 100, p_after bigint default 0)
returns table (seq bigint, key text, data text, data_bytes bytea, headers jsonb, priority int, inserted_at timestamptz,
               reason text, error text, details jsonb, deliver_count int, owner text, died_at timestamptz)
language plpgsql stable as $$
declare
    v_consumer pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
    v_after    int8multirange;
begin
    perform _pgqueue.check_number('p_max', p_max, 1, 2147483647);
    perform _pgqueue.check_number('p_after', p_after, 0, 9223372036854775806);
    v_after := int8multirange(int8range(p_after + 1, null));
    return query execute format($q$
        select s.seq, m.key, m.data, m.data_bytes, m.headers, s.priority, m.inserted_at,
               s.reason, s.note ->> 'error', s.details, s.deliver_count, s.owner, s.died_at
        from (select d.*, q.seq
              from (select d.*, g.g
                    from pgqueue.dead_messages d cross join lateral unnest(d.seqs * $2) g (g)
                    where d.consumer_id = $1 and d.seqs && $2 and ($3 is null or d.reason = $3)
                      and (d.died_at < $4 or $4 is null)
                    order by lower(g.g) limit $5) d
              cross join lateral generate_series(lower(d.g), least(upper(d.g) - 1, lower(d.g) + $5)) q (seq)
              order by q.seq limit $5) s
        left join lateral (select * from pgqueue.messages_%s x where x.seq = s.seq) m on true
        order by s.seq $q$, v_consumer.stream_id)
    using v_consumer.consumer_id, v_after * coalesce(_pgqueue.set_of(p_seqs), v_after), p_reason, p_before, p_max;
end $$;
