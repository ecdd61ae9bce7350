-- The tokens of keys, for consumers with per_key_interval. A key has per_key_burst tokens. A claim that delivers n
-- messages of a key spends n of them, and they come back after per_key_interval. While a key has no token, its messages
-- wait: the first is due when a token comes back (queue/keys/key_limits.sql: apply_key_limits()). Tokens are spent with
-- the consumer's lock, which each claim of such a consumer needs.

-- Spent tokens. As rows of a table, they survive restarts.
-- on drop_consumer
create table if not exists pgqueue.key_tokens (
    consumer_id int         not null,
    key         bigint      not null,  -- the hash of the key
    spent       bigint      not null,  -- how many messages of the key a claim delivered
    returns_at  timestamptz not null   -- when the tokens come back
);

-- Deletes tokens that have come back for consumers whose claims no longer spend any, at most limit_deleted() for each
-- consumer. Locks: these consumers; it skips those that others hold.
create or replace function _pgqueue.maintain_tokens() returns void
language plpgsql as $$
declare
    v_id int;
begin
    for v_id in
        select c.consumer_id from pgqueue.consumers c
        cross join lateral (select from pgqueue.key_tokens t
                            where t.consumer_id = c.consumer_id and t.returns_at <= clock_timestamp() limit 1) t
        order by c.consumer_id
    loop
        perform _pgqueue.delete_tokens(v_id, '-infinity', clock_timestamp(), _pgqueue.limit_deleted())
        where _pgqueue.try_lock_consumer(v_id);
    end loop;
end $$;

-- Deletes tokens of a consumer that came back between two times, at most p_most. Returns the time up to which all are
-- deleted. Needs the consumer's lock.
create or replace function _pgqueue.delete_tokens(p_consumer_id int, p_from timestamptz, p_upto timestamptz, p_most int)
returns timestamptz language sql as $$
    with back as (
        delete from pgqueue.key_tokens
        where ctid = any (array(select ctid from pgqueue.key_tokens
                                where consumer_id = p_consumer_id and returns_at >= p_from and returns_at <= p_upto
                                order by returns_at limit p_most))
        returning returns_at
    )
    select case when count(*) < p_most then p_upto else max(returns_at) end from back
$$;

-- Spends tokens for the messages of a claim that was just made, and deletes some that have come back. Returns the
-- hints. Needs the consumer's lock.
create or replace function _pgqueue.spend_tokens(p_consumer pgqueue.consumers, p_hints pgqueue.claim_hints,
                                                 p_bundles pgqueue.consumer_messages[]) returns pgqueue.claim_hints
language plpgsql as $$
declare
    v_keyed pgqueue.keyed_messages := _pgqueue.by_key(p_consumer, p_bundles);
    v_now   timestamptz := clock_timestamp();
begin
    insert into pgqueue.key_tokens (consumer_id, key, spent, returns_at)
    select p_consumer.consumer_id, k.key, sum(k.n), v_now + p_consumer.per_key_interval
    from unnest(v_keyed.keys, v_keyed.counts) k (key, n)
    where k.key is not null
    group by k.key;
    p_hints.tokens_from := _pgqueue.delete_tokens(p_consumer.consumer_id, p_hints.tokens_from, v_now,
                                                  _pgqueue.limit_due());
    return p_hints;
end $$;
