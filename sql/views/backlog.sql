-- How much a consumer has before it.

-- The messages that are new for a consumer. Publications are counted, not messages, and of these the next _limit_counted() (some 15 ms). What is
-- beyond is told by the numbers of its messages: too many by those that were given out and not published, rolled back ones above all.
create or replace function pgqueue._new_messages(p_consumer_id int) returns bigint
language sql stable
as $$
    with consumer as (
        select c.consumer_id, c.stream_id, k.next_publication as next, pgqueue._gap_ids(k) as gaps
        from pgqueue.consumers c cross join lateral pgqueue._cursor(c.consumer_id) k
        where c.consumer_id = p_consumer_id
    ), gap as (
        select coalesce(sum(p.message_count), 0) as mine
        from consumer c
        cross join lateral unnest(c.gaps) g
        cross join lateral (select message_count from pgqueue.publications
                            where stream_id = c.stream_id and publication_id >= lower(g) and publication_id < upper(g)
                              and pgqueue._is_for(consumers, c.consumer_id)) p
    ), counted as (
        select coalesce(sum(p.message_count) filter (where pgqueue._is_for(p.consumers, c.consumer_id)), 0) as mine,
               sum(p.message_count) as of_all, count(*) as publications, max(upper(p.seqs)) as seqs_end, min(c.stream_id) as stream_id
        from consumer c
        cross join lateral (select message_count, consumers, seqs from pgqueue.publications
                            where stream_id = c.stream_id and publication_id >= c.next
                            order by publication_id limit pgqueue._limit_counted()) p
    )
    select (gap.mine + counted.mine + case when counted.publications < pgqueue._limit_counted() then 0 else
                coalesce(greatest(0, (select upper(seqs) from pgqueue.publications
                                      where stream_id = counted.stream_id order by publication_id desc limit 1) - counted.seqs_end)
                         * counted.mine / counted.of_all, 0) end)::bigint
    from gap, counted
$$;

-- How many messages a consumer has not claimed yet; an estimate where very many publications are new.
create or replace function pgqueue.reader_backlog(p_consumer_id int) returns bigint
language sql stable
as $$
    select pgqueue._new_messages(p_consumer_id)
           + coalesce((select sum(message_count) from pgqueue.consumer_messages where consumer_id = p_consumer_id and state <> 'claimed'), 0)::bigint
$$;
