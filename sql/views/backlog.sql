-- How much a consumer has before it.

-- The messages that are new for a consumer: counted in the next 1,000 publications, and estimated from them beyond.
create or replace function pgqueue._new_messages(p_consumer_id int) returns bigint
language sql stable
as $$
    with consumer as (
        select c.consumer_id, c.stream_id, k.next_publication as next, pgqueue._gap_ids(k) as gaps
        from pgqueue.consumers c cross join lateral pgqueue._cursor(c.consumer_id) k
        where c.consumer_id = p_consumer_id
    ), gap as (
        select coalesce(sum(p.message_count), 0) as message_count
        from consumer c
        cross join lateral (select g from unnest(c.gaps) g limit 100) g
        cross join lateral (select message_count from pgqueue.publications
                            where stream_id = c.stream_id and publication_id >= lower(g.g) and publication_id < upper(g.g)
                              and (consumers is null or c.consumer_id = any (consumers))
                            order by publication_id limit 1000) p
    ), sample as (
        select coalesce(sum(p.message_count) filter (where p.consumers is null or c.consumer_id = any (p.consumers)), 0) as message_count,
               count(*) as rows, min(p.publication_id) as first, max(p.publication_id) as last, min(c.stream_id) as stream_id
        from consumer c
        cross join lateral (select publication_id, message_count, consumers from pgqueue.publications
                            where stream_id = c.stream_id and publication_id >= c.next
                            order by publication_id limit 1000) p
    )
    select (gap.message_count + sample.message_count * case when sample.rows < 1000 then 1
                                    else 1 + (pgqueue.last_publication(sample.stream_id) - sample.last)::numeric / (sample.last - sample.first + 1)
                               end)::bigint
    from gap, sample
$$;

-- How many messages a consumer has not claimed yet; an estimate where very many publications are new.
create or replace function pgqueue.reader_backlog(p_consumer_id int) returns bigint
language sql stable
as $$
    select pgqueue._new_messages(p_consumer_id)
           + coalesce((select sum(message_count) from pgqueue.consumer_messages where consumer_id = p_consumer_id and state <> 'claimed'), 0)::bigint
$$;
