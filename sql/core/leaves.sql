-- Leaves: the messages of a stream with a retention, stored by range of seq, so that they are dropped whole.
--
-- A stream is one table until it has a retention. Then maintain() makes that table the first leaf of a partitioned one, and always has two
-- more leaves ready for the numbers to come; nobody else makes or drops one. A leaf is wide, 2^30 numbers, so that no burst gets past the
-- next two; what does is in messages_<stream_id>_rest, and loses nothing but time. It is closed when it has its share of what
-- is kept, by giving out the numbers of the next one from then on: so numbers rise, and now and then by a lot.
--
-- The life of a leaf:
--   ready    nothing was written to it yet
--   open     the next number is of it
--   closed   no number of it is given out any more. Who was given one before has a lock of the sequence until his transaction is over: these
--            transactions are noted
--   sealed   they are over, and no reservation has a number of it: all that will ever be published of it is published, up to a known id
--   emptied  all these publications are trimmed (core/retention.sql): its table was truncated, which needs a lock of this leaf only
--   dropped  at a moment when nobody writes to the stream
-- No lock that others wait for is waited for longer than _leaf_patience().

-- Numbers of a leaf, and how far the next one is off from a table that is too large to be read under a lock.
create or replace function pgqueue._leaf_size() returns bigint language sql immutable parallel safe as 'select 1::bigint << 30';
create or replace function pgqueue._leaf_jump() returns bigint language sql immutable parallel safe as 'select 1::bigint << 40';
-- Bytes of a table that may be read while senders wait: some 20 ms.
create or replace function pgqueue._leaf_bytes_at_once() returns bigint language sql immutable parallel safe as 'select 16::bigint << 20';
-- Leaves, about, that what is kept is divided into: so much more than that is stored at times.
create or replace function pgqueue._leaf_count() returns int language sql immutable parallel safe as 'select 8';

-- The name of a leaf's table.
create or replace function pgqueue._leaf_name(p_stream_id int, p_leaf int) returns text
language sql immutable parallel safe
as $$ select format('messages_%s_%s', p_stream_id, coalesce(p_leaf::text, 'rest')) $$;

-- The last sequence number of a stream that was given out; 0: none.
create or replace function pgqueue._last_seq(p_stream_id int) returns bigint
language sql stable
as $$ select coalesce(pg_sequence_last_value(format('pgqueue.seq_%s', p_stream_id)::regclass), 0) $$;

-- The tables in which the messages of a stream are, with their bytes.
create or replace function pgqueue._message_tables(p_stream_id int) returns table (name regclass, bytes bigint)
language sql stable
as $$
    select t.relid, pg_total_relation_size(t.relid)
    from pg_partition_tree(to_regclass(format('pgqueue.messages_%s', p_stream_id))) t
    where t.isleaf
$$;

-- The transactions that may have a number of a stream and are not over: a number is given out under a lock of the sequence, which
-- Postgres keeps to the end of the transaction, also of a prepared one.
create or replace function pgqueue._writers(p_stream_id int) returns text[]
language plpgsql stable
as $$
begin
    return (select coalesce(array_agg(distinct virtualtransaction), '{}') from pg_locks
            where locktype = 'relation' and relation = format('pgqueue.seq_%s', p_stream_id)::regclass
              and database = (select oid from pg_database where datname = current_database()));
end $$;

-- Does what the leaves of a stream need, each step if it gets its locks. Needs the stream's maintenance lock.
-- Returns whether it did something, so that there may be more. Locks: for 50 ms at most it waits for those of a step, and has them
-- for the rest of the transaction: end it at once.
create or replace function pgqueue._tend_leaves(p_stream_id int) returns boolean
language plpgsql
set lock_timeout = '50ms'
as $$
declare
    v_step text;
    v_done boolean;
    v_some boolean := false;
begin
    begin
        if pgqueue._check_bound(p_stream_id) then
            return true;
        end if;
    exception
        when lock_not_available or deadlock_detected then
            null;
    end;
    -- drop_stream and an installer are kept out, and who creates a consumer: only for short steps
    perform from pgqueue.streams where stream_id = p_stream_id for update skip locked;
    if not found then
        return false;
    end if;
    foreach v_step in array array['_note_closed', '_close_leaf', '_seal_leaf', '_add_leaf', '_empty_leaf', '_drop_leaves'] loop
        begin
            execute format('select pgqueue.%I($1)', v_step) into v_done using p_stream_id;
            v_some := v_some or v_done;
        exception
            when lock_not_available or deadlock_detected then
                null;
            when check_violation or numeric_value_out_of_range then
                -- somebody wrote a number that he had not reserved
                raise warning 'stream %, %: %', p_stream_id, v_step, sqlerrm;
        end;
        exit when v_step = '_add_leaf' and v_done;  -- it may have locks that all wait for, see _enclose
    end loop;
    return v_some;
end $$;

-- Checks the bound of a large table that is to be a leaf, see _enclose: that reads all of it, and so may take minutes. Returns whether there was
-- one. Locks: nothing that senders or readers need, nor who creates a consumer.
create or replace function pgqueue._check_bound(p_stream_id int) returns boolean
language plpgsql
as $$
declare
    v_bound pg_constraint;
begin
    select * into v_bound from pg_constraint
    where conrelid in (to_regclass(format('pgqueue.messages_%s', p_stream_id)), to_regclass('pgqueue.' || pgqueue._leaf_name(p_stream_id, null)))
      and contype = 'c' and conname like 'below\_%' and not convalidated;
    if not found then
        return false;
    end if;
    execute format('alter table %s validate constraint %I', v_bound.conrelid::regclass, v_bound.conname);
    return true;
end $$;

-- Notes that all numbers of a leaf were given out or passed over. Returns whether there was one.
create or replace function pgqueue._note_closed(p_stream_id int) returns boolean
language plpgsql
as $$
declare
    v_leaf pgqueue.leaves;
    v_last bigint;
begin
    select * into v_leaf from pgqueue.leaves
    where stream_id = p_stream_id and closed_at is null and hi <= pgqueue._last_seq(p_stream_id) + 1 order by lo limit 1;
    if not found then
        return false;
    end if;
    execute format('select max(seq) from pgqueue.%I', pgqueue._leaf_name(p_stream_id, v_leaf.leaf)) into v_last;
    update pgqueue.leaves
    set closed_at = clock_timestamp(), opened_at = coalesce(opened_at, clock_timestamp()), last_seq = coalesce(v_last, lo - 1),
        writers = pgqueue._writers(p_stream_id), closed_publication = pgqueue._last_publication_id(p_stream_id)
    where stream_id = p_stream_id and leaf = v_leaf.leaf;
    update pgqueue.leaves set opened_at = clock_timestamp() where stream_id = p_stream_id and lo = v_leaf.hi and opened_at is null;
    return true;
end $$;

-- Notes which closed leaf nobody can publish anything of any more. Returns whether there was one.
create or replace function pgqueue._seal_leaf(p_stream_id int) returns boolean
language plpgsql
as $$
declare
    v_leaf    pgqueue.leaves;
    v_writers text[];
    v_sealed  boolean := false;
begin
    for v_leaf in
        select * from pgqueue.leaves
        where stream_id = p_stream_id and closed_at is not null and last_publication is null order by lo
    loop
        v_writers := v_leaf.writers;
        if v_writers <> '{}' then
            v_writers := array(select w from unnest(pgqueue._writers(p_stream_id)) w where w = any (v_leaf.writers) or w like '-1/%');
        end if;
        if v_writers <> '{}' then
            update pgqueue.leaves set writers = v_writers where stream_id = p_stream_id and leaf = v_leaf.leaf and writers <> v_writers;
            continue;
        end if;
        -- after the writers are over: so this snapshot has all their reservations and publications. Of a sink's batch it has
        -- either the reservation, or what was published of it
        update pgqueue.leaves
        set writers = null, last_publication = pgqueue._last_publication_id(p_stream_id)
        where stream_id = p_stream_id and leaf = v_leaf.leaf
          and not exists (select from pgqueue.reservations r where r.stream_id = p_stream_id and r.seqs && int8range(v_leaf.lo, v_leaf.hi));
        v_sealed := v_sealed or found;
    end loop;
    return v_sealed;
end $$;

-- Makes the table of a stream its first leaf, or adds a leaf where fewer than two are ready. Returns whether it did something.
create or replace function pgqueue._add_leaf(p_stream_id int) returns boolean
language plpgsql
as $$
declare
    v_next bigint := pgqueue._last_seq(p_stream_id) + 1;
    v_hi   bigint := (select max(hi) from pgqueue.leaves where stream_id = p_stream_id);
    v_used boolean;
begin
    if v_hi is null then
        return exists (select from pgqueue.retention where stream_id = p_stream_id
                                                     and (keep_for is not null or keep_messages is not null or keep_bytes is not null or until_done))
           and pgqueue._enclose(p_stream_id, null);
    elsif (select count(*) from pgqueue.leaves where stream_id = p_stream_id and lo > v_next) >= 2 then
        return false;
    end if;
    execute format('select exists (select from pgqueue.%I)', pgqueue._leaf_name(p_stream_id, null)) into v_used;
    if v_used then
        return pgqueue._enclose(p_stream_id, v_hi);
    end if;
    perform pgqueue._make_leaf(p_stream_id, greatest(v_hi, (v_next / pgqueue._leaf_size() + 1) * pgqueue._leaf_size()));
    perform pgqueue._make_payloads(p_stream_id);
    return true;
end $$;

-- Makes an empty leaf from a number on. Locks, for others: nothing that senders or readers need.
create or replace function pgqueue._make_leaf(p_stream_id int, p_lo bigint) returns void
language plpgsql
as $$
declare
    v_leaf int := (select coalesce(max(leaf), 0) + 1 from pgqueue.leaves where stream_id = p_stream_id);
    v_name text := pgqueue._leaf_name(p_stream_id, v_leaf);
    v_hi   bigint := p_lo + pgqueue._leaf_size();
begin
    perform pgqueue._make_message_table(p_stream_id, v_name);
    execute format('alter table pgqueue.messages_%s attach partition pgqueue.%I for values from (%s) to (%s)', p_stream_id, v_name, p_lo, v_hi);
    insert into pgqueue.leaves (stream_id, leaf, lo, hi) values (p_stream_id, v_leaf, p_lo, v_hi);
end $$;

-- Makes a table that is to be a part of a stream's.
create or replace function pgqueue._make_message_table(p_stream_id int, p_name text) returns void
language plpgsql
as $$
begin
    execute format('create table pgqueue.%I (like pgqueue.messages_%s including defaults, primary key (seq))', p_name, p_stream_id);
    execute format('revoke all on type pgqueue.%I from public', p_name);
end $$;

-- Makes a table that may have any number, and has messages, a leaf: the only table of a stream, or _rest, where numbers got past all leaves.
-- Postgres wants to know that no number in it is of the leaves that follow. It reads a small table for that, under the lock. Of a
-- large one it has to have a constraint that was checked before, while others go on writing: so its bound is so far away that no
-- number gets there, not even if nobody calls maintain() any more; then, and not earlier, the numbers jump to the next leaf (_close_leaf).
--   p_lo  where _rest begins; null: the stream's only table
-- Returns whether it did something. Locks: for a moment the stream, and for its only table all of messages.
create or replace function pgqueue._enclose(p_stream_id int, p_lo bigint) returns boolean
language plpgsql
as $$
declare
    v_table  text := case when p_lo is null then format('messages_%s', p_stream_id) else pgqueue._leaf_name(p_stream_id, null) end;
    v_last   bigint;  -- what is in it is below, also what was written with a number that was not given out
    v_leaf   int := (select coalesce(max(leaf), 0) + 1 from pgqueue.leaves where stream_id = p_stream_id);
    v_name   text := pgqueue._leaf_name(p_stream_id, v_leaf);
    v_hi     bigint;
    v_bound  pg_constraint;
    v_role   text;
begin
    execute format('select max(seq) from pgqueue.%I', v_table) into v_last;
    v_last := greatest(pgqueue._last_seq(p_stream_id), least(coalesce(v_last, 0), pgqueue._last_seq(p_stream_id) + (1::bigint << 50)));  -- numbers have an end
    select * into v_bound from pg_constraint
    where conrelid = format('pgqueue.%I', v_table)::regclass and contype = 'c' and conname like 'below\_%';
    if not found and pg_relation_size(format('pgqueue.%I', v_table)) > pgqueue._leaf_bytes_at_once() then
        v_hi := ((v_last + pgqueue._leaf_jump()) / pgqueue._leaf_size() + 1) * pgqueue._leaf_size();
        execute format('alter table pgqueue.%1$I add constraint below_%2$s check (seq < %2$s and stream_id = %3$s) not valid', v_table, v_hi, p_stream_id);
        return true;
    elsif v_bound.convalidated = false then
        return false;  -- see _check_bound
    end if;
    v_hi := coalesce(substr(v_bound.conname, 7)::bigint,
                     ((v_last + pgqueue._leaf_size() / 1024) / pgqueue._leaf_size() + 1) * pgqueue._leaf_size());

    if p_lo is null then
        execute format('alter table pgqueue.messages detach partition pgqueue.%I', v_table);
        execute format('alter table pgqueue.%I rename to %I', v_table, v_name);
        execute format('create table pgqueue.%I (like pgqueue.%I including defaults) partition by range (seq)', v_table, v_name);
        execute format('alter table pgqueue.messages attach partition pgqueue.%I for values in (%s)', v_table, p_stream_id);
        for v_role in select pgqueue._roles() loop
            execute format('revoke all on pgqueue.%I from %I', v_name, v_role);
        end loop;
    else
        execute format('alter table pgqueue.messages_%s detach partition pgqueue.%I', p_stream_id, v_table);
        execute format('alter table pgqueue.%I rename to %I', v_table, v_name);
    end if;
    execute format('alter table pgqueue.messages_%s attach partition pgqueue.%I for values from (%s) to (%s)',
                   p_stream_id, v_name, coalesce(p_lo::text, 'minvalue'), v_hi);
    if v_bound.conname is not null then
        execute format('alter table pgqueue.%I drop constraint %I', v_name, v_bound.conname);  -- it would be read by each statement that inserts
    end if;
    insert into pgqueue.leaves (stream_id, leaf, lo, hi, opened_at) values (p_stream_id, v_leaf, coalesce(p_lo, 1), v_hi,
        case when p_lo is null then (select created_at from pgqueue.streams where stream_id = p_stream_id) else clock_timestamp() end);
    perform pgqueue._make_message_table(p_stream_id, pgqueue._leaf_name(p_stream_id, null));
    execute format('alter table pgqueue.messages_%s attach partition pgqueue.%I default', p_stream_id, pgqueue._leaf_name(p_stream_id, null));
    perform pgqueue._make_leaf(p_stream_id, v_hi);
    perform pgqueue._make_leaf(p_stream_id, v_hi + pgqueue._leaf_size());
    perform pgqueue._grant_stream(p_stream_id);
    perform pgqueue._make_payloads(p_stream_id);
    return true;
end $$;

-- Closes the open leaf of a stream if it has its share of what is kept: the next number is of the next leaf. Returns whether it did.
create or replace function pgqueue._close_leaf(p_stream_id int) returns boolean
language plpgsql
as $$
declare
    v_rules pgqueue.retention;
    v_last  bigint := pgqueue._last_seq(p_stream_id);
    v_leaf  pgqueue.leaves;
    v_bytes bigint;
begin
    select * into v_rules from pgqueue.retention where stream_id = p_stream_id;
    select * into v_leaf from pgqueue.leaves where stream_id = p_stream_id and lo <= v_last and hi > v_last + 1;
    if v_rules.stream_id is null or v_leaf.leaf is null
       or not exists (select from pgqueue.leaves where stream_id = p_stream_id and lo = v_leaf.hi) then
        return false;
    end if;
    v_bytes := pg_total_relation_size(format('pgqueue.%I', pgqueue._leaf_name(p_stream_id, v_leaf.leaf)));
    if (v_leaf.opened_at < clock_timestamp() - v_rules.keep_for / pgqueue._leaf_count()
        or v_last - v_leaf.lo + 1 >= v_rules.keep_messages / pgqueue._leaf_count()
        or v_bytes >= v_rules.keep_bytes / pgqueue._leaf_count()
        or (v_rules.until_done and (v_bytes >= pgqueue._leaf_bytes_at_once() or v_leaf.opened_at < clock_timestamp() - interval '1 minute'))
        or v_leaf.hi - v_last > 2 * pgqueue._leaf_size()) is not true
       -- where nothing can be trimmed, leaves grow with what is stored, so that they do not become very many
       or (v_bytes * pgqueue._leaf_count() < (select sum(bytes) from pgqueue._message_tables(p_stream_id))
           and (select count(*) from pgqueue.leaves where stream_id = p_stream_id) > 4 * pgqueue._leaf_count())
    then
        return false;
    end if;
    -- (not undone by a rollback, which does no harm: then it is noted the next time)
    v_last := pgqueue._last_seq(p_stream_id);
    update pgqueue.streams set passed_over = passed_over + greatest(v_leaf.hi - 1 - v_last, 0) where stream_id = p_stream_id;
    if v_leaf.hi - pgqueue._last_seq(p_stream_id) > 100000 then
        perform setval(format('pgqueue.seq_%s', p_stream_id)::regclass, v_leaf.hi - 1);
    else
        -- others may be given numbers of the next leaf at this moment, and must not be given these again
        perform nextval(format('pgqueue.seq_%s', p_stream_id)::regclass) from generate_series(v_last + 1, v_leaf.hi - 1);
    end if;
    return pgqueue._note_closed(p_stream_id);
end $$;

-- Empties a sealed leaf of which nothing is published any more. Returns whether there was one. Locks: the leaf.
create or replace function pgqueue._empty_leaf(p_stream_id int) returns boolean
language plpgsql
as $$
declare
    v_leaf pgqueue.leaves;
begin
    select l.* into v_leaf from pgqueue.leaves l
    where stream_id = p_stream_id and last_publication is not null and not emptied
      and not exists (select from pgqueue.publications p
                      where p.stream_id = p_stream_id and p.publication_id <= l.last_publication and p.seqs && int8range(l.lo, l.hi))
      and (l.last_seq < l.lo or exists (select from pgqueue._due_leaves(p_stream_id) d where d.leaf = l.leaf))
    order by l.lo limit 1;
    if not found then
        return false;
    end if;
    execute format('truncate pgqueue.%I', pgqueue._leaf_name(p_stream_id, v_leaf.leaf));
    update pgqueue.leaves set emptied = true, held_by = '{}' where stream_id = p_stream_id and leaf = v_leaf.leaf;
    perform pgqueue._note_trim(p_stream_id, '{}', int8multirange(int8range(v_leaf.lo, v_leaf.hi)), 0);
    return true;
end $$;

-- Drops the leaves that are empty, if nobody writes to the stream at the moment. Returns whether there were some.
create or replace function pgqueue._drop_leaves(p_stream_id int) returns boolean
language plpgsql
as $$
declare
    v_names text := (select string_agg(format('pgqueue.%I', pgqueue._leaf_name(stream_id, leaf)), ', ')
                     from pgqueue.leaves where stream_id = p_stream_id and emptied);
begin
    if v_names is null then
        return false;
    end if;
    execute 'drop table ' || v_names;
    delete from pgqueue.leaves where stream_id = p_stream_id and emptied;
    perform pgqueue._make_payloads(p_stream_id);
    return true;
end $$;
