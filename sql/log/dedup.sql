-- Deduplication: of messages with the same dedup key that are sent within the stream's dedup_window, only the first is
-- published.
--
-- A producer inserts the dedup key of a message before it publishes the message, in the same transaction: so the key
-- exists if and only if the message does. A producer that finds the key committed has a duplicate, and does not publish
-- it. A producer that finds the key uncommitted waits for that transaction, whose commit or rollback decides. In no
-- other case does a producer wait for another producer's transaction. A single statement inserts the keys in their
-- order, so that two batches cannot wait for each other.

-- The dedup keys of messages that were sent within the stream's dedup_window, or not long before, with the first
-- message of each key. The table has the keys, not hashes: two keys with the same hash would silently lose a message.
-- on clear_stream
create table if not exists pgqueue.dedup_keys (
    stream_id int         not null,
    dedup_key text        collate "C" not null,
    seq       bigint      not null,
    sent_at   timestamptz not null,
    primary key (stream_id, dedup_key)
);

-- Inserts the dedup key, not null, of a message that is about to be published. (delete_duplicates() for a single
-- message would take three times as long.)
--   p_seq  the new number of the message
-- Returns the number of the first message with this key: p_seq, or that of another message if this one is a duplicate.
-- Errors: PQ003. Locks: the key. It waits for an open transaction that inserted the same key.
create or replace function _pgqueue.take_dedup_key(p_stream pgqueue.streams, p_dedup_key text, p_seq bigint)
returns bigint language plpgsql as $$
declare
    v_now timestamptz := clock_timestamp();
begin
    if p_stream.dedup_window is null or octet_length(p_dedup_key) not between 1 and _pgqueue.max_key_bytes() then
        perform _pgqueue.check_dedup_keys(p_stream, array[p_dedup_key], 1);
    end if;
    insert into pgqueue.dedup_keys as d (stream_id, dedup_key, seq, sent_at)
    values (p_stream.stream_id, p_dedup_key, p_seq, v_now)
    -- lock: dedup
    on conflict (stream_id, dedup_key) do update set seq = excluded.seq, sent_at = excluded.sent_at
    where d.sent_at <= v_now - p_stream.dedup_window;
    if found then
        return p_seq;
    end if;
    return (select d.seq from pgqueue.dedup_keys d
            where d.stream_id = p_stream.stream_id and d.dedup_key = p_dedup_key);
end $$;

-- Inserts the dedup keys of messages that this transaction has written and is about to publish, and deletes the
-- duplicates among the messages.
--   p_seqs        the new numbers of the messages
--   p_dedup_keys  one per message in the order of their numbers, null for a message without
-- Returns the remaining messages, and for each message, in order, the number of the first message with its key. Errors:
-- PQ003. Locks: the keys. It waits for open transactions that inserted one of them.
create or replace function _pgqueue.delete_duplicates(p_stream pgqueue.streams, p_seqs int8multirange,
                                                      p_dedup_keys text[], out seqs int8multirange,
                                                      out first_seqs bigint[])
language plpgsql as $$
declare
    v_now   timestamptz := clock_timestamp();
    v_seqs  bigint[] := array(select generate_series(lower(r), upper(r) - 1) from unnest(p_seqs) r);
    v_new   bigint;
    v_range int8range;
begin
    perform _pgqueue.check_dedup_keys(p_stream, p_dedup_keys, cardinality(v_seqs));
    seqs := p_seqs;
    first_seqs := v_seqs;
    insert into pgqueue.dedup_keys as d (stream_id, dedup_key, seq, sent_at)
    select p_stream.stream_id, x.dedup_key collate "C", min(x.seq), v_now
    from unnest(p_dedup_keys, v_seqs) x (dedup_key, seq) where x.dedup_key is not null
    group by 2 order by 2
    -- (this also locks a key that it does not change, so that the query below still finds the key)
    -- lock: dedup
    on conflict (stream_id, dedup_key) do update set seq = excluded.seq, sent_at = excluded.sent_at
    where d.sent_at <= v_now - p_stream.dedup_window;
    get diagnostics v_new = row_count;
    if v_new < cardinality(array_remove(p_dedup_keys, null)) then
        first_seqs := array(select coalesce(d.seq, k.seq)
                            from unnest(p_dedup_keys, v_seqs) with ordinality k (dedup_key, seq, i)
                            left join pgqueue.dedup_keys d on d.stream_id = p_stream.stream_id
                                                          and d.dedup_key = k.dedup_key
                            order by k.i);
        seqs := _pgqueue.set_of(array(select s from unnest(v_seqs, first_seqs) k (s, first) where s = first));
        for v_range in select unnest(p_seqs - seqs) loop
            execute format('delete from pgqueue.messages_%s where seq >= $1 and seq < $2', p_stream.stream_id)
            using lower(v_range), upper(v_range);
        end loop;
    end if;
end $$;

-- Raises PQ003 unless the stream has a dedup_window, and each message has a valid key, or null.
create or replace function _pgqueue.check_dedup_keys(p_stream pgqueue.streams, p_dedup_keys text[], p_count bigint)
returns void language plpgsql as $$
declare
    v_bytes int := (select octet_length(k) from unnest(p_dedup_keys) k
                    where octet_length(k) not between 1 and _pgqueue.max_key_bytes() limit 1);
begin
    if p_stream.dedup_window is null then
        raise exception 'stream % has no dedup_window, and so accepts no dedup keys', _pgqueue.error_name(p_stream)
            using errcode = 'PQ003', column = 'p_dedup_key, p_dedup_keys',
                  hint = format('Set how long to store dedup keys: '
                                'select pgqueue.alter_stream(%s, ''{"dedup_window": "1 day"}'').',
                                _pgqueue.error_name(p_stream));
    elsif array_ndims(p_dedup_keys) > 1 or cardinality(p_dedup_keys) <> p_count then
        raise exception 'p_dedup_keys must have one element per message: %, %',
                        _pgqueue.counted(p_count, 'message'), _pgqueue.counted(cardinality(p_dedup_keys), 'dedup key')
            using errcode = 'PQ003', column = 'p_dedup_keys';
    elsif v_bytes is not null then
        raise exception 'p_dedup_key of each message must be null or 1 to % bytes, not %', _pgqueue.max_key_bytes(),
                        v_bytes
            using errcode = 'PQ003', column = 'p_dedup_key, p_dedup_keys';
    end if;
end $$;

-- Deletes dedup keys whose window has passed, the oldest first, at most limit_deleted() of each stream. Returns how
-- many it deleted, and how many streams may have more. Locks: the keys that it deletes. It does not wait.
create or replace function _pgqueue.delete_dedup_keys(out o_deleted bigint, out o_unfinished bigint)
language sql as $$
    with old as materialized (
        select k.* from pgqueue.streams s
        cross join lateral (
            select stream_id, dedup_key from pgqueue.dedup_keys
            where stream_id = s.stream_id and sent_at <= clock_timestamp() - coalesce(s.dedup_window, '0')
            order by sent_at limit _pgqueue.limit_deleted()
            for update skip locked) k  -- lock: dedup
    ), deleted as (
        delete from pgqueue.dedup_keys d using old
        where d.stream_id = old.stream_id and d.dedup_key = old.dedup_key
        returning d.stream_id
    )
    select coalesce(sum(n), 0)::bigint, count(*) filter (where n >= _pgqueue.limit_deleted())
    from (select count(*) as n from deleted group by stream_id) d
$$;
