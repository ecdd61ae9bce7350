-- Retention: how long the messages of a stream are kept.

-- Sets how long the messages of a stream are kept; without limits: without end, the default.
-- Each call sets all limits: an argument that is left out is no limit, whatever an earlier call has set.
-- A message may go as soon as one of the limits allows it, and goes when maintain() is called. Messages go in segments
-- of about an eighth of what is kept, so up to that much more is stored.
--   p_for       from its publication
--   p_messages  until so many messages came after it (about: numbers that were rolled back count)
--   p_bytes     until the messages after it, with their indexes, take so much
--   p_done      only until every consumer is done with it; all messages, while there is no consumer
--   p_unread    what to do with a message that a limit allows to go and a consumer still owes: keep it; or drop it,
--               except out of a live claim, and count it
--   p_dead      dead letters, from their death; null: without end. They keep their messages
-- Errors: PQ001, PQ003. Locks: none that others wait for.
create or replace function pgqueue.set_retention(p_stream text, p_for interval default null,
                                                 p_messages bigint default null, p_bytes bigint default null,
                                                 p_done boolean default false, p_unread text default 'keep',
                                                 p_dead interval default null) returns void
language plpgsql as $$
declare
    v_id int := (_pgqueue.stream(p_stream)).stream_id;
begin
    perform _pgqueue.check_age('p_for', p_for);
    perform _pgqueue.check_age('p_dead', p_dead);
    perform _pgqueue.check_positive('p_messages', p_messages);
    perform _pgqueue.check_positive('p_bytes', p_bytes);
    perform _pgqueue.check_choice('p_done', p_done::text, '{true, false}');
    perform _pgqueue.check_choice('p_unread', p_unread, '{keep, drop}');
    if p_unread = 'drop' and p_for is null and p_messages is null and p_bytes is null then
        raise exception 'p_unread is drop, and no age, count or size says when'
            using errcode = 'PQ003', column = 'p_unread',
                  hint = 'Give one of these; or let consumers be done with it (keep).';
    end if;
    perform _pgqueue.await('the retention of stream ' || quote_literal(p_stream), case
        when coalesce(p_for, p_dead) is null and coalesce(p_messages, p_bytes) is null and not p_done then
            'delete from pgqueue.retention where stream_id = $1 returning 0'  -- lock: maintain
        else
            'insert into pgqueue.retention select r.* from jsonb_populate_record(null::pgqueue.retention, $2) r '
            'on conflict (stream_id) do update '  -- lock: maintain
            'set (keep_for, keep_messages, keep_bytes, until_done, unread, keep_dead) = (excluded.keep_for, '
            'excluded.keep_messages, excluded.keep_bytes, excluded.until_done, excluded.unread, excluded.keep_dead) '
            'returning 0' end,
        v_id, jsonb_build_object('stream_id', v_id, 'keep_for', p_for, 'keep_messages', p_messages,
                                 'keep_bytes', p_bytes, 'until_done', p_done, 'unread', p_unread, 'keep_dead', p_dead,
                                 'trim_from', 1));
end $$;

-- Raises PQ003 unless an age is positive, or null. (Unlike a timeout it may be more than ten years.)
create or replace function _pgqueue.check_age(p_argument text, p_age interval) returns void
language plpgsql as $$
begin
    if not isfinite(clock_timestamp() + p_age) or not isfinite(clock_timestamp() - p_age) or p_age <= interval '0' then
        raise exception '% is an interval longer than 0, not %', p_argument, quote_literal(p_age)
            using errcode = 'PQ003', column = p_argument;
    end if;
exception when datetime_field_overflow then
    raise exception '% is too long: %', p_argument, quote_literal(p_age) using errcode = 'PQ003', column = p_argument;
end $$;

-- One row per stream: how long its messages are kept, what they take, what was trimmed, and what is kept although it is
-- due, and for which consumers.
do $view$ begin perform _pgqueue.make_view('stream_retention', $query$
    select s.name as stream, r.keep_for, r.keep_messages, r.keep_bytes, coalesce(r.until_done, false) as until_done,
           coalesce(r.unread, 'keep') as unread, r.keep_dead, t.bytes, t.tables,
           (select p.published_at from pgqueue.publications p where p.stream_id = s.stream_id
            order by p.publication_id limit 1) as oldest_at,
           coalesce(m.message_count, 0) as trimmed, m.trimmed_at, l.bytes as held_bytes, l.by as held_by,
           r.maintained_at,
           case when r.stream_id is null and t.bytes >= _pgqueue.large_stream()
                then 'its messages are kept for ever: see set_retention'
                when r.maintained_at < clock_timestamp() - interval '1 day'
                then 'maintain() was not called for a day: nothing is trimmed'
                when r.stream_id is not null and r.maintained_at is null
                then 'maintain() was not called yet: nothing is trimmed'
                when h.transaction is not null then 'nothing is trimmed until it ends: the ' || h.transaction
                when (select k.sent_at from pgqueue.dedup_keys k where k.stream_id = s.stream_id
                      order by k.sent_at limit 1)
                     < clock_timestamp() - coalesce(s.dedup_window, '0') - interval '1 day'
                then 'maintain() was not called for a day: old dedup keys are kept'
           end as advice
    from pgqueue.streams s
    left join pgqueue.retention r using (stream_id)
    left join pgqueue.trims m using (stream_id)
    cross join lateral (select sum(x.bytes)::bigint as bytes, count(*) as tables
                        from _pgqueue.message_tables(s.stream_id) x) t
    cross join lateral (
        select coalesce(sum(pg_total_relation_size(
                            to_regclass(format('pgqueue.%I', _pgqueue.segment_name(h.stream_id, h.segment))))),
                        0)::bigint as bytes,
               array(select distinct b from pgqueue.segments x cross join unnest(x.held_by) b
                     where x.stream_id = s.stream_id order by b) as by
        from pgqueue.segments h where h.stream_id = s.stream_id and h.held_by <> '{}') l
    cross join lateral (select min(b) as transaction from unnest(l.by) b  -- see history_holders()
                        where b ~ E'^(open|prepared) transaction\\M') h
$query$); end $view$;
