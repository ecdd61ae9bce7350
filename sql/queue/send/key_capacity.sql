-- Capacity of a key: while a consumer with per_key_capacity has that many unfinished messages of a key, new ones
-- included, sends with that key fail.
--
-- A send adds an entry to key_backlog for each message with a key and each such consumer of the message, in its own
-- transaction. Before that, it counts the entries of the key. The count is too high when messages have left since. So
-- only when it reaches the capacity, the send finds which of these few messages are unfinished (unfinished_by_key()),
-- and deletes the entries of the others. An acknowledgement deletes the entries of its messages, so that few remain to
-- be checked, but correctness does not depend on that: which messages are unfinished follows only from the consumer's
-- bundles and from the publications that it has not taken. So a key has capacity again however a message leaves (dead,
-- expired, cancelled, skipped), and a new way to leave needs no code here. (Counters that sends raise and settlements
-- lower would need code for each of these ways, and would stay wrong after one that lacks it. Claims and
-- acknowledgements of other consumers would have to check for counters, too.)
--
-- Bundles have no index by message, so a search for one may read all bundles of the consumer. Most messages are found
-- sooner: one that is not taken by its publication, one that waits for its key by the key, and one that was sent with a
-- delay by its time. A search begins with these, and ends if they fill the key.
--
-- No call waits for another: a send skips entries that another transaction is deleting, and open transactions do not
-- see each other's entries. So concurrent producers may exceed a capacity by the messages of their open transactions; a
-- single producer never does. A message that does not pass the consumer's filter gets no entry, because filters never
-- change. While a long transaction elsewhere keeps dead entries, a count of a key reads the dead entries of its
-- messages.

-- Of consumers with per_key_capacity: the messages with a key that may be unfinished.
create table if not exists pgqueue.key_backlog (
    consumer_id    int    not null,
    key            bigint not null,  -- its hash
    seq            bigint not null,
    publication_id bigint not null   -- that made it visible; 0: the consumer had taken it before the entry was added
);

-- Consumers whose per_key_capacity is new: transactions that began before may still publish messages, or return some,
-- without adding entries to key_backlog. maintain() adds them, and deletes the row when none of the transactions is
-- open.
create table if not exists pgqueue.new_capacities (
    capacity_no  bigint primary key generated always as identity,
    consumer_id  int    not null,
    set_by       xid8   not null,  -- a transaction that begins after its commit sees the capacity
    transactions text[]            -- the others that are open, by virtual id; null: maintain() has not read them yet
);

-- Raises PQ013 when messages that are about to be published exceed the per_key_capacity of one of their consumers.
-- Locks nothing for which other sessions wait.
--   p_key  for a single message: an array with its key, which then need not be read; null: the keys are read
-- Returns the entries of these messages, without the publication.
create or replace function _pgqueue.check_keys(p_stream pgqueue.streams, p_seqs int8multirange, p_consumers int[],
                                               p_key text[] default null) returns pgqueue.key_backlog[]
language plpgsql as $$
declare
    v_consumer pgqueue.consumers;
    v_entries  pgqueue.key_backlog[];
    v_all      pgqueue.key_backlog[] := '{}';
    v_key      bigint;
    v_full     bigint[];
begin
    for v_consumer in
        select * from pgqueue.consumers
        where stream_id = p_stream.stream_id and per_key_capacity is not null
          and _pgqueue.is_for(p_consumers, consumer_id)
        order by consumer_id
    loop
        if p_key is null or v_consumer.filtered then
            v_entries := _pgqueue.entries_of(v_consumer, p_seqs);
        else
            v_entries := case when p_key[1] is not null then array[
                (v_consumer.consumer_id, hashtextextended(p_key[1], 0), lower(p_seqs), 0)::pgqueue.key_backlog] end;
        end if;
        continue when v_entries is null;
        -- the order selects the index by key: of an empty table, the other index looks as good to the planner
        if cardinality(v_entries) = 1 then
            v_key := v_entries[1].key;
            v_full := (select case when count(*) = v_consumer.per_key_capacity then array[v_key] end
                       from (select from pgqueue.key_backlog b
                             where b.consumer_id = v_consumer.consumer_id and b.key >= v_key and b.key <= v_key
                             order by b.key limit v_consumer.per_key_capacity) b);
        else
            v_full := (select array_agg(k.key)
                       from (select n.key, count(*) as n from unnest(v_entries) n group by n.key) k
                       where k.n + (select count(*)
                                    from (select from pgqueue.key_backlog b
                                          where b.consumer_id = v_consumer.consumer_id
                                            and b.key >= k.key and b.key <= k.key
                                          order by b.key limit greatest(0, v_consumer.per_key_capacity - k.n + 1)) b)
                             > v_consumer.per_key_capacity);
        end if;
        if v_full is not null then
            perform _pgqueue.recount_keys(p_stream, v_consumer, v_full, v_entries);
        end if;
        v_all := v_all || v_entries;
    end loop;
    return v_all;
end $$;

-- The entries of messages for a consumer: one for each message that has a key and passes the filter. Null: none.
create or replace function _pgqueue.entries_of(p_consumer pgqueue.consumers, p_seqs int8multirange)
returns pgqueue.key_backlog[] language plpgsql as $$
declare
    v_seqs int8multirange := case when p_consumer.filtered then _pgqueue.passing(p_consumer, p_seqs) else p_seqs end;
    v_keys pgqueue.messages_by_key := _pgqueue.keys(p_consumer.stream_id, array[v_seqs], lower(v_seqs), upper(v_seqs));
begin
    return (select array_agg((p_consumer.consumer_id, k.key, s, 0)::pgqueue.key_backlog)
            from unnest(v_keys.keys, v_keys.seqs) k (key, seqs)
            cross join lateral unnest(k.seqs) g
            cross join lateral generate_series(lower(g), upper(g) - 1) s
            where k.key is not null);
end $$;

-- Finds which messages of keys are unfinished for a consumer. Raises PQ013 where these and the messages that are about
-- to be published exceed the capacity of a key; else deletes the entries of finished messages. (A transaction with an
-- old snapshot leaves them.)
--   p_entries  the new entries, of these keys and of others
create or replace function _pgqueue.recount_keys(p_stream pgqueue.streams, p_consumer pgqueue.consumers,
                                                 p_keys bigint[], p_entries pgqueue.key_backlog[]) returns void
language plpgsql as $$
declare
    v_key  record;  -- the key with the most messages; but finished is of all keys
    v_name text;
begin
    for v_pass in 1..2 loop
        select n.new, n.one, h.count, lower(j.unfinished) as first_seq, range_agg(j.finished) over () as finished
        into v_key
        from (select key, count(*) as new, min(seq) as one from unnest(p_entries) where key = any (p_keys)
              group by key) n
        left join _pgqueue.unfinished_by_key(p_consumer, p_keys, v_pass = 1) j using (key)
        cross join lateral (select coalesce(_pgqueue.cardinality(j.unfinished), 0) as count) h
        order by n.new + h.count desc limit 1;
        if v_key.new + v_key.count > p_consumer.per_key_capacity then
            execute format('select quote_literal(left(key, 100)) from pgqueue.messages_%s where seq = $1',
                           p_stream.stream_id) into v_name using v_key.one;
            raise exception 'cannot send % with key % to stream %: consumer % has % unfinished%, '
                            'and per_key_capacity is %',
                            case v_key.new when 1 then 'a message' else v_key.new || ' messages' end, v_name,
                            _pgqueue.error_name(p_stream), _pgqueue.error_name(p_stream, p_consumer), v_key.count,
                            coalesce(', the first with seq ' || v_key.first_seq, ''), p_consumer.per_key_capacity
                using errcode = 'PQ013',
                      hint = 'Nothing was sent. ' || case when v_key.new > p_consumer.per_key_capacity
                          then 'Send fewer messages of a key at once.'
                          else 'Try again when one of them is finished, or raise per_key_capacity with '
                               'alter_consumer.' end;
        end if;
    end loop;
    perform _pgqueue.delete_entries(p_consumer, p_keys, v_key.finished);
end $$;

-- Which of the messages of some keys that have entries are unfinished for a consumer, and which are finished. A message
-- may have two entries: one without a publication, made after the consumer had taken the message, and one with it, made
-- after a seek made the message new again. The message is new then.
--   p_quick  only what is found without reading all bundles; the rest counts as finished
-- Returns a row per key that has entries. One snapshot, that of the caller's statement.
create or replace function _pgqueue.unfinished_by_key(p_consumer pgqueue.consumers, p_keys bigint[], p_quick boolean)
returns table (key bigint, unfinished int8multirange, finished int8multirange)
language plpgsql stable as $$
#variable_conflict use_column
declare
    v_id       int := p_consumer.consumer_id;
    v_cursor   pgqueue.consumer_cursors;
    v_next     bigint;
    v_gaps     int8multirange;
    v_excluded int8multirange;
    v_new      int8multirange;  -- what it has not taken
    v_taken    int8multirange;  -- what it has taken; in the end, what is finished
    v_first    bigint[];        -- and the publications of that
begin
    select * into v_cursor from pgqueue.consumer_cursors where consumer_id = v_id order by version desc limit 1;
    v_next := coalesce(v_cursor.next_publication, 9223372036854775807);  -- it was dropped meanwhile
    v_gaps := _pgqueue.gap_ids(v_cursor);
    v_excluded := _pgqueue.excluded(v_cursor);
    select range_agg(int8range(b.seq, b.seq, '[]')) filter (where b.is_new),
           range_agg(int8range(b.seq, b.seq, '[]')) filter (where not b.is_new),
           array_agg(distinct b.publication_id) filter (where not b.is_new)
    into v_new, v_taken, v_first
    from (select seq, publication_id,
                 (publication_id >= v_next
                  or (v_gaps @> publication_id and (v_excluded @> seq) is not true)) is true as is_new
          from pgqueue.key_backlog where consumer_id = v_id and key = any (p_keys)) b;
    if v_taken is not null then
        v_taken := v_taken - coalesce(v_new, '{}');
        v_taken := v_taken - coalesce((
            select range_agg(_pgqueue.common(m, v_taken))
            from _pgqueue.unfinished_of(p_consumer, v_taken, p_keys, v_first, p_quick) m), '{}');
    end if;
    return query
        select e.key, _pgqueue.less(e.seqs, v_taken), coalesce(_pgqueue.common(e.seqs, v_taken), '{}')
        from (select b.key, range_agg(int8range(b.seq, b.seq, '[]')) as seqs from pgqueue.key_backlog b
              where b.consumer_id = v_id and b.key = any (p_keys) group by b.key) e;
end $$;

-- Deletes entries of messages that were found finished, except those that another transaction is deleting. It checks
-- again after locking them: a message may have returned since. A call that returns one later finds the entry locked,
-- and adds another one (enter_keys()).
--   p_keys  of these keys
create or replace function _pgqueue.delete_entries(p_consumer pgqueue.consumers, p_keys bigint[], p_seqs int8multirange)
returns void language plpgsql as $$
declare
    v_rows tid[];
begin
    if p_seqs <> '{}' and current_setting('transaction_isolation') = 'read committed' then
        v_rows := array(select ctid from pgqueue.key_backlog
                        where consumer_id = p_consumer.consumer_id and key = any (p_keys) and p_seqs @> seq
                        for update skip locked);  -- lock: entry
        delete from pgqueue.key_backlog
        where ctid = any (v_rows)
          and (select range_agg(j.finished) from _pgqueue.unfinished_by_key(p_consumer, p_keys, false) j) @> seq;
    end if;
end $$;

-- Adds entries for unfinished messages with a key that have none: the consumer has a capacity from now on, or they
-- returned to it. The cost is proportional to the unfinished messages.
--   p_seqs  only these messages, which the consumer has taken; null: all unfinished ones, new ones included
create or replace function _pgqueue.enter_keys(p_consumer pgqueue.consumers, p_seqs int8multirange default null)
returns void language plpgsql as $$
declare
    v_cursor  pgqueue.consumer_cursors;
    v_new     int8multirange := '{}';
    v_passing int8multirange;
begin
    select * into v_cursor from pgqueue.consumer_cursors where consumer_id = p_consumer.consumer_id
    order by version desc limit 1;
    if not found or p_consumer.per_key_capacity is null then
        return;  -- it is being created, or has no capacity
    end if;
    if p_seqs is null then
        v_new := _pgqueue.new_ids(v_cursor);
    end if;
    if p_consumer.filtered then
        v_passing := _pgqueue.passing(p_consumer, coalesce(p_seqs, (
            select range_agg(o.seqs) from _pgqueue.new_and_unfinished(p_consumer, v_new, null) o)));
    end if;
    execute format($q$
        insert into pgqueue.key_backlog (consumer_id, key, seq, publication_id)
        select $1, k.key, k.seq, k.publication_id
        from (select hashtextextended(m.key, 0) as key, m.seq, o.publication_id
              from _pgqueue.new_and_unfinished($2, $3, $4) o
              cross join lateral unnest(o.seqs) r
              cross join lateral (select seq, key from pgqueue.messages_%s
                                  where seq >= lower(r) and seq < upper(r) offset 0) m
              where m.key is not null and ($5 @> m.seq) is not false
                and (o.publication_id = 0 or ($6 @> m.seq) is not true)) k
        where not exists (select from pgqueue.key_backlog b
                          where b.consumer_id = $1 and b.key = k.key and b.seq = k.seq
                            and (k.publication_id = 0 or b.publication_id = k.publication_id)
                          -- one that another transaction is deleting does not count, and the others stay
                          for key share skip locked) $q$, p_consumer.stream_id)  -- lock: entry
    using p_consumer.consumer_id, p_consumer, v_new, p_seqs, v_passing, _pgqueue.excluded(v_cursor);
end $$;

-- The sets of messages that a consumer has taken and not finished, with publication 0, and those that are new for it.
--   p_new   the publications that it has not taken
--   p_seqs  only these of the messages that it has taken; null: all
create or replace function _pgqueue.new_and_unfinished(p_consumer pgqueue.consumers, p_new int8multirange,
                                                       p_seqs int8multirange)
returns table (publication_id bigint, seqs int8multirange)
language sql stable as $$
    select 0::bigint, coalesce(_pgqueue.common(m.seqs, p_seqs), m.seqs)
    from _pgqueue.unfinished(p_consumer.consumer_id) m
    union all
    select p.publication_id, p.seqs from _pgqueue.published(p_consumer.stream_id, p_new) p
    where _pgqueue.is_for(p.consumers, p_consumer.consumer_id)
$$;

-- Applies a changed setting per_key_capacity: marks the stream, and adds entries for the unfinished messages.
-- Transactions that began before may publish others, or return some by a seek, a replay or a redrive: maintain() adds
-- their entries.
--   p_new  the consumer had no capacity before
create or replace function _pgqueue.apply_key_capacity(p_consumer pgqueue.consumers, p_new boolean) returns void
language plpgsql as $$
begin
    perform _pgqueue.record_limited(p_consumer.stream_id);
    if p_consumer.per_key_capacity is null then
        perform _pgqueue.delete_old_entries(p_consumer.consumer_id);
    elsif p_new then
        perform _pgqueue.enter_keys(p_consumer);
        insert into pgqueue.new_capacities (consumer_id, set_by) values (p_consumer.consumer_id, pg_current_xact_id());
    end if;
end $$;

-- Adds entries for messages of transactions that did not see a capacity. It waits for no transaction: the first call
-- records those that are open, and a later call adds entries again when some of them have ended. A transaction that
-- begins after the first call sees the capacity.
create or replace function _pgqueue.enter_missed() returns void
language plpgsql as $$
declare
    v_change   pgqueue.new_capacities;
    v_consumer pgqueue.consumers;
    v_open     text[];
begin
    for v_change in
        select * from pgqueue.new_capacities where set_by is distinct from pg_current_xact_id_if_assigned()
        for update skip locked  -- lock: entry
    loop
        -- before the messages are read
        v_open := _pgqueue.still_open(v_change.transactions, _pgqueue.open_transactions(true));
        continue when v_open = v_change.transactions;
        select * into v_consumer from pgqueue.consumers where consumer_id = v_change.consumer_id;
        perform _pgqueue.enter_keys(v_consumer);
        if v_consumer.consumer_id is null or v_open = '{}' then
            delete from pgqueue.new_capacities where capacity_no = v_change.capacity_no;
        else
            update pgqueue.new_capacities set transactions = v_open where capacity_no = v_change.capacity_no;
        end if;
    end loop;
end $$;

-- Deletes all entries of a consumer without a capacity, except those that another transaction is deleting. maintain()
-- deletes entries that are added meanwhile. The consumer is read after its entries are locked: it may have a capacity
-- again. A call that sets one later finds the entries locked, and adds others.
-- on drop_consumer: perform _pgqueue.delete_old_entries(p_consumer_id);
create or replace function _pgqueue.delete_old_entries(p_consumer_id int) returns void
language plpgsql as $$
declare
    v_changes bigint[] := array(select capacity_no from pgqueue.new_capacities where consumer_id = p_consumer_id
                                for update skip locked);  -- lock: entry
    v_rows    tid[] := array(select ctid from pgqueue.key_backlog where consumer_id = p_consumer_id
                             for update skip locked);  -- lock: entry
begin
    if not exists (select from pgqueue.consumers
                   where consumer_id = p_consumer_id and per_key_capacity is not null) then
        delete from pgqueue.new_capacities where capacity_no = any (v_changes);
        delete from pgqueue.key_backlog where ctid = any (v_rows);
    end if;
end $$;

-- Deletes entries of messages that left without an acknowledgement, and whose keys are not sent any more. It reads
-- limit_entries() entries of each consumer, from a random hash on. It does not wait. Locks: the entries that it
-- deletes.
-- on maintain: perform _pgqueue.run_task('select 0 from _pgqueue.maintain_key_backlog()');
create or replace function _pgqueue.maintain_key_backlog() returns void
language plpgsql as $$
declare
    v_id       int := 0;
    v_consumer pgqueue.consumers;
    v_from     bigint;
    v_keys     bigint[];
begin
    perform _pgqueue.enter_missed();
    loop
        v_id := (select min(b.consumer_id) from pgqueue.key_backlog b where b.consumer_id > v_id);
        exit when v_id is null;
        select * into v_consumer from pgqueue.consumers where consumer_id = v_id;
        if v_consumer.per_key_capacity is null then
            perform _pgqueue.delete_old_entries(v_id);
            continue;
        end if;
        v_from := ((random() - 0.5) * 18446744073709549568)::bigint;
        v_keys := array(select distinct n.key
                        from ((select b.key from pgqueue.key_backlog b where b.consumer_id = v_id and b.key >= v_from
                               order by b.key limit _pgqueue.limit_entries())
                              union all
                              (select b.key from pgqueue.key_backlog b where b.consumer_id = v_id and b.key < v_from
                               order by b.key limit _pgqueue.limit_entries())) n);
        perform _pgqueue.delete_entries(v_consumer, v_keys, (
            select range_agg(j.finished) from _pgqueue.unfinished_by_key(v_consumer, v_keys, false) j));
    end loop;
end $$;
