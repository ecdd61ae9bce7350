-- Dead letters: what a consumer gave up. Its messages are kept with them; see also keep_dead in functions/retention.sql.

-- Chooses dead letters of a consumer, those with the lowest numbers first, and takes them out. Needs the consumer's lock.
--   p_seqs, p_reason, p_before  these alone; null: whatever they are
--   p_max                       at most so many; null: all
-- Returns them.
create or replace function pgqueue._take_dead(p_consumer_id int, p_seqs int8multirange, p_reason text, p_before timestamptz, p_max bigint)
returns setof pgqueue.dead_messages
language plpgsql
as $$
declare
    v_chosen bigint[];
    v_set    int8multirange;
    v_dead   pgqueue.dead_messages;
    v_part   int8multirange;
begin
    select array_agg(dead_id), range_agg(seqs) into v_chosen, v_set
    from (select dead_id, seqs * coalesce(p_seqs, seqs) as seqs from pgqueue.dead_messages
          where consumer_id = p_consumer_id and (p_seqs is null or seqs && p_seqs) and (p_reason is null or reason = p_reason)
            and (died_at < p_before or p_before is null)
          for update skip locked) d;  -- maintain() may be deleting some
    if pgqueue._cardinality(v_set) > p_max then
        v_set := pgqueue._below(v_set, pgqueue._bound_of(v_set, p_max));
    end if;
    for v_dead in select * from pgqueue.dead_messages where dead_id = any (v_chosen) and seqs && v_set loop
        v_part := v_dead.seqs * v_set;
        if v_part = v_dead.seqs then
            delete from pgqueue.dead_messages where dead_id = v_dead.dead_id;
        else
            update pgqueue.dead_messages
            set seqs = seqs - v_part, message_count = message_count - pgqueue._cardinality(v_part) where dead_id = v_dead.dead_id;
            v_dead.seqs := v_part;
            v_dead.message_count := pgqueue._cardinality(v_part);
        end if;
        return next v_dead;
    end loop;
end $$;

-- Delivers dead letters again, to the consumer that gave them up and to no other. They arrive anew, at the end of its line, in the order of
-- their numbers; with p_max those with the lowest numbers first.
--   p_seqs    these messages; null: all
--   p_reason  those that died of this reason; null: of any
--   p_before  those that died before; null: at any time
--   p_max     at most so many; null: all
--   p_reset   as if they had never been delivered; else their deliver_count goes on, and with max_deliver_count their next failure is the last
-- Returns how many messages that were: called at once by several, each comes once. Errors: PQ001, PQ002, PQ003, PQ007. Locks: the consumer.
create or replace function pgqueue.redrive(p_stream text, p_consumer text, p_seqs bigint[] default null, p_reason text default null,
                                           p_before timestamptz default null, p_max int default 1000, p_reset boolean default true) returns bigint
language plpgsql
as $$
declare
    v_consumer pgqueue.consumers := pgqueue._consumer(p_stream, p_consumer);
    v_stored   pgqueue.consumer_cursors;
    v_cursor   pgqueue.consumer_cursors;
    v_dead     record;
    v_run      pgqueue.consumer_messages;
    v_count    bigint := 0;
    v_lanes    int[] := '{}';
    v_set      int8multirange := '{}';
begin
    perform pgqueue._check_dead(p_max);
    perform pgqueue._lock_consumer(v_consumer.consumer_id);
    v_stored := pgqueue._cursor(v_consumer.consumer_id);
    v_cursor := v_stored;
    v_cursor.last_line_no := v_cursor.last_line_no + 1;
    for v_dead in
        select priority, deliver_count, note, range_agg(seqs) as seqs
        from (select priority, case when p_reset is not false then 0 else deliver_count end as deliver_count,
                     -- what would end them at once again, and how large their claims may be, is not taken along
                     pgqueue._noted(note, '{"at_most": null, "expires": null}' || case when p_reset is not false then '{"error": null}' else '{}' end::jsonb)
                         as note, seqs
              from pgqueue._take_dead(v_consumer.consumer_id, pgqueue._set_of(p_seqs), p_reason, p_before, p_max)) d
        group by priority, deliver_count, note
    loop
        v_run.consumer_id := v_consumer.consumer_id;
        -- behind what a filter has not judged yet it is judged once more, in its turn
        v_run.state := case when v_consumer.ordering <> 'none' and v_cursor.sift_from is not null then 'unsifted' else 'ready' end;
        v_run.lane := case when v_consumer.by_key then 1 else -v_dead.priority end;
        v_run.priority := v_dead.priority;
        v_run.deliver_count := v_dead.deliver_count;
        v_run.note := v_dead.note;
        v_run.arrival_no := v_cursor.last_line_no;
        v_run.line_no := v_cursor.last_line_no;
        v_count := v_count + pgqueue._store_run(v_run, v_dead.seqs);
        v_lanes := v_lanes || case when v_run.state = 'ready' then v_run.lane end;
        v_set := v_set + v_dead.seqs;
    end loop;
    if v_count > 0 then
        v_cursor.taken := v_cursor.taken + v_count;
        v_cursor := pgqueue._lower_scan_from(v_cursor, array(
            select distinct (l, v_cursor.last_line_no, 0)::pgqueue.line_place from unnest(v_lanes) l where l is not null));
        perform pgqueue._save_cursor(v_stored, v_cursor, true);
        perform pgqueue._enter_keys(v_consumer, v_set);
        perform pg_notify(pgqueue._channel(v_consumer.stream_id), '');
    end if;
    return v_count;
end $$;

-- Deletes dead letters: nobody gets them any more, and their messages need not be kept for them.
--   p_seqs, p_reason, p_before, p_max  as in redrive
-- Returns how many messages that were. Errors: PQ001, PQ002, PQ003, PQ007. Locks: the consumer.
create or replace function pgqueue.purge_dead(p_stream text, p_consumer text, p_seqs bigint[] default null, p_reason text default null,
                                              p_before timestamptz default null, p_max int default null) returns bigint
language plpgsql
as $$
declare
    v_id int := (pgqueue._consumer(p_stream, p_consumer)).consumer_id;
begin
    perform pgqueue._check_dead(p_max);
    perform pgqueue._lock_consumer(v_id);
    return (select coalesce(sum(message_count), 0) from pgqueue._take_dead(v_id, pgqueue._set_of(p_seqs), p_reason, p_before, p_max));
end $$;

-- Raises PQ003 or PQ007 for what cannot be done to dead letters.
create or replace function pgqueue._check_dead(p_max int) returns void
language plpgsql stable
as $$
begin
    perform pgqueue._check_isolation();
    if p_max < 1 then
        raise exception 'p_max is null or at least 1, not %', p_max using errcode = 'PQ003', column = 'p_max';
    end if;
end $$;

-- Reads dead letters with what they hold, in the order of their numbers. Changes nothing.
--   p_seqs, p_reason, p_before  as in redrive
--   p_max                       at most so many
--   p_after                     those with a higher number alone: the last one of the page before
-- Returns a row per message: why it died, and what the last error was; how often it was delivered, and whose claim it was in, at last; when.
-- A message that somebody deleted has null in inserted_at. Errors: PQ001, PQ002, PQ003. Locks nothing.
create or replace function pgqueue.read_dead(p_stream text, p_consumer text, p_seqs bigint[] default null, p_reason text default null,
                                             p_before timestamptz default null, p_max int default 100, p_after bigint default 0)
returns table (seq bigint, key text, data text, data_bytes bytea, headers jsonb, priority int, inserted_at timestamptz,
               reason text, error text, details jsonb, deliver_count int, owner text, died_at timestamptz)
language plpgsql stable
as $$
declare
    v_consumer pgqueue.consumers := pgqueue._consumer(p_stream, p_consumer);
begin
    perform pgqueue._check_number('p_max', p_max, 1, 2147483647);
    perform pgqueue._check_number('p_after', p_after, 0, 9223372036854775806);
    return query execute format($q$
        select s.seq, m.key, m.data, m.data_bytes, m.headers, s.priority, m.inserted_at,
               s.reason, s.note ->> 'error', s.details, s.deliver_count, s.owner, s.died_at
        from (select d.*, q.seq
              from (select d.*, g.g
                    from pgqueue.dead_messages d cross join lateral unnest(d.seqs * coalesce($2, d.seqs)) g (g)
                    where d.consumer_id = $1 and ($2 is null or d.seqs && $2) and ($3 is null or d.reason = $3)
                      and (d.died_at < $4 or $4 is null) and upper(g.g) > $6 + 1
                    order by lower(g.g) limit $5) d
              cross join lateral generate_series(greatest(lower(d.g), $6 + 1), least(upper(d.g) - 1, greatest(lower(d.g), $6 + 1) + $5)) q (seq)
              order by q.seq limit $5) s
        left join lateral (select * from pgqueue.messages_%s x where x.seq = s.seq) m on true
        order by s.seq $q$, v_consumer.stream_id)
    using v_consumer.consumer_id, pgqueue._set_of(p_seqs), p_reason, p_before, p_max, p_after;
end $$;
