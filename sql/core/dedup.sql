-- Sending once: of messages with the same dedup key, sent within the stream's dedup_window, only the first is published.
--
-- Each message with a dedup key inserts it, before it is published and in the same transaction: the key is there if the message is. Who finds
-- it there has a duplicate, and publishes nothing; who finds it uncommitted waits for that transaction, because nobody can know yet whether
-- its message will be there: the one case in which a producer waits for another's transaction. Keys are inserted in their order, by a
-- single statement, so that two batches cannot wait for each other in a circle.

-- Takes the dedup keys of messages that are about to be published.
--   p_dedup_keys  one per message, null for a message that is always published
--   p_seqs        the new numbers of the messages, ascending
-- Returns, in that order, the number of the first message of each key: of a message that is to be published its own, of a duplicate another's.
-- Errors: PQ003. Locks: the keys; waits for transactions that are open and took one of them.
create or replace function pgqueue._take_dedup_keys(p_stream pgqueue.streams, p_dedup_keys text[], p_seqs bigint[]) returns bigint[]
language plpgsql
as $$
declare
    v_now timestamptz := clock_timestamp();
    v_new bigint;
begin
    perform pgqueue._check_dedup_keys(p_stream, p_dedup_keys, cardinality(p_seqs));
    with taken as (
        insert into pgqueue.dedup_keys as d (stream_id, dedup_key, seq, sent_at)
        select p_stream.stream_id, k.dedup_key, k.seq, v_now
        from (select x.dedup_key collate "C" as dedup_key, min(x.seq) as seq
              from unnest(p_dedup_keys, p_seqs) x (dedup_key, seq) where x.dedup_key is not null
              group by 1 order by 1) k
        -- also locks a key that it leaves as it is, so that it is still there for _first_of
        on conflict (stream_id, dedup_key) do update set seq = excluded.seq, sent_at = excluded.sent_at where d.sent_at <= v_now - p_stream.dedup_window
        returning 1
    )
    select count(*) into v_new from taken;
    if v_new = cardinality(array_remove(p_dedup_keys, null)) then
        return p_seqs;
    end if;
    return pgqueue._first_of(p_stream.stream_id, p_dedup_keys, p_seqs);
end $$;

-- The same for a message alone, whose key is not null: in a third of the time.
create or replace function pgqueue._take_dedup_key(p_stream pgqueue.streams, p_dedup_key text, p_seq bigint) returns bigint
language plpgsql
as $$
declare
    v_now timestamptz := clock_timestamp();
begin
    if p_stream.dedup_window is null or octet_length(p_dedup_key) not between 1 and pgqueue._max_key_bytes() then
        perform pgqueue._check_dedup_keys(p_stream, array[p_dedup_key], 1);
    end if;
    insert into pgqueue.dedup_keys as d (stream_id, dedup_key, seq, sent_at) values (p_stream.stream_id, p_dedup_key, p_seq, v_now)
    on conflict (stream_id, dedup_key) do update set seq = excluded.seq, sent_at = excluded.sent_at where d.sent_at <= v_now - p_stream.dedup_window;
    if found then
        return p_seq;
    end if;
    return (select d.seq from pgqueue.dedup_keys d where d.stream_id = p_stream.stream_id and d.dedup_key = p_dedup_key);
end $$;

-- The number of the first message of each of these keys, which were all taken; for null the number given.
create or replace function pgqueue._first_of(p_stream_id int, p_dedup_keys text[], p_seqs bigint[]) returns bigint[]
language plpgsql
as $$
begin
    return array(select coalesce(d.seq, k.seq)
                 from unnest(p_dedup_keys, p_seqs) with ordinality k (dedup_key, seq, i)
                 left join pgqueue.dedup_keys d on d.stream_id = p_stream_id and d.dedup_key = k.dedup_key
                 order by k.i);
end $$;

-- Takes the dedup keys of messages that this transaction has written and is about to publish, and deletes the duplicates among them.
--   p_seqs        their numbers
--   p_dedup_keys  one per message in the order of their numbers, null for one without
-- Returns what is left to publish, and as _take_dedup_keys. Errors and locks: as there.
create or replace function pgqueue._keep_first(p_stream pgqueue.streams, p_seqs int8multirange, p_dedup_keys text[])
returns table (seqs int8multirange, first_seqs bigint[])
language plpgsql
as $$
declare
    v_seqs       bigint[] := array(select generate_series(lower(r), upper(r) - 1) from unnest(p_seqs) r);
    v_duplicates int8multirange;
    v_range      int8range;
begin
    seqs := p_seqs;
    first_seqs := pgqueue._take_dedup_keys(p_stream, p_dedup_keys, v_seqs);
    if first_seqs <> v_seqs then
        select range_agg(int8range(k.seq, k.seq, '[]')) into v_duplicates from unnest(v_seqs, first_seqs) k (seq, first) where k.seq <> k.first;
        for v_range in select unnest(v_duplicates) loop
            execute format('delete from pgqueue.messages_%s where seq >= $1 and seq < $2', p_stream.stream_id) using lower(v_range), upper(v_range);
        end loop;
        seqs := p_seqs - v_duplicates;
    end if;
    return next;
end $$;

-- Raises PQ003 unless the stream takes dedup keys, and these are such, one per message or null.
create or replace function pgqueue._check_dedup_keys(p_stream pgqueue.streams, p_dedup_keys text[], p_count bigint) returns void
language plpgsql
as $$
begin
    if p_stream.dedup_window is null then
        raise exception 'stream % has no dedup_window, and so takes no dedup keys', quote_literal(p_stream.name)
            using errcode = 'PQ003', column = 'p_dedup_key, p_dedup_keys',
                  hint = format('Say for how long to remember them: select pgqueue.set_dedup_window(%L, ''1 day'').', p_stream.name);
    elsif array_ndims(p_dedup_keys) > 1 or cardinality(p_dedup_keys) <> p_count then
        raise exception 'p_dedup_keys has one element per message: % messages, % dedup keys', p_count, cardinality(p_dedup_keys)
            using errcode = 'PQ003', column = 'p_dedup_keys';
    elsif exists (select from unnest(p_dedup_keys) k where octet_length(k) not between 1 and pgqueue._max_key_bytes()) then
        raise exception 'p_dedup_key, of each message, has 1 to % bytes or is null, not %', pgqueue._max_key_bytes(),
            (select octet_length(k) from unnest(p_dedup_keys) k where octet_length(k) not between 1 and pgqueue._max_key_bytes() limit 1)
            using errcode = 'PQ003', column = 'p_dedup_key, p_dedup_keys';
    end if;
end $$;

-- Deletes dedup keys that no stream remembers any more, the oldest first, at most _limit_forgotten() of each stream.
-- Returns how many, and how many streams may have more. Locks: those that it deletes; it waits for nobody.
create or replace function pgqueue._forget_dedup_keys(out o_deleted bigint, out o_unfinished bigint)
language plpgsql
as $$
declare
    v_stream pgqueue.streams;
    v_count  bigint;
begin
    o_deleted := 0;
    o_unfinished := 0;
    for v_stream in select * from pgqueue.streams order by stream_id loop
        with old as materialized (
            select dedup_key from pgqueue.dedup_keys
            where stream_id = v_stream.stream_id and sent_at <= clock_timestamp() - coalesce(v_stream.dedup_window, '0')
            order by sent_at limit pgqueue._limit_forgotten()
            for update skip locked
        )
        delete from pgqueue.dedup_keys d using old where d.stream_id = v_stream.stream_id and d.dedup_key = old.dedup_key;
        get diagnostics v_count = row_count;
        o_deleted := o_deleted + v_count;
        o_unfinished := o_unfinished + (v_count >= pgqueue._limit_forgotten())::int;
    end loop;
end $$;
