-- Tokens of keys, for consumers with per_key_interval. A key has per_key_burst tokens. A claim that delivers n messages
-- of a key spends n of them, and they come back after per_key_interval. While a key has no token left, its messages
-- wait (queue/key_limits.sql). Spent tokens are rows of key_tokens, so they last over restarts.
--
-- They are spent with the consumer's lock, which every claim of a consumer with a rate has. So none comes back before
-- the cursor's tokens_from; and where that is null none is spent, and nothing asks the table.

-- Spends the tokens of the messages that a claim got since p_since. Returns the cursor. Needs the consumer's lock.
create or replace function _pgqueue.spend_tokens(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                 p_claim_id bigint, p_since timestamptz)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_until  timestamptz := clock_timestamp() + p_consumer.per_key_interval;
    v_runs   pgqueue.consumer_messages[] := array(
        select m from pgqueue.consumer_messages m
        where claim_id = p_claim_id and state = 'claimed' and last_delivered_at >= p_since);
    v_single record := _pgqueue.single_messages(p_consumer, v_runs);
begin
    -- messages that wait of a key come after those that are delivered of it
    insert into pgqueue.key_tokens (consumer_id, key, spent, returns_at, arrival_no, first_seq)
    select p_consumer.consumer_id, k.key, count(*), v_until,
           case p_consumer.ordering when 'none' then 0 else min(r.arrival_no) end,
           case p_consumer.ordering when 'none' then 0 else min(k.seq) end
    from unnest(v_single.o_run_nos, v_single.o_keys, v_single.o_seqs) k (run_no, key, seq)
    join (select ordinality as run_no, arrival_no from unnest(v_runs) with ordinality) r using (run_no)
    where k.key is not null
    group by k.key;
    if found then
        p_cursor.tokens_from := least(p_cursor.tokens_from, v_until);
    end if;
    return p_cursor;
end $$;

-- Gives back the spent tokens that are due, a bounded number, and notes their keys as free. Returns the cursor. Needs
-- the consumer's lock.
create or replace function _pgqueue.return_tokens(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors)
returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_now   timestamptz := clock_timestamp();
    v_freed pgqueue.waiting_place[];
    v_last  timestamptz;
begin
    if (p_cursor.tokens_from <= v_now) is not true then
        return p_cursor;
    end if;
    with due as (
        select ctid from pgqueue.key_tokens
        where consumer_id = p_consumer.consumer_id and returns_at >= p_cursor.tokens_from and returns_at <= v_now
        order by returns_at limit _pgqueue.limit_due()
    ), returned as (
        delete from pgqueue.key_tokens t using due where t.ctid = due.ctid
        returning t.key, t.arrival_no, t.first_seq, t.returns_at
    )
    select array_agg((key, arrival_no, first_seq)::pgqueue.waiting_place), max(last)
    into v_freed, v_last
    from (select key, min(arrival_no) as arrival_no, min(first_seq) as first_seq, max(returns_at) as last
          from returned group by key) k;
    p_cursor := _pgqueue.note_freed(p_cursor, v_freed);
    p_cursor.tokens_from := (select returns_at from pgqueue.key_tokens
                             where consumer_id = p_consumer.consumer_id
                               and returns_at >= coalesce(v_last, p_cursor.tokens_from)
                             order by returns_at limit 1);
    return p_cursor;
end $$;
