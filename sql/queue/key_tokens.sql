-- Tokens of keys, for consumers with per_key_interval. A key has per_key_burst tokens. A claim that delivers n messages
-- of a key spends n of them, and they come back after per_key_interval. While a key has no token left, its messages
-- wait: the first of them is due when a token comes back (queue/key_limits.sql: gate()). Spent tokens are rows of
-- key_tokens, so they last over restarts. They are spent with the consumer's lock, which every claim of such a consumer
-- has.

-- Spends the tokens of the messages of a claim that was just made, and forgets some that have come back. Returns the
-- hints. Needs the consumer's lock.
create or replace function _pgqueue.spend_tokens(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                 p_bundles pgqueue.consumer_messages[])
returns pgqueue.claim_hints
language plpgsql
as $$
declare
    v_keyed pgqueue.keyed_messages := _pgqueue.by_key(p_consumer, p_bundles);
    v_now   timestamptz := clock_timestamp();
    v_back  record;
begin
    insert into pgqueue.key_tokens (consumer_id, key, spent, returns_at)
    select p_consumer.consumer_id, k.key, sum(k.n), v_now + p_consumer.per_key_interval
    from unnest(v_keyed.keys, v_keyed.counts) k (key, n)
    where k.key is not null
    group by k.key;
    with back as (
        delete from pgqueue.key_tokens
        where ctid = any (array(select ctid from pgqueue.key_tokens
                                where consumer_id = p_consumer.consumer_id and returns_at >= p_hints.tokens_from
                                  and returns_at <= v_now
                                order by returns_at limit _pgqueue.limit_due()))
        returning returns_at
    )
    select max(returns_at) as last, count(*) as n into v_back from back;
    p_hints.tokens_from := case when v_back.n < _pgqueue.limit_due() then v_now else v_back.last end;
    return p_hints;
end $$;
