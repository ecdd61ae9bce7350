-- How long messages are kept.

-- Sets how long the messages of a stream are kept; without any limit, for ever, as at first. A message may go as soon as one of the limits
-- allows it, and goes when maintain() is called. They are told of some eighth of what is kept at a time, so that much more is stored at times.
--   p_for       from its publication
--   p_messages  as long as not so many came after it (about: numbers that were rolled back count)
--   p_bytes     as long as what came after it, with its indexes, does not take so much
--   p_done      only until every consumer is done with it; all, while there is no consumer
--   p_unread    what a consumer still owes when a limit allows it to go: keep it; or drop it, except out of a live claim, and count it
--   p_dead      dead letters, from their death; null: for ever. They keep their messages
-- Errors: PQ001, PQ003. Locks: none that others wait for.
create or replace function pgqueue.set_retention(
    p_stream text, p_for interval default null, p_messages bigint default null, p_bytes bigint default null, p_done boolean default false,
    p_unread text default 'keep', p_dead interval default null) returns void
language plpgsql
as $$
declare
    v_stream pgqueue.streams := pgqueue._stream(p_stream);
begin
    if p_for is not null then
        perform pgqueue._check_age('p_for', p_for);
    end if;
    if p_dead is not null then
        perform pgqueue._check_age('p_dead', p_dead);
    end if;
    if p_messages < 1 then
        raise exception 'p_messages is null or at least 1, not %', p_messages using errcode = 'PQ003', column = 'p_messages';
    elsif p_bytes < 1 then
        raise exception 'p_bytes is null or at least 1, not %', p_bytes using errcode = 'PQ003', column = 'p_bytes';
    elsif p_done is null then
        raise exception 'p_done is true or false, not null' using errcode = 'PQ003', column = 'p_done';
    elsif p_unread is null or p_unread not in ('keep', 'drop') then
        raise exception 'p_unread is keep or drop, not %', coalesce(quote_literal(p_unread), 'null') using errcode = 'PQ003', column = 'p_unread';
    elsif p_unread = 'drop' and p_for is null and p_messages is null and p_bytes is null then
        raise exception 'p_unread is drop, and no age, count or size says when'
            using errcode = 'PQ003', column = 'p_unread', hint = 'Give one of these; or let consumers be done with it (keep).';
    end if;
    if p_for is null and p_messages is null and p_bytes is null and not p_done and p_dead is null then
        delete from pgqueue.retention where stream_id = v_stream.stream_id;
        return;
    end if;
    insert into pgqueue.retention (stream_id, keep_for, keep_messages, keep_bytes, until_done, unread, keep_dead)
    values (v_stream.stream_id, p_for, p_messages, p_bytes, p_done, p_unread, p_dead)
    on conflict (stream_id) do update
    set keep_for = excluded.keep_for, keep_messages = excluded.keep_messages, keep_bytes = excluded.keep_bytes, until_done = excluded.until_done,
        unread = excluded.unread, keep_dead = excluded.keep_dead;
end $$;

-- Raises PQ003 unless an age is positive. (Unlike a timeout it may be more than ten years.)
create or replace function pgqueue._check_age(p_argument text, p_age interval) returns void
language plpgsql
as $$
begin
    if not isfinite(clock_timestamp() + p_age) or not isfinite(clock_timestamp() - p_age) or p_age <= interval '0' then
        raise exception '% is an interval longer than 0, not %', p_argument, quote_literal(p_age) using errcode = 'PQ003', column = p_argument;
    end if;
exception when datetime_field_overflow then
    raise exception '% is too long: %', p_argument, quote_literal(p_age) using errcode = 'PQ003', column = p_argument;
end $$;

-- Bytes from which on a stream without a retention is worth a word.
create or replace function pgqueue._large_stream() returns bigint language sql immutable parallel safe as 'select 1::bigint << 30';

-- One row per stream: how long its messages are kept, what that takes, what was trimmed, and what is kept although it is due, by whom.
do $view$ begin perform pgqueue._make_view('stream_retention', $query$
    select s.name as stream, r.keep_for, r.keep_messages, r.keep_bytes, coalesce(r.until_done, false) as until_done,
           coalesce(r.unread, 'keep') as unread, r.keep_dead, t.bytes, t.tables,
           (select p.published_at from pgqueue.publications p where p.stream_id = s.stream_id order by p.publication_id limit 1) as oldest_at,
           coalesce(m.message_count, 0) as trimmed, m.trimmed_at, l.bytes as held_bytes, l.by as held_by, r.maintained_at,
           case when r.stream_id is null and t.bytes >= pgqueue._large_stream() then 'its messages are kept for ever: see set_retention'
                when r.maintained_at < clock_timestamp() - interval '1 day' then 'maintain() was not called for a day: nothing is trimmed'
                when r.stream_id is not null and r.maintained_at is null then 'maintain() was not called yet: nothing is trimmed'
                when l.transaction is not null then 'nothing is trimmed until it ends: the ' || l.transaction
                when (select k.sent_at from pgqueue.dedup_keys k where k.stream_id = s.stream_id order by k.sent_at limit 1)
                     < clock_timestamp() - coalesce(s.dedup_window, '0') - interval '1 day' then 'maintain() was not called for a day: old dedup keys are kept'
           end as advice
    from pgqueue.streams s
    left join pgqueue.retention r using (stream_id)
    left join pgqueue.trims m using (stream_id)
    cross join lateral (select sum(x.bytes)::bigint as bytes, count(*) as tables from pgqueue._message_tables(s.stream_id) x) t
    cross join lateral (
        select coalesce(sum(pg_total_relation_size(to_regclass(format('pgqueue.%I', pgqueue._leaf_name(h.stream_id, h.leaf))))), 0)::bigint as bytes,
               array(select distinct b from pgqueue.leaves x cross join unnest(x.held_by) b where x.stream_id = s.stream_id order by b) as by,
               (select min(b) from pgqueue.leaves x cross join unnest(x.held_by) b  -- see _history_holders
                where x.stream_id = s.stream_id and b ~ '^(open|prepared) transaction\M') as transaction
        from pgqueue.leaves h where h.stream_id = s.stream_id and h.held_by <> '{}') l
$query$); end $view$;
