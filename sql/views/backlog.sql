-- How much a consumer has before it.

-- How many messages publications have for a consumer. Publications are counted, not messages, and of these the first p_limit. What is
-- beyond is told by the numbers of its messages: too many by those that were given out and not published, rolled back ones above all.
--   p_ids   of the publications
--   p_kept  messages that do not count; null: none
create or replace function pgqueue._messages_in(p_consumer pgqueue.consumers, p_ids int8multirange, p_kept int8multirange, p_limit bigint) returns bigint
language sql stable
as $$
    with counted as (
        select coalesce(sum(case when p.seqs && p_kept then pgqueue._cardinality(p.seqs - p_kept) else p.message_count end)
                            filter (where pgqueue._is_for(p.consumers, p_consumer.consumer_id)), 0) as mine,
               sum(p.message_count) as of_all, count(*) as publications, max(upper(p.seqs)) as seqs_end
        from (select p.*
              from unnest(p_ids) g
              cross join lateral (select message_count, consumers, seqs from pgqueue.publications
                                  where stream_id = p_consumer.stream_id and publication_id >= lower(g)
                                    and publication_id < coalesce(upper(g), 9223372036854775807)
                                  order by publication_id limit p_limit) p
              limit p_limit) p
    )
    select (mine + case when publications < p_limit then 0 else
                coalesce(greatest(0, (select upper(seqs) from pgqueue.publications
                                      where stream_id = p_consumer.stream_id and publication_id < coalesce(upper(p_ids), 9223372036854775807)
                                      order by publication_id desc limit 1) - seqs_end)
                         * mine / of_all, 0) end)::bigint
    from counted
$$;

-- The messages that are new for a consumer: exact up to p_limit publications (a millisecond for 3,000 or more).
create or replace function pgqueue._new_messages(p_consumer_id int, p_limit bigint) returns bigint
language sql stable
as $$
    select pgqueue._messages_in(c, pgqueue._gap_ids(k) + int8multirange(int8range(k.next_publication, null)), pgqueue._kept(k), p_limit)
    from pgqueue.consumers c cross join lateral pgqueue._cursor(c.consumer_id) k
    where c.consumer_id = p_consumer_id
$$;

-- When the first of what is new for a consumer, and to be delivered now, was published; null: there is none, or only far behind what is for others.
create or replace function pgqueue._oldest_new(p_consumer_id int) returns timestamptz
language sql stable
as $$
    select min(p.published_at)
    from pgqueue.consumers c
    cross join lateral pgqueue._cursor(c.consumer_id) k
    cross join lateral unnest(pgqueue._gap_ids(k) + int8multirange(int8range(k.next_publication, null))) g
    cross join lateral (
        select published_at
        from (select published_at, consumers, deliver_at, seqs from pgqueue.publications
              where stream_id = c.stream_id and publication_id >= lower(g) and publication_id < coalesce(upper(g), 9223372036854775807)
              order by publication_id limit pgqueue._limit_shown()) f
        where pgqueue._is_for(f.consumers, c.consumer_id) and (f.deliver_at > clock_timestamp()) is not true
          and (f.seqs <@ pgqueue._kept(k)) is not true
        limit 1) p
    where c.consumer_id = p_consumer_id
$$;

-- When a message was sent; null: it is gone.
create or replace function pgqueue._sent_at(p_stream_id int, p_seq bigint) returns timestamptz
language plpgsql stable
as $$
declare
    v_at timestamptz;
begin
    if p_seq is not null then
        execute format('select inserted_at from pgqueue.messages_%s where seq = $1', p_stream_id) into v_at using p_seq;
    end if;
    return v_at;
end $$;

-- How many messages a consumer has not claimed yet; an estimate where very many publications are new.
create or replace function pgqueue.reader_backlog(p_consumer_id int) returns bigint
language sql stable
as $$
    select pgqueue._new_messages(p_consumer_id, pgqueue._limit_counted())
           + coalesce((select sum(message_count) from pgqueue._unclaimed(p_consumer_id)), 0)::bigint
$$;

-- How far a consumer is behind, for the progress of its query.
--   backlog    messages that it has not claimed yet, see reader_backlog
--   oldest_at  when the oldest of them that could be delivered now was sent; null: there is none, or it is gone
create or replace function pgqueue.reader_lag(p_consumer_id int, out backlog bigint, out oldest_at timestamptz)
language sql stable
as $$
    select pgqueue._new_messages(c.consumer_id, pgqueue._limit_counted()) + coalesce(u.messages, 0)::bigint,
           least(pgqueue._oldest_new(c.consumer_id), pgqueue._sent_at(c.stream_id, u.oldest))
    from pgqueue.consumers c
    cross join lateral (
        select sum(message_count) as messages,
               min(first_seq) filter (where message_count > 0 and (not_visible_until > clock_timestamp()) is not true) as oldest
        from pgqueue._unclaimed(c.consumer_id)) u
    where c.consumer_id = p_consumer_id
$$;

-- How many messages a consumer could claim now, about: what waits for its key counts, what is delayed does not, and where very many
-- publications are new it is an estimate. For queries that wait for a number of messages. Locks nothing.
create or replace function pgqueue.reader_available(p_consumer_id int) returns bigint
language sql stable
as $$
    select coalesce(pgqueue._new_messages(p_consumer_id, pgqueue._limit_counted())
                    + (select coalesce(sum(message_count), 0) from pgqueue._unclaimed(p_consumer_id)
                       where (not_visible_until > clock_timestamp()) is not true), 0)::bigint
$$;
