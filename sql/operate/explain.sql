-- Explaining: why a message is where it is, and what keys have before them.

-- A number of messages, in words.
create or replace function _pgqueue.messages_of(p_count bigint) returns text
language sql immutable parallel safe as $$
    select case p_count when 1 then '1 message' else p_count || ' messages' end
$$;

-- A number of deliveries, in words.
create or replace function _pgqueue.deliveries_of(p_count int) returns text
language sql immutable parallel safe as $$
    select case p_count when 1 then 'delivered once' else 'delivered ' || p_count || ' times' end
$$;

-- The owner of a claim, in words.
--   p_run  messages that it holds, a row of unfinished()
create or replace function _pgqueue.holder(p_run record) returns text
language plpgsql stable as $$
begin
    return case when p_run.reader is null then coalesce(nullif(p_run.owner, ''), 'a worker')
                else format('the Spark query %s',
                            coalesce((select query_id from pgqueue.readers where reader = p_run.reader),
                                     'of reader ' || p_run.reader)) end
           || format(' since %s, in claim %s of %s', date_trunc('second', p_run.claimed_at), p_run.claim_id,
                     _pgqueue.messages_of(p_run.claim_count))
           || case when p_run.lease_until <= clock_timestamp()
                   then '; its lease is over, so the next claim that needs messages takes them over' else '' end;
end $$;

-- Whether one of some messages has a key, by its hash.
create or replace function _pgqueue.has_key(p_consumer pgqueue.consumers, p_seqs int8multirange, p_key bigint)
returns boolean language plpgsql stable as $$
declare
    v_has boolean;
begin
    execute format('select exists (select from unnest($1) g cross join lateral (select from pgqueue.messages_%s m '
                   'where seq >= lower(g) and seq < upper(g) and %s = $2 offset 0) m)', p_consumer.stream_id,
                   _pgqueue.key_of(p_consumer)) into v_has using p_seqs, p_key;
    return v_has;
end $$;

-- What the messages of a key wait for, in an ordered consumer.
--   p_key  its hash
--   p_seq  a message that waits; messages after it do not count
-- Returns why, and until when at least; nulls when the key is free.
create or replace function _pgqueue.busy_with(p_consumer pgqueue.consumers, p_key bigint, p_seq bigint,
                                              out o_because text, out o_until timestamptz)
language plpgsql stable as $$
declare
    v_run   record;
    v_spent bigint;
begin
    if p_consumer.per_key_interval is not null then
        select sum(spent), min(returns_at) into v_spent, o_until
        from pgqueue.key_tokens
        where consumer_id = p_consumer.consumer_id and key = p_key and returns_at > clock_timestamp();
        if v_spent >= p_consumer.per_key_burst then
            o_because := format('the rate of its key: %s delivered within %s', v_spent, p_consumer.per_key_interval);
            return;
        end if;
        o_until := null;
    end if;
    select m.*, u.all_keys into v_run
    from _pgqueue.unfinished(p_consumer.consumer_id) m
    join _pgqueue.users_of(p_consumer.consumer_id, p_key) u using (bundle_no)
    where not m.seqs @> p_seq and _pgqueue.has_key(p_consumer, m.seqs, p_key)
    order by m.state <> 'claimed', m.arrival_no, m.first_seq limit 1;
    if found then
        o_because := case when v_run.all_keys then 'a claim of all keys' else 'messages of its key' end
            || case when v_run.claim_id is null then ', which nobody has claimed yet'
                    else ', held by ' || _pgqueue.holder(v_run) end;
        o_until := v_run.lease_until;
        return;
    end if;
    select * into v_run from _pgqueue.unfinished(p_consumer.consumer_id)
    where state in ('delayed', 'waiting') and key = p_key and first_seq < p_seq and not seqs @> p_seq
    order by state <> 'delayed', arrival_no, first_seq limit 1;
    if found then
        o_because := format('message %s of its key, which %s', v_run.first_seq,
                            case when v_run.not_visible_until > clock_timestamp() then 'is delayed'
                                 else 'waits itself' end
                            || coalesce(': ' || (v_run.note ->> 'error'), ''));
        o_until := v_run.not_visible_until;
    end if;
end $$;

-- Explains a message that a consumer has taken and not finished: see explain_message. (More than 60 lines: a case for
-- each state.)
create or replace function _pgqueue.explain_run(p_consumer pgqueue.consumers, p_run record, p_seq bigint,
                                                out o_state text, out o_because text, out o_until timestamptz)
language plpgsql stable as $$
declare
    v_key     bigint := p_run.key;
    v_behind  text;
    v_free    timestamptz;  -- when its key is free, at the latest or at the earliest
    v_before  bigint;
    v_history text := case when p_run.deliver_count > 0
                           then '; ' || _pgqueue.deliveries_of(p_run.deliver_count)
                               || coalesce(', last at ' || date_trunc('second', p_run.last_delivered_at), '')
                           else '' end
                      || coalesce(': ' || (p_run.note ->> 'error'), '');
begin
    o_state := _pgqueue.shown_state(p_run.state, p_run.not_visible_until);
    o_until := p_run.not_visible_until;
    if o_state = 'claimed' then
        o_because := format('held by %s; delivery %s of %s', _pgqueue.holder(p_run),
                            _pgqueue.counted_deliveries(p_run.deliver_count, p_run.note),
                            coalesce(case when p_run.reader is null then p_consumer.max_deliver_count::text end,
                                     'any number'));
        o_until := p_run.lease_until;
        return;
    elsif o_state = 'unfiltered' then
        o_because := case when p_consumer.filtered then 'taken, and not judged by the consumer''s filter yet'
                          else 'taken, and not yet known to be the newest of its key' end
            || ': claims do that before they deliver it';
    elsif o_state = 'delayed' then
        o_because := case when p_run.deliver_count > 0 then 'returned to be delivered later'
                          else 'sent to be delivered later' end
            || case when p_run.not_visible_until <= clock_timestamp()
                    then ', which is now: the next claim that finds too little ready makes it so' else '' end
            || v_history;
    end if;
    if (p_consumer.ordering <> 'none' and p_run.lane <> _pgqueue.lane_assigned())
       or (_pgqueue.is_keyed(p_consumer.profile) and o_state = 'waiting') then
        if v_key is null and p_consumer.ordering = 'stream' then
            v_key := 0;
        elsif v_key is null then
            execute format('select hashtextextended(key, 0) from pgqueue.messages_%s where seq = $1',
                           p_consumer.stream_id) into v_key using p_seq;
        end if;
        select b.o_because, b.o_until into v_behind, v_free from _pgqueue.busy_with(p_consumer, v_key, p_seq) b;
    end if;
    if o_state = 'waiting' then
        o_because := coalesce('behind ' || v_behind, 'its key is free: the next claim delivers it') || v_history;
        o_until := v_free;
    elsif o_state = 'ready' then
        select coalesce(sum(message_count), 0) into v_before
        from _pgqueue.unfinished(p_consumer.consumer_id)
        where state = 'ready'
          and (lane, place, first_seq) < (p_run.lane, p_run.place, p_run.first_seq);
        o_because := format('to be delivered, after %s before it',
                            _pgqueue.messages_of(v_before + _pgqueue.cardinality(_pgqueue.below(p_run.seqs, p_seq))))
            || coalesce('; but behind ' || v_behind, '') || v_history;
        o_until := v_free;
    end if;
    if p_consumer.paused then
        o_because := 'the consumer is paused; ' || o_because;
    end if;
end $$;

-- Explains a message that was published and that a consumer has not taken, or is done with: see explain_message.
create or replace function _pgqueue.explain_published(p_consumer pgqueue.consumers, p_publication pgqueue.publications,
                                                      p_seq bigint, out o_state text, out o_because text,
                                                      out o_until timestamptz)
language plpgsql stable as $$
declare
    v_cursor pgqueue.consumer_cursors := _pgqueue.cursor(p_consumer.consumer_id);
    v_in_gap boolean := _pgqueue.gap_ids(v_cursor) @> p_publication.publication_id;
    v_new    boolean := _pgqueue.new_ids(v_cursor) @> p_publication.publication_id;
    v_done   pgqueue.completed_messages;
begin
    if not _pgqueue.is_for(p_publication.consumers, p_consumer.consumer_id) then
        o_state := 'not for it';
        o_because := 'it was published to other consumers: '
            || coalesce((select string_agg(name, ', ' order by name) from pgqueue.consumers
                         where consumer_id = any (p_publication.consumers)), 'dropped ones');
    elsif v_new and not (v_in_gap and (_pgqueue.excluded(v_cursor) @> p_seq) is true) then
        o_state := 'new';
        o_because := case when p_consumer.paused then 'the consumer is paused; ' else '' end
            || format('published at %s, and not taken yet: ', date_trunc('second', p_publication.published_at))
            || case when v_in_gap
                    then 'it was not visible when the consumer looked, or is to be delivered again; '
                         'the next claim takes it'
                    when p_publication.publication_id = v_cursor.next_publication
                    then 'the next claim that finds too little ready takes it'
                    else format('up to %s publications before it are taken first',
                                p_publication.publication_id - v_cursor.next_publication) end;
        o_until := case when p_publication.deliver_at > clock_timestamp() then p_publication.deliver_at end;
    elsif p_consumer.filtered
        and _pgqueue.passing(p_consumer, int8multirange(int8range(p_seq, p_seq, '[]'))) = '{}' then
        o_state := 'filtered out';
        o_because := 'it does not pass the consumer''s filter';
    elsif (select seqs @> p_seq from pgqueue.skips where consumer_id = p_consumer.consumer_id) then
        o_state := 'skipped';
        o_because := 'the stream''s retention took it away before the consumer was done with it';
    else
        select * into v_done from _pgqueue.done_with(p_consumer, p_seq);
        o_state := case when v_done.done_at is null then 'done' else _pgqueue.end_of(v_done) end;
        o_because := case when v_done.done_at is null
                          then 'acknowledged, cancelled or replaced; '
                               'or the consumer was made, or moved, to begin after it'
                          when o_state = 'replaced'
                          then format('replaced at %s by message %s, which is newer and of its key',
                                      date_trunc('second', v_done.done_at), v_done.result ->> 'replaced_by')
                          when o_state = 'cancelled'
                          then format('cancelled at %s by %s', date_trunc('second', v_done.done_at),
                                      coalesce(nullif(v_done.owner, ''), 'somebody'))
                          else format('acknowledged at %s by %s, who had it since %s',
                                      date_trunc('second', v_done.done_at),
                                      coalesce(nullif(v_done.owner, ''), 'a worker'),
                                          date_trunc('second', v_done.claimed_at)) end;
    end if;
end $$;

-- Explains a message that is in no publication: see explain_message.
create or replace function _pgqueue.explain_unpublished(p_consumer pgqueue.consumers, p_seq bigint, out o_state text,
                                                        out o_because text)
language plpgsql stable as $$
declare
    v_last    bigint := _pgqueue.last_seq(p_consumer.stream_id);
    v_stored  boolean;
    v_trimmed record := _pgqueue.trimmed(p_consumer.stream_id);
    v_staged  pgqueue.staged_chunks;
    v_skipped boolean := (select seqs @> p_seq from pgqueue.skips where consumer_id = p_consumer.consumer_id);
begin
    execute format('select exists (select from pgqueue.messages_%s where seq = $1)', p_consumer.stream_id)
        into v_stored using p_seq;
    if p_seq > v_last then
        o_state := 'unknown';
        o_because := case v_last when 0 then 'no message was sent yet'
                          else format('no message has this number yet: the last one given out is %s', v_last) end;
    elsif v_trimmed.o_seqs @> p_seq then
        o_state := case when v_skipped then 'skipped' else 'trimmed' end;
        o_because := case when v_skipped
                          then 'the stream''s retention took it away before the consumer was done with it'
                          else 'the stream''s retention took it away, when no consumer needed it any more; '
                               'or the number was passed over' end;
    elsif v_stored then
        select * into v_staged from pgqueue.staged_chunks
        where stream_id = p_consumer.stream_id and seqs @> p_seq limit 1;
        o_state := 'unpublished';
        o_because := case when v_staged.staged_id is null then 'it is written, and nobody published it'
                          else format('written at %s for batch %s of sink %s, which is not published',
                                      date_trunc('second', v_staged.staged_at), v_staged.batch, v_staged.sink) end;
    else
        o_state := 'unknown';
        o_because := 'the number was given out, and no message is to be seen that has it: its transaction '
            || case when _pgqueue.writers(p_consumer.stream_id) <@ _pgqueue.own_ids() then 'was rolled back'
                    else 'is running, or was rolled back' end;
    end if;
end $$;

-- Explains why a message is where it is, for one consumer.
-- For people: it may read all that the consumer has taken, and its dead letters, so do not call it every second.
-- Returns one row:
--   state    as in message_states: new, unfiltered, ready, delayed, waiting, claimed, dead; or
--            unknown       no message has the number, or its transaction runs or was rolled back
--            unpublished   written, and not visible
--            not for it    published to other consumers only
--            filtered out  it does not pass the consumer's filter
--            skipped, trimmed  its stream's retention took it away, before or after the consumer was done
--            cancelled     taken from the consumer by cancel, while it has keep_history
--            done          acknowledged, or cancelled; or from before the consumer's beginning
--   because  what it waits for, who has it, what happened to it
--   until    when that ends by itself, at the latest for a lease, at the earliest for a delay; null: not by time
-- Errors: PQ001, PQ002, PQ003. Locks: none.
create or replace function pgqueue.explain_message(p_stream text, p_consumer text, p_seq bigint)
returns table (state text, because text, until timestamptz)
language plpgsql stable as $$
declare
    v_consumer    pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
    v_run         record;
    v_dead        pgqueue.dead_messages;
    v_publication pgqueue.publications;
begin
    if (p_seq >= 1) is not true then
        raise exception 'p_seq is the number of a message, from 1 on, not %', coalesce(p_seq::text, 'null')
            using errcode = 'PQ003', column = 'p_seq';
    end if;
    select * into v_run from _pgqueue.unfinished(v_consumer.consumer_id) where seqs @> p_seq;
    if found then
        return query select e.o_state, e.o_because, e.o_until from _pgqueue.explain_run(v_consumer, v_run, p_seq) e;
        return;
    end if;
    select * into v_dead from pgqueue.dead_messages
    where consumer_id = v_consumer.consumer_id and seqs @> p_seq limit 1;
    if found then
        return query select 'dead',
                            format('%s; %s%s, dead since %s%s', coalesce(v_dead.reason, 'for no reason that was given'),
                                   _pgqueue.deliveries_of(v_dead.deliver_count),
                                   coalesce(', last to ' || nullif(v_dead.owner, ''), ''),
                                   date_trunc('second', v_dead.died_at),
                                   coalesce(': ' || (v_dead.note ->> 'error'), '')),
                            null::timestamptz;
        return;
    end if;
    select * into v_publication from _pgqueue.publication_of(v_consumer.stream_id, p_seq);
    if found then
        return query select e.o_state, e.o_because, e.o_until
                     from _pgqueue.explain_published(v_consumer, v_publication, p_seq) e;
    else
        return query select e.o_state, e.o_because, null::timestamptz
                     from _pgqueue.explain_unpublished(v_consumer, p_seq) e;
    end if;
end $$;

-- Shows the keys that a consumer is busy with, first those of which it holds most.
-- Of a hot key, the other messages wait. Messages in the line, and new ones, are of no key yet, because nobody has
-- looked at their keys; except for a consumer with per_key_capacity. It reads 100,000 bundles, as many entries of
-- per_key_capacity, and 10,000 messages in claims at most, so do not call it every second.
--   p_max  keys at most
-- Returns per key, null for messages without one:
--   waiting     messages behind another message of their key
--   delayed     messages that are to be delivered later
--   in_flight   messages in claims
--   first_seq   the first of all these
--   unfinished  all that the consumer is not done with, new messages too: with per_key_capacity; else null
--   until       when the first of its delays ends; else when the last of its leases does
-- Errors: PQ001, PQ002; PQ003; PQ006 for ordering=stream. Locks: none.
-- (More than 60 lines: one statement, and so one snapshot.)
create or replace function pgqueue.key_stats(p_stream text, p_consumer text, p_max int default 100)
returns table (key text, waiting bigint, delayed bigint, in_flight bigint, first_seq bigint, until timestamptz,
               unfinished bigint)
language plpgsql stable as $$
#variable_conflict use_column
declare
    v_consumer pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
begin
    if (p_max >= 1) is not true then
        raise exception 'p_max is at least 1, not %', coalesce(p_max::text, 'null')
            using errcode = 'PQ003', column = 'p_max';
    elsif v_consumer.ordering = 'stream' then
        raise exception '% has ordering=stream: all its messages are as of one key', quote_literal(p_consumer)
            using errcode = 'PQ006', hint = 'Look at consumer_stats.';
    end if;
    return query execute format($q$
        with aside as (
            select _pgqueue.shown_state(r.state, r.not_visible_until) = 'delayed' as later, r.key,
                   r.message_count, r.first_seq, r.not_visible_until
            from (select * from _pgqueue.unfinished($1)
                  where state in ('delayed', 'waiting') and key is not null limit 100000) r
        ), hashed as (
            select key, sum(message_count) filter (where not later) as waiting,
                   sum(message_count) filter (where later) as delayed, min(first_seq) as first_seq,
                   min(not_visible_until) filter (where later) as due
            from aside group by key
        ), held as (
            select m.key, m.seq, h.lease_until
            from (select r.lease_until, g
                  from _pgqueue.unfinished($1) r cross join lateral unnest(r.seqs) g where r.state = 'claimed') h
            cross join lateral (select seq, key from pgqueue.messages_%1$s where seq >= lower(h.g) and seq < upper(h.g)
                                order by seq) m
            limit 10000
        ), entered as (
            select array_agg(key) as keys
            from (select key from (select key from pgqueue.key_backlog where consumer_id = $1 limit 100000) b
                  group by key order by count(*) desc limit $2) e
        ), unfinished as (
            select m.key, _pgqueue.cardinality(j.owed) as unfinished, lower(j.owed) as first_seq
            from entered e cross join lateral _pgqueue.owed_of_keys($3, e.keys, false) j
            left join lateral (select key from pgqueue.messages_%1$s where seq = lower(j.owed)) m on true
            where j.owed <> '{}'
        ), any_key as (
            select m.key, h.waiting, h.delayed, 0::bigint as in_flight, h.first_seq, h.due,
                   null::timestamptz as lease_until, null::bigint as unfinished
            from hashed h left join lateral (select key from pgqueue.messages_%1$s where seq = h.first_seq) m on true
            union all
            select key, 0, 0, count(*), min(seq), null, max(lease_until), null from held group by key
            union all
            select key, 0, 0, 0, first_seq, null, null, unfinished from unfinished
        )
        select key, coalesce(sum(waiting), 0)::bigint, coalesce(sum(delayed), 0)::bigint, sum(in_flight)::bigint,
               min(first_seq),
               coalesce(min(due), max(lease_until)), max(unfinished)
        from any_key
        group by key
        order by greatest(coalesce(sum(waiting), 0) + coalesce(sum(delayed), 0) + sum(in_flight), max(unfinished)) desc,
                 min(first_seq)
        limit $2 $q$, v_consumer.stream_id)
    using v_consumer.consumer_id, p_max, v_consumer;
end $$;
