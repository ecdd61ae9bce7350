-- Limits of keys: how many messages of a key may be in flight (per_key_limit), how many are delivered in a time
-- (per_key_interval, per_key_burst), and keys in turns (fair). Consumers with ordering=key may have them, and consumers
-- with ordering=none, which then are dealt in the same way.
--
-- The dealer keeps the limits. Before it makes pieces it judges the messages that it looked at (within_limits(); with
-- ordering=none queue/singles.sql: deal_singly()). What each key may have now is dealt. The rest is set aside, like
-- messages whose key is in an open piece, and waits until the dealer is told that the key may have more. That happens
-- when
--   * a piece of the key is closed. With ordering=key a key is in one piece, so that is all. With ordering=none a key
--     may be in several pieces, whose keys are listed once for each message. Where no message in flight counts, such a
--     piece is closed when it is claimed; otherwise the dealer notes that it is claimed;
--   * tokens of the key come back (queue/key_tokens.sql);
--   * with ordering=none, more messages of the key wait and nothing holds them up. Then the dealer notes the key as
--     free, and the next dealer goes on with it.
-- Keys take turns because pieces do: messages that become free are dealt behind the pieces that are ready. With fair,
-- the pieces that are ready hold about the share of four claims of a key, so the rest of a key with very many messages
-- is set aside. A message without a key has no limit, and holds no other message up.

-- Splits messages by key into those that may be dealt now, as many as the limits leave to each key, and those that are
-- held: for consumers with ordering=key. It is one statement, so that everything is counted once. Needs the consumer's
-- lock.
--   p_size  messages of a piece
--   p_now   messages that are not visible at that time are left as they are
create or replace function _pgqueue.within_limits(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                  p_keyed pgqueue.keyed_messages, p_size bigint, p_now timestamptz)
returns pgqueue.keyed_messages
language plpgsql
as $$
declare
    v_burst int := case when p_consumer.per_key_interval is not null then p_consumer.per_key_burst end;
    v_share bigint := case when p_consumer.fair then greatest(1, ceil(
        4.0 * p_size / greatest(1, (select count(distinct k) from unnest(p_keyed.keys) k)))) end;
    v_keyed pgqueue.keyed_messages;
begin
    v_keyed.runs := p_keyed.runs;
    with source as materialized (
        select ordinality as run_no, not_visible_until > p_now as later
        from unnest(p_keyed.runs) with ordinality
    ), entry as materialized (
        select e.run_no, e.key, e.seqs, e.message_count, e.i,
               -- a message that is not visible yet will come again; it waits too where tokens are spent
               e.key is null or (s.later is true and v_burst is null) as free
        from unnest(p_keyed.run_nos, p_keyed.keys, p_keyed.seqs, p_keyed.message_counts) with ordinality
             e (run_no, key, seqs, message_count, i)
        join source s using (run_no)
    ), room as materialized (
        select k.key, least(p_consumer.per_key_limit, v_burst - t.spent, v_share) as room
        from (select distinct key from entry where not free) k
        cross join lateral (select coalesce(sum(t.spent), 0) as spent from pgqueue.key_tokens t
                            where v_burst is not null and t.consumer_id = p_consumer.consumer_id and t.key = k.key
                              and t.returns_at >= p_cursor.tokens_from) t
    ), judged as (
        select e.*, case when e.free then e.message_count
                         else greatest(0, least(e.message_count,
                              r.room - sum(e.message_count) over (partition by e.key, e.free order by e.i)
                              + e.message_count)) end::bigint as dealt
        from entry e left join room r using (key)
    ), part as (
        select j.*, case when dealt = 0 then '{}'
                         when dealt < message_count then _pgqueue.below(seqs, _pgqueue.bound_of(seqs, dealt))
                         else seqs end as part
        from judged j
    ), split as (
        select i, run_no, key, part as seqs, dealt as message_count, false as held from part where dealt > 0
        union all
        select i, run_no, key, seqs - part, message_count - dealt, true from part where dealt < message_count
    )
    select array_agg(run_no order by i, held), array_agg(key order by i, held), array_agg(seqs order by i, held),
           array_agg(message_count order by i, held), array_agg(held order by i, held)
    into v_keyed.run_nos, v_keyed.keys, v_keyed.seqs, v_keyed.message_counts, v_keyed.held
    from split;
    return v_keyed;
end $$;

-- Lets the next dealers look at all keys that wait, because the limits of the consumer have changed. Where messages in
-- flight did not count before, it also notes them for the dealers. Locks: the consumer.
create or replace function _pgqueue.change_limits(p_consumer pgqueue.consumers) returns void
language plpgsql
as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_runs   pgqueue.consumer_messages[];
    v_single record;
begin
    perform _pgqueue.lock_consumer(p_consumer.consumer_id);
    perform _pgqueue.without_slots(p_consumer.consumer_id);
    select * into v_stored from pgqueue.consumer_cursors
    where consumer_id = p_consumer.consumer_id order by version desc limit 1;
    if not found then
        return;  -- the consumer is being created
    end if;
    if p_consumer.ordering = 'none' and p_consumer.per_key_limit is not null then
        v_runs := array(select jsonb_populate_record(null::pgqueue.consumer_messages, to_jsonb(m))
                        from _pgqueue.unfinished(p_consumer.consumer_id) m
                        where m.state = 'claimed'
                          and not exists (select from pgqueue.pieces p
                                          where p.consumer_id = p_consumer.consumer_id and p.piece = m.piece));
        v_single := _pgqueue.single_messages(p_consumer, v_runs);
        insert into pgqueue.pieces (consumer_id, place, piece, message_count, keys, arrival_no, first_seq, claimed)
        select p_consumer.consumer_id, v_stored.last_line_no, r.piece, count(*), array_remove(array_agg(k.key), null),
               0, 0, true
        from unnest(v_single.o_run_nos, v_single.o_keys) k (run_no, key)
        join (select ordinality as run_no, piece from unnest(v_runs) with ordinality) r using (run_no)
        group by r.piece;
    end if;
    v_cursor := v_stored;
    if p_consumer.per_key_interval is null then
        delete from pgqueue.key_tokens where consumer_id = p_consumer.consumer_id;
        v_cursor.tokens_from := null;
    end if;
    v_cursor := _pgqueue.note_freed(v_cursor, array(
        select (w.key, 0, 0)::pgqueue.waiting_place
        from (select distinct key from pgqueue.consumer_messages
              where consumer_id = p_consumer.consumer_id and state = 'waiting' and key is not null) w));
    perform _pgqueue.save_cursor(v_stored, v_cursor, true);
end $$;

-- Lets a consumer with ordering=none begin or cease to go by key: messages that it has taken and that no claim holds
-- move from its lanes to the line, or back.
-- Errors: PQ003 unless the consumer is paused, and nothing of it is claimed or being claimed. Locks: the consumer.
create or replace function _pgqueue.change_lanes(p_consumer pgqueue.consumers) returns void
language plpgsql
as $$
declare
    v_stored pgqueue.consumer_cursors := _pgqueue.own_consumer_and_slots(p_consumer.consumer_id);
begin
    if v_stored.consumer_id is null then
        return;  -- the consumer is being created
    end if;
    perform _pgqueue.check_idle(p_consumer, 'a consumer with ordering=none begins or ceases to go by key (fair, '
                                            'per_key_limit, per_key_interval)');
    if _pgqueue.is_keyed(p_consumer.way) then
        -- lock: run
        update pgqueue.consumer_messages set lane = 1, line_no = arrival_no
        where ctid = any (_pgqueue.unclaimed_places(p_consumer.consumer_id)) and state <> 'claimed';
    else
        update pgqueue.consumer_messages
        set lane = -priority, line_no = arrival_no, key = null, piece = null,
            state = case when state = 'unfiltered' then state
                         when not_visible_until > clock_timestamp() then 'delayed' else 'ready' end,
            not_visible_until = case when not_visible_until > clock_timestamp() or state = 'unfiltered'
                                     then not_visible_until end
        where ctid = any (_pgqueue.unclaimed_places(p_consumer.consumer_id)) and state <> 'claimed';
        delete from pgqueue.pieces where consumer_id = p_consumer.consumer_id;
        delete from pgqueue.freed_keys where consumer_id = p_consumer.consumer_id;
        delete from pgqueue.key_tokens where consumer_id = p_consumer.consumer_id;
    end if;
    perform _pgqueue.save_cursor(v_stored, _pgqueue.look_anew(v_stored), true);
end $$;
