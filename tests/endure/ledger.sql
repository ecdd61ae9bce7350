-- What was sent, and what came of it: the actors note it in the transactions of their work. See judge.py.

create schema endure;
set search_path = endure;

create table state (round int, checkpoint int, begin_at jsonb, judged_batch bigint);
insert into state values (1, 1, null, -1);

-- One row for each message of the round, by the transaction that sent it. What was rolled back is not here.
create table sent (n bigint primary key, key text not null);

-- Each delivery: of the worker and the group by themselves, of the streams that Spark writes by the judge.
create table delivered (no bigint generated always as identity, who text not null, n bigint not null, key text);

-- Each try of a micro-batch of the query without a consumer, with its messages in order of n.
create table batches (no bigint generated always as identity, checkpoint int, batch bigint, n bigint[] not null);

-- How far the judge has read the streams that Spark writes.
create table read (stream text primary key, upto jsonb);
insert into read values ('plain'), ('keyed');

-- Each micro-batch of the query without a consumer in this round, as it was tried first.
create view first_tries as
select t.n from state s
cross join lateral (select distinct on (b.batch) b.n from batches b
                    where b.checkpoint = s.checkpoint and b.batch > s.judged_batch order by b.batch, b.no) t;

-- What came to the query without a consumer in this round.
create view cursor as select first.n from first_tries t, unnest(t.n) first (n);

-- For each way to consume: the number of deliveries, of messages that never came, of deliveries too many, of
-- messages that nobody has sent, and of messages of a key that came after a later one (where keys have an order).
create function verdicts()
returns table (who text, delivered bigint, lost bigint, twice bigint, unsent bigint, disordered bigint)
language sql set search_path = endure set work_mem = '256MB' as $$
    with all_of_them as (select d.who, d.n from delivered d union all select 'cursor', n from cursor),
    each as (select a.who, a.n, count(*) as times, bool_and(s.n is null) as unsent
             from all_of_them a left join sent s using (n) group by a.who, a.n),
    steps as (select d.who, d.n < lag(d.n) over (partition by d.who, d.key order by d.no) as back from delivered d
              where d.who <> 'plain')
    select w.who, coalesce(sum(e.times), 0)::bigint,
           (select count(*) from sent) - count(*) filter (where not e.unsent),
           coalesce(sum(e.times - 1), 0)::bigint, count(*) filter (where e.unsent),
           (select count(*) from steps s where s.who = w.who and s.back)
    from (values ('plain'), ('keyed'), ('cursor'), ('workers'), ('group')) w (who) left join each e using (who)
    group by w.who order by w.who
$$;

-- The micro-batches that were tried more than once, and those that had other messages when they were tried again.
create function replays() returns table (replayed bigint, changed bigint)
language sql set search_path = endure as $$
    select count(*) filter (where tries > 1), count(*) filter (where kinds > 1)
    from (select count(*) as tries, count(distinct n) as kinds from batches group by checkpoint, batch) b
$$;
