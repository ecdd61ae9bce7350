-- Taking what is new, exactly.
--
-- Commits do not come in the order of ids. A consumer keeps the set of publication ids that it has seen; new is what
-- is beyond its end, and what has appeared in its holes. A hole is closed once nothing that could fill it is running:
--   * A publisher has its transaction id before its publication id. So a transaction that looked, did not see
--     publication h, saw a later one, and only then got an id of its own, has a greater id than h's publisher.
--   * When that id is below every running transaction, the publisher is over: h is visible to the next look, or dead.
--     This is decided before that look, never after.

-- A transaction id younger than every one that existed until now, of a transaction that may have an older one: the id
-- of a subtransaction, which is rolled back.
create or replace function pgqueue._fresh_xid() returns xid8
language plpgsql
as $$
declare
    v_own bigint := pg_current_xact_id()::text::bigint;
    v_sub bigint;
begin
    begin
        insert into pgqueue.consumer_cursors (consumer_id, version, seen) values (0, v_own, '{}')
        returning xmin::text::bigint into v_sub;
        raise exception using errcode = 'PQ099';
    exception when sqlstate 'PQ099' then
        null;
    end;
    v_sub := (v_own >> 32 << 32) + v_sub;  -- xmin has 32 bits
    return (case when v_sub < v_own then v_sub + (1::bigint << 32) else v_sub end)::text::xid8;
end $$;

-- Whether all transactions up to p_below are over. An id that this cluster has not reached comes from another one, by
-- a restore, and all of its transactions are over; unless the caller has written before and so may have set it itself.
create or replace function pgqueue._is_over(p_below xid8, p_snapshot pg_snapshot, p_first_write boolean) returns boolean
language sql immutable
as $$
    select p_below < pg_snapshot_xmin(p_snapshot)
           or (p_first_write and p_below >= pg_snapshot_xmax(p_snapshot))
$$;

-- Takes what comes next into one run, if it is as plain as nearly always: at most p_limit publications without a hole among
-- their ids, all of the same kind, and their messages one range (or those of a single publication). There is no hole before them.
-- Returns the cursor; null when it is not so, and nothing was done. Needs the consumer's lock.
create or replace function pgqueue._take_plain(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors, p_next bigint,
                                               p_upto bigint, p_limit int) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_first pgqueue.publications;
    v_all   record;
    v_run   pgqueue.consumer_messages;
begin
    select * into v_first from pgqueue.publications
    where stream_id = p_consumer.stream_id and publication_id = p_next and part = 0 and p_next <= coalesce(p_upto, p_next);
    if not found then
        return null;
    end if;
    select count(*) as count, max(publication_id) as last, sum(n)::bigint as n, min(lower(seqs)) as lo, max(upper(seqs)) as hi,
           bool_and(part = 0 and priority = v_first.priority and deliver_at is not distinct from v_first.deliver_at
                    and consumers is not distinct from v_first.consumers) as alike
    into v_all
    from pgqueue.publications
    where stream_id = p_consumer.stream_id and publication_id >= p_next and publication_id < p_next + p_limit
      and publication_id <= coalesce(p_upto, 9223372036854775807);
    if not v_all.alike or v_all.last - p_next + 1 <> v_all.count or (v_all.hi - v_all.lo <> v_all.n and v_all.count > 1) then
        return null;
    end if;
    -- What is visible beyond has a hole before it, unless the limit cut it off
    if v_all.count < p_limit and v_all.last < coalesce(p_upto, 9223372036854775807) and exists (
        select from pgqueue.publications where stream_id = p_consumer.stream_id and publication_id >= p_next + p_limit
                                           and publication_id <= coalesce(p_upto, 9223372036854775807)) then
        return null;
    end if;

    p_cursor.seen := p_cursor.seen + int8multirange(int8range(p_next, v_all.last, '[]'));
    p_cursor.turn := p_cursor.turn + 1;
    p_cursor.more := v_all.count = p_limit;
    p_cursor.watched := '{}';
    p_cursor.parked := '{}';
    if not (v_first.consumers is null or p_consumer.consumer_id = any (v_first.consumers)) then
        return p_cursor;
    end if;
    v_run.not_visible_until := case when v_first.deliver_at > clock_timestamp() then v_first.deliver_at end;
    v_run.consumer_id := p_consumer.consumer_id;
    v_run.state := case when v_run.not_visible_until is not null and p_consumer.ordering = 'none' then 'delayed' else 'ready' end;
    v_run.rank := case when p_consumer.ordering = 'none' then -v_first.priority else 0 end;
    v_run.priority := v_first.priority;
    v_run.deliver_count := 0;
    v_run.position := p_cursor.turn;
    v_run.turn := p_cursor.turn;
    perform pgqueue._insert_run(v_run, case when v_all.count = 1 then v_first.seqs else int8multirange(int8range(v_all.lo, v_all.hi)) end);
    if v_run.state = 'ready' then
        p_cursor.floors := pgqueue._lower_floors(p_cursor.floors, array[(v_run.rank, v_run.turn, 0)::pgqueue.floor]);
    else
        p_cursor.due_floor := least(p_cursor.due_floor, v_run.not_visible_until);
    end if;
    return p_cursor;
end $$;

-- Takes at most p_limit publications (and as many in holes) into runs.
--   p_upto  no publication after this one; null: all
-- Returns the cursor as it is then; the caller stores it. Needs the consumer's lock.
create or replace function pgqueue._take(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                         p_upto bigint, p_limit int) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_cursor     pgqueue.consumer_cursors := p_cursor;
    v_next       bigint := coalesce(upper(p_cursor.seen), 1);
    v_gaps       int8multirange := int8multirange(int8range(1, coalesce(upper(p_cursor.seen), 1))) - p_cursor.seen;
    v_snapshot   pg_snapshot;
    v_close      int8multirange := '{}';
    v_has_id     boolean := pg_current_xact_id_if_assigned() is not null;
    v_now        timestamptz := clock_timestamp();
    v_taken      int8multirange;
    v_in_gaps    int;
    v_beyond     int;
    v_ranks      int[];
    v_due        timestamptz;
begin
    if v_gaps = '{}' then
        v_cursor := pgqueue._take_plain(p_consumer, p_cursor, v_next, p_upto, p_limit);
        if v_cursor.consumer_id is not null then
            return v_cursor;
        end if;
        v_cursor := p_cursor;
    else
        v_snapshot := pg_current_snapshot();  -- before the look
        if v_cursor.watched <> '{}' and pgqueue._is_over(v_cursor.watched_below, v_snapshot, not v_has_id) then
            v_close := v_cursor.watched;
        end if;
        if v_cursor.parked <> '{}' then
            if pgqueue._is_over(v_cursor.parked_below, v_snapshot, not v_has_id) then
                v_close := v_close + v_cursor.parked;
            elsif v_now < v_cursor.parked_probe and p_consumer.ordering = 'none' then  -- for order, holes come first
                v_gaps := v_gaps - v_cursor.parked;
            else
                v_cursor.parked_probe := v_now + interval '1 s';
            end if;
        end if;
    end if;

    -- The look, and the runs for what it saw. The transaction gets its id here, after the statement's snapshot. Nearly always
    -- ids and seqs are contiguous; merging them one by one, range_agg, costs more than all the rest and is left out then.
    with held as materialized (
        select true as in_gap, p.publication_id, p.part, p.n, p.seqs, p.priority, p.deliver_at, p.consumers
        from unnest(v_gaps) g
        cross join lateral (select * from pgqueue.publications
                            where stream_id = p_consumer.stream_id
                              and publication_id >= lower(g) and publication_id < upper(g)
                            order by publication_id) p
        order by p.publication_id
        fetch first p_limit rows with ties
    ), new as materialized (
        select * from held
        union all
        (select false, publication_id, part, n, seqs, priority, deliver_at, consumers
         from pgqueue.publications
         where stream_id = p_consumer.stream_id
           and publication_id >= v_next and publication_id <= coalesce(p_upto, 9223372036854775807)
           and (select count(*) from held) < p_limit  -- or else what is left in the holes comes first
         order by publication_id
         fetch first p_limit rows with ties)
    ), grouped as materialized (
        select priority, case when deliver_at > v_now then deliver_at end as due,
               consumers is null or p_consumer.consumer_id = any (consumers) as mine,
               count(*) filter (where in_gap) as in_gaps, count(*) filter (where not in_gap) as beyond,
               count(*) filter (where part = 0) as ids, min(publication_id) as id_lo, max(publication_id) as id_hi,
               sum(n) as n, min(lower(seqs)) as lo, max(upper(seqs)) as hi
        from new
        group by 1, 2, 3
    ), id as materialized (
        select coalesce(sum(in_gaps), 0) as in_gaps, coalesce(sum(beyond), 0) as beyond, sum(ids) as n, min(id_lo) as lo, max(id_hi) as hi from grouped
    ), merged as (
        select priority, due, int8multirange(int8range(lo, hi)) as seqs
        from grouped
        where mine and not exists (select from grouped where mine and hi - lo <> n)
        union all
        select priority, case when deliver_at > v_now then deliver_at end, range_agg(seqs)
        from new
        where exists (select from grouped where mine and hi - lo <> n)
          and (consumers is null or p_consumer.consumer_id = any (consumers))
        group by 1, 2
    ), run as (
        insert into pgqueue.consumer_messages (consumer_id, state, rank, priority, deliver_count, position, turn,
                                               first_seq, n, seqs, not_visible_until)
        select p_consumer.consumer_id,
               case when m.due is not null and p_consumer.ordering = 'none' then 'delayed' else 'ready' end,
               case when p_consumer.ordering = 'none' then -m.priority else 0 end,
               m.priority, 0, v_cursor.turn + 1, v_cursor.turn + 1, c.first_seq, c.n, c.seqs, m.due
        from merged m cross join lateral pgqueue._chunks(m.seqs) c
        returning state, rank, not_visible_until
    )
    select case when id.n = id.hi - id.lo + 1 then int8multirange(int8range(id.lo, id.hi, '[]'))
                else (select range_agg(int8range(publication_id, publication_id, '[]')) from new) end,
           id.in_gaps, id.beyond,
           (select array_agg(distinct rank) from run where state = 'ready'), (select min(not_visible_until) from run where state = 'delayed')
    into v_taken, v_in_gaps, v_beyond, v_ranks, v_due
    from id;

    if v_taken is not null then
        v_cursor.seen := v_cursor.seen + v_taken;
        v_cursor.turn := v_cursor.turn + 1;
        v_cursor.floors := pgqueue._lower_floors(
            v_cursor.floors, array(select (r, v_cursor.turn, 0)::pgqueue.floor from unnest(v_ranks) r
                                   where r <> all (array(select rank from unnest(v_cursor.floors)))));
    end if;
    v_cursor.due_floor := least(v_cursor.due_floor, v_due);
    v_cursor.more := greatest(v_in_gaps, v_beyond) >= p_limit;

    if v_in_gaps >= p_limit then
        return v_cursor;  -- not all holes were looked into: none may be closed or watched
    end if;
    if v_close <> '{}' then
        v_cursor.seen := v_cursor.seen + v_close;
        v_cursor.watched := v_cursor.watched - v_close;
        v_cursor.parked := v_cursor.parked - v_close;
    end if;
    if v_taken is null and v_close = '{}' and v_gaps = '{}' then
        return v_cursor;
    end if;

    v_gaps := int8multirange(int8range(1, coalesce(upper(v_cursor.seen), 1))) - v_cursor.seen;
    v_cursor.watched := v_cursor.watched * v_gaps;
    v_cursor.parked := v_cursor.parked * v_gaps;
    if v_cursor.watched <> '{}' and (select count(*) from unnest(v_gaps - v_cursor.parked)) > 64 then
        -- an old transaction keeps them open: do not pay for them with every claim
        v_cursor.parked := v_cursor.parked + v_cursor.watched;
        v_cursor.parked_below := greatest(v_cursor.parked_below, v_cursor.watched_below);
        v_cursor.parked_probe := v_now + interval '1 s';
        v_cursor.watched := '{}';
    end if;
    if v_cursor.watched = '{}' and v_gaps - v_cursor.parked <> '{}' then
        v_cursor.watched := v_gaps - v_cursor.parked;
        v_cursor.watched_below := case when v_has_id then pgqueue._fresh_xid() else pg_current_xact_id() end;
    end if;
    return v_cursor;
end $$;

-- The floors, not above the given places.
create or replace function pgqueue._lower_floors(p_floors pgqueue.floor[], p_places pgqueue.floor[]) returns pgqueue.floor[]
language plpgsql immutable
as $$
begin
    if coalesce(cardinality(p_places), 0) = 0 then
        return p_floors;
    elsif p_floors = '{}' and cardinality(p_places) = 1 then
        return p_places;
    end if;
    return (select array_agg((f.rank, f.turn, f.first_seq)::pgqueue.floor order by f.rank)
            from (select distinct on (rank) rank, turn, first_seq
                  from unnest(p_floors || p_places) order by rank, turn, first_seq) f);
end $$;

-- A consumer's cursor. Errors: PQ002 when the consumer was dropped meanwhile.
create or replace function pgqueue._cursor(p_consumer_id int) returns pgqueue.consumer_cursors
language plpgsql stable
as $$
declare
    v_cursor pgqueue.consumer_cursors;
begin
    select * into v_cursor from pgqueue.consumer_cursors where consumer_id = p_consumer_id order by version desc limit 1;
    if not found then
        raise exception 'the consumer was dropped' using errcode = 'PQ002', hint = 'Create it again.';
    end if;
    return v_cursor;
end $$;

-- Stores a cursor if it is not the stored one any more: a new version, and the one before deleted.
--   p_busy  something was claimed or settled; otherwise that leases were looked at is not worth a write
-- Needs the consumer's lock.
create or replace function pgqueue._save_cursor(p_stored pgqueue.consumer_cursors, p_cursor pgqueue.consumer_cursors,
                                                p_busy boolean) returns void
language plpgsql
as $$
begin
    if not p_busy then
        p_cursor.lease_probe := p_stored.lease_probe;
    end if;
    if p_cursor is distinct from p_stored then
        delete from pgqueue.consumer_cursors where consumer_id = p_stored.consumer_id and version = p_stored.version;
        p_cursor.version := p_stored.version + 1;
        insert into pgqueue.consumer_cursors select p_cursor.*;
    end if;
end $$;
