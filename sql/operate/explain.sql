-- Explaining: the state of a message and its reason, and the backlog of keys.

-- A number of deliveries, as text.
create or replace function _pgqueue.deliveries_of(p_count int) returns text
language sql immutable parallel safe as $$
    select case p_count when 1 then 'delivered once' else 'delivered ' || p_count || ' times' end
$$;

-- The owner of a claim, as text.
--   p_found  messages that it holds, a row of unfinished()
create or replace function _pgqueue.claim_owner(p_found record) returns text
language plpgsql stable as $$
begin
    return format('%s since %s (claim %s of %s)%s',
                  case when p_found.reader is null then coalesce(nullif(p_found.owner, ''), 'a worker')
                       else 'the Spark query ' || coalesce((select query_id from pgqueue.readers
                                                            where reader = p_found.reader),
                                                           'of reader ' || p_found.reader) end,
                  date_trunc('second', p_found.claimed_at), p_found.claim_id,
                  _pgqueue.counted(p_found.claim_count, 'message'),
                  case when p_found.lease_until <= clock_timestamp()
                       then '; the lease has expired: the next claim that needs messages takes them over' end);
end $$;

-- What blocks the messages of a key, in an ordered consumer.
--   p_key  its hash
--   p_seq  a waiting message; messages after it do not block it
-- Returns the reason, and the earliest end; nulls if the key is free.
create or replace function _pgqueue.blocked_by(p_consumer pgqueue.consumers, p_key bigint, p_seq bigint,
                                               out o_because text, out o_until timestamptz)
language plpgsql stable as $$
begin
    select format('the rate limit of its key: %s delivered within %s', sum(spent), p_consumer.per_key_interval),
           min(returns_at)
    into o_because, o_until
    from pgqueue.key_tokens
    where consumer_id = p_consumer.consumer_id and key = p_key and returns_at > clock_timestamp()
      and p_consumer.per_key_interval is not null
    having sum(spent) >= p_consumer.per_key_burst;
    if o_because is null then
        execute format($q$
            select case when u.all_keys then 'a claim of all keys' else 'messages of its key' end
                       || case when b.claim_id is null then ', not claimed yet'
                               else ', held by ' || _pgqueue.claim_owner(b) end, b.lease_until
            from _pgqueue.unfinished($1) b join _pgqueue.users_of($1, $2) u on u.bundle_no = b.bundle_no
            where not b.seqs @> $3
              and exists (select from unnest(b.seqs) g cross join lateral (
                              select from pgqueue.messages_%s m
                              where seq >= lower(g) and seq < upper(g) and %s = $2 offset 0) m)
            order by b.state <> 'claimed', b.arrival_no, b.first_seq limit 1
            $q$, p_consumer.stream_id, _pgqueue.key_of(p_consumer))
        into o_because, o_until using p_consumer.consumer_id, p_key, p_seq;
    end if;
    if o_because is null then
        select format('message %s of its key, which %s%s', first_seq,
                      case when not_visible_until > clock_timestamp() then 'is delayed' else 'is waiting itself' end,
                      ': ' || (note ->> 'error')), not_visible_until
        into o_because, o_until
        from _pgqueue.unfinished(p_consumer.consumer_id)
        where state in ('delayed', 'waiting') and key = p_key and first_seq < p_seq and not seqs @> p_seq
        order by state <> 'delayed', arrival_no, first_seq limit 1;
    end if;
end $$;

-- The sessions that have held a consumer's lock for longer than calls do, so that claims may find nothing, as part of
-- an explanation. Null: there are none. (Sessions of other roles count always: their times are hidden.)
create or replace function _pgqueue.locked_by(p_consumer_id int) returns text
language sql stable as $$
    select 'the consumer is locked by ' || _pgqueue.holders(_pgqueue.lock_class_consumer(), p_consumer_id)
           || coalesce(', in a transaction since ' || date_trunc('second', min(a.xact_start)), '')
    from _pgqueue.advisory_locks(_pgqueue.lock_class_consumer(), p_consumer_id) l
    left join pg_stat_activity a on a.pid = l.pid
    where l.granted and l.pid is distinct from pg_backend_pid()
      and (a.xact_start > clock_timestamp() - interval '2 s') is not true
    having count(*) > 0
$$;

-- Explains a message that a consumer has taken and not finished; see explain_message.
--   p_found  the row of unfinished() that has the message
create or replace function _pgqueue.explain_unfinished(p_consumer pgqueue.consumers, p_found record, p_seq bigint,
                                                       out o_state text, out o_because text, out o_until timestamptz)
language plpgsql stable as $$
declare
    v_key     bigint := p_found.key;
    v_behind  text;
    v_free    timestamptz;  -- when its key is free: the latest or the earliest time
    v_history text := concat(case when p_found.deliver_count > 0
                                  then concat('; ', _pgqueue.deliveries_of(p_found.deliver_count),
                                              ', last at ' || date_trunc('second', p_found.last_delivered_at)) end,
                             ': ' || (p_found.note ->> 'error'));
begin
    o_state := _pgqueue.shown_state(p_found.state, p_found.not_visible_until);
    if o_state = 'claimed' then
        o_because := format('held by %s; delivery %s %s', _pgqueue.claim_owner(p_found),
                            _pgqueue.counted_deliveries(p_found.deliver_count, p_found.note),
                            coalesce('of ' || case when p_found.reader is null then p_consumer.max_deliver_count end,
                                     '(no limit)'));
        o_until := p_found.lease_until;
        return;
    end if;
    if (p_consumer.ordering <> 'none' and p_found.lane <> _pgqueue.lane_assigned())
       or (_pgqueue.is_keyed(p_consumer.profile) and o_state = 'waiting') then
        if v_key is null then
            execute format('select %s from pgqueue.messages_%s m where seq = $1', _pgqueue.key_of(p_consumer),
                           p_consumer.stream_id) into v_key using p_seq;
        end if;
        select b.o_because, b.o_until into v_behind, v_free from _pgqueue.blocked_by(p_consumer, v_key, p_seq) b;
    end if;
    o_until := case when o_state in ('waiting', 'ready') then v_free
                    when p_found.lane = _pgqueue.lane_delayed() then _pgqueue.time_of(p_found.place)
                    else p_found.not_visible_until end;
    o_because := case when p_consumer.paused then 'the consumer is paused; ' else '' end || case o_state
        when 'unfiltered' then format('not yet %s; claims do that before they deliver it',
                                      case when p_consumer.filtered then 'checked against the consumer''s filter'
                                           else 'compared with newer messages of its key' end)
        when 'delayed' then format('%s with a delay%s%s',
                                   case when p_found.deliver_count > 0 then 'returned' else 'sent' end,
                                   case when p_found.not_visible_until <= clock_timestamp() then ', which has passed: '
                                        'the next claim that finds too few ready messages delivers it' end, v_history)
        when 'waiting' then coalesce('behind ' || v_behind, 'its key is free: the next claim delivers it') || v_history
        else format('ready, with %s ahead of it%s%s', _pgqueue.counted(
                        (select coalesce(sum(message_count), 0)::bigint from _pgqueue.unfinished(p_consumer.consumer_id)
                         where state = 'ready'
                           and (lane, place, first_seq) < (p_found.lane, p_found.place, p_found.first_seq))
                        + _pgqueue.cardinality(_pgqueue.below(p_found.seqs, p_seq)), 'message'),
                    '; but blocked behind ' || v_behind, v_history) end;
end $$;

-- Explains a published message that a consumer has not taken, or has finished; see explain_message.
create or replace function _pgqueue.explain_published(p_consumer pgqueue.consumers, p_publication pgqueue.publications,
                                                      p_seq bigint, out o_state text, out o_because text,
                                                      out o_until timestamptz)
language plpgsql stable as $$
declare
    v_cursor pgqueue.consumer_cursors := _pgqueue.cursor(p_consumer.consumer_id);
    v_in_gap boolean := _pgqueue.gap_ids(v_cursor) @> p_publication.publication_id;
begin
    if not _pgqueue.is_for(p_publication.consumers, p_consumer.consumer_id) then
        o_state := 'not for it';
        o_because := 'it was published to other consumers: '
            || coalesce(array_to_string(nullif(_pgqueue.consumer_names(p_publication.consumers), '{}'), ', '),
                        'dropped consumers');
    elsif _pgqueue.new_ids(v_cursor) @> p_publication.publication_id
        and not (v_in_gap and (_pgqueue.excluded(v_cursor) @> p_seq) is true) then
        o_state := 'new';
        o_because := case when p_consumer.paused then 'the consumer is paused; ' else '' end
            || format('published at %s, and not claimed yet: ', date_trunc('second', p_publication.published_at))
            || case when v_in_gap
                    then 'it became visible after later publications were claimed, or is to be delivered again; '
                         'the next claim delivers it'
                    when p_publication.publication_id = v_cursor.next_publication
                    then 'the next claim that finds too few ready messages delivers it'
                    else format('up to %s ahead of it', _pgqueue.counted(
                                p_publication.publication_id - v_cursor.next_publication, 'publication')) end;
        o_until := case when p_publication.deliver_at > clock_timestamp() then p_publication.deliver_at end;
    elsif p_consumer.filtered
        and _pgqueue.passing(p_consumer, int8multirange(int8range(p_seq, p_seq, '[]'))) = '{}' then
        o_state := 'filtered out';
        o_because := 'it does not match the consumer''s filter';
    elsif (select seqs @> p_seq from pgqueue.skips where consumer_id = p_consumer.consumer_id) then
        o_state := 'skipped';
        o_because := 'the stream''s retention removed it before the consumer had finished it';
    else
        select _pgqueue.end_of(d), case _pgqueue.end_of(d)
                   when 'replaced' then format('replaced at %s by message %s, a newer one of the same key',
                                               date_trunc('second', d.done_at), d.result ->> 'replaced_by')
                   when 'cancelled' then format('cancelled at %s by %s', date_trunc('second', d.done_at),
                                                coalesce(nullif(d.owner, ''), 'an unnamed session'))
                   else format('acknowledged at %s by %s, claimed at %s', date_trunc('second', d.done_at),
                               coalesce(nullif(d.owner, ''), 'a worker'), date_trunc('second', d.claimed_at)) end
        into o_state, o_because
        from _pgqueue.done_with(p_consumer, p_seq) d;
        o_state := coalesce(o_state, 'done');
        o_because := coalesce(o_because, 'acknowledged, cancelled or replaced; '
                                         'or the consumer was created, or moved, to a position after it');
    end if;
end $$;

-- Explains a message that is in no publication; see explain_message.
create or replace function _pgqueue.explain_unpublished(p_consumer pgqueue.consumers, p_seq bigint, out o_state text,
                                                        out o_because text)
language plpgsql stable as $$
declare
    v_last   bigint := _pgqueue.last_seq(p_consumer.stream_id);
    v_staged pgqueue.staged_chunks;
begin
    o_state := 'unknown';
    if p_seq > v_last then
        o_because := case v_last when 0 then 'no message has been sent yet'
                          else format('no message has this number yet: the last one is %s', v_last) end;
    elsif (_pgqueue.trimmed(p_consumer.stream_id)).o_seqs @> p_seq then
        o_state := case when (select seqs @> p_seq from pgqueue.skips where consumer_id = p_consumer.consumer_id)
                        then 'skipped' else 'trimmed' end;
        o_because := 'the stream''s retention removed it' || case o_state
            when 'skipped' then ' before the consumer had finished it'
            else ', when no consumer needed it any more; or the number was not used' end;
    elsif _pgqueue.sent_at(p_consumer.stream_id, p_seq) is not null then
        select * into v_staged from pgqueue.staged_chunks
        where stream_id = p_consumer.stream_id and seqs @> p_seq limit 1;
        o_state := 'unpublished';
        o_because := case when v_staged.staged_id is null then 'it is written, but not published'
                          else format('written at %s for batch %s of sink %s, which is not published yet',
                                      date_trunc('second', v_staged.staged_at), v_staged.batch, v_staged.sink) end;
    else
        o_because := 'the number is assigned, but no visible message has it: its transaction '
            || case when _pgqueue.writers(p_consumer.stream_id) <@ _pgqueue.own_ids() then 'was rolled back'
                    else 'is running, or was rolled back' end;
    end if;
end $$;

-- Explains the state of a message for one consumer.
-- For interactive use: it may read all bundles and dead letters of the consumer, so do not poll it. Returns one
-- row:
--   state    as in message_states: new, unfiltered, ready, delayed, waiting, claimed, dead; or
--            unknown       no message has the number, or its transaction is open or was rolled back
--            unpublished   written, and not visible
--            not for it    published to other consumers only
--            filtered out  it does not match the consumer's filter
--            skipped, trimmed  its stream's retention removed it, before or after the consumer had finished it
--            cancelled     removed by cancel, if the consumer has keep_history
--            done          acknowledged, or cancelled; or older than the consumer's start
--   because  the reason: what it waits for, which worker holds it, or what happened to it
--   until    when this state ends: for a lease the latest time, for a delay the earliest; null: at no set time
-- Errors: PQ001, PQ002, PQ003. Locks: none.
create or replace function pgqueue.explain_message(p_stream text, p_consumer text, p_seq bigint)
returns table (state text, because text, until timestamptz)
language plpgsql stable as $$
declare
    v_consumer    pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
    v_found       record;
    v_publication pgqueue.publications;
begin
    perform _pgqueue.check_number('p_seq', p_seq, 1, 9223372036854775807);
    select * into v_found from _pgqueue.unfinished(v_consumer.consumer_id) where seqs @> p_seq;
    if found then
        return query
            select o_state, concat(o_because, case when o_state <> 'claimed'
                                                   then '; ' || _pgqueue.locked_by(v_consumer.consumer_id) end), o_until
            from _pgqueue.explain_unfinished(v_consumer, v_found, p_seq);
    else
        return query
            select 'dead', format('%s; %s%s, dead-lettered at %s%s', coalesce(reason, 'no reason given'),
                                  _pgqueue.deliveries_of(deliver_count), ', last to ' || nullif(owner, ''),
                                  date_trunc('second', died_at), ': ' || (note ->> 'error')), null::timestamptz
            from pgqueue.dead_messages where consumer_id = v_consumer.consumer_id and seqs @> p_seq limit 1;
    end if;
    if found then
        return;
    end if;
    select * into v_publication from _pgqueue.publication_of(v_consumer.stream_id, p_seq);
    if found then
        return query
            select o_state, concat(o_because, case when o_state = 'new'
                                                   then '; ' || _pgqueue.locked_by(v_consumer.consumer_id) end), o_until
            from _pgqueue.explain_published(v_consumer, v_publication, p_seq);
    else
        return query select *, null::timestamptz from _pgqueue.explain_unpublished(v_consumer, p_seq);
    end if;
end $$;

-- Shows the keys with unfinished messages of a consumer, ordered by the number of messages.
-- Unassigned and new messages are not counted, because their keys are not known yet, except for a consumer with
-- per_key_capacity. The call reads at most 100,000 bundles, as many entries of per_key_capacity, and 10,000 messages in
-- claims, so do not poll it.
--   p_max  the maximum number of keys
-- Returns per key, null for messages without one:
--   waiting     messages behind another message of their key
--   delayed     delayed messages
--   in_flight   messages in claims
--   first_seq   the first of all these
--   unfinished  all unfinished messages, including new ones, with per_key_capacity; else null
--   until       when the first of its delays ends; else when the last of its leases ends
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
    perform _pgqueue.check_number('p_max', p_max, 1, 2147483647);
    if v_consumer.ordering = 'stream' then
        raise exception '% has ordering=stream: all its messages have one key', quote_literal(p_consumer)
            using errcode = 'PQ006', hint = 'Query the view consumer_stats.';
    end if;
    return query execute format($q$
        with hashed as (
            select key, sum(message_count) filter (where not later) as waiting,
                   sum(message_count) filter (where later) as delayed, min(first_seq) as first_seq,
                   min(not_visible_until) filter (where later) as due
            from (select *, _pgqueue.shown_state(state, not_visible_until) = 'delayed' as later
                  from _pgqueue.unfinished($1)
                  where state in ('delayed', 'waiting') and key is not null limit 100000) m
            group by key
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
            select m.key, _pgqueue.cardinality(j.unfinished) as unfinished, lower(j.unfinished) as first_seq
            from entered e cross join lateral _pgqueue.unfinished_by_key($3, e.keys, false) j
            left join lateral (select key from pgqueue.messages_%1$s where seq = lower(j.unfinished)) m on true
            where j.unfinished <> '{}'
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
               min(first_seq), coalesce(min(due), max(lease_until)), max(unfinished)
        from any_key
        group by key
        order by greatest(coalesce(sum(waiting), 0) + coalesce(sum(delayed), 0) + sum(in_flight), max(unfinished)) desc,
                 min(first_seq)
        limit $2 $q$, v_consumer.stream_id)
    using v_consumer.consumer_id, p_max, v_consumer;
end $$;
