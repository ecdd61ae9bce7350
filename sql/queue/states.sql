-- The states of a consumer's messages, for all that read them and change nothing: views, statistics, peeking,
-- explaining, scanning, backlogs, retention, pgmq. For these, this file alone knows how runs, slots, claims and gaps
-- make states. The table at the top of queue/runs.sql names the functions that change states.
--
-- A message that is published to a consumer is new, unfinished, dead or done: new_sets(), unfinished(), and a row of
-- dead_messages. These functions become a part of the query that calls them.

-- What a consumer has taken and not finished: sets of messages in one state, and the claim that holds them.
--   p_below  only sets that begin before this number. (As a condition of the caller, on a column of another table, it
--            would not reach the indexes.)
-- Returns runs, and slots as runs. The columns from claim_id on are null unless the state is claimed; claim_count is
-- how many messages the claim had at first.
--
-- No index has all runs: a query that asks for a consumer without a state reads the runs of all consumers
-- (tests/sql/test_looking_cost.py). So each state has a branch, whose state is a constant. A caller with a condition on
-- state reads nothing of other branches. The runs of each claim are looked up apart (offset 0): the planner, left
-- alone, may begin with the runs that anybody has claimed.
create or replace function _pgqueue.unfinished(p_consumer_id int, p_below bigint default 9223372036854775807)
returns table (state text, lane int, priority int, deliver_count int, arrival_no bigint, line_no bigint,
               first_seq bigint, message_count bigint, seqs int8multirange, not_visible_until timestamptz,
               last_delivered_at timestamptz, note jsonb, key bigint, piece bigint, claim_id bigint, owner text,
               reader uuid, claimed_at timestamptz, lease_until timestamptz, claim_count bigint)
language sql stable
as $$
    select r.its_state, r.lane, r.priority, r.deliver_count, r.arrival_no, r.line_no, r.first_seq, r.message_count,
           r.seqs, r.not_visible_until, r.last_delivered_at, r.note, r.key, r.piece,
           null::bigint, null::text, null::uuid, null::timestamptz, null::timestamptz, null::bigint
    from (select 'ready' as its_state, * from pgqueue.consumer_messages
          where consumer_id = p_consumer_id and state = 'ready'
          union all
          select 'delayed', * from pgqueue.consumer_messages where consumer_id = p_consumer_id and state = 'delayed'
          union all
          select 'unfiltered', * from pgqueue.consumer_messages
          where consumer_id = p_consumer_id and state = 'unfiltered'
          union all
          select 'waiting', * from pgqueue.consumer_messages
          where consumer_id = p_consumer_id and state = 'waiting' and key is not null) r
    where r.first_seq < p_below
    union all
    select 'claimed', m.lane, m.priority, m.deliver_count, m.arrival_no, m.line_no, m.first_seq, m.message_count,
           m.seqs, m.not_visible_until, m.last_delivered_at, m.note, m.key, m.piece,
           c.claim_id, c.owner, c.reader, c.claimed_at, c.lease_until, c.message_count
    from pgqueue.claims c
    cross join lateral (select * from pgqueue.consumer_messages r
                        where r.claim_id = c.claim_id and r.state = 'claimed' offset 0) m
    where c.consumer_id = p_consumer_id and c.live and m.first_seq < p_below
    union all
    select r.state, r.lane, r.priority, r.deliver_count, r.arrival_no, r.line_no, r.first_seq, r.message_count, r.seqs,
           r.not_visible_until, r.last_delivered_at, r.note, r.key, r.piece,
           c.claim_id, c.owner, null, c.claimed_at, c.lease_until, c.message_count
    from pgqueue.slots s
    cross join lateral _pgqueue.runs_of_slot(s) r
    left join lateral (select r.claim_id, s.owner, s.claimed_at, s.lease_until, s.message_count::bigint
                       where r.state = 'claimed') c on true
    where s.consumer_id = p_consumer_id and r.first_seq < p_below
$$;

-- The state of a set, as it is shown: what is not visible yet is delayed, also where a key or an order comes first.
create or replace function _pgqueue.shown_state(p_state text, p_not_visible_until timestamptz) returns text
language sql volatile
as $$
    select case when p_state in ('ready', 'waiting') and p_not_visible_until > clock_timestamp() then 'delayed'
                else p_state end
$$;

-- The claims of a consumer that hold messages; claimed slots among them.
create or replace function _pgqueue.live_claims(p_consumer_id int) returns setof pgqueue.claims
language sql stable
as $$
    select * from pgqueue.claims where consumer_id = p_consumer_id and live
    union all
    select (_pgqueue.claim_of(s)).* from pgqueue.slots s where s.consumer_id = p_consumer_id and s.token is not null
$$;

-- The runs that a claim holds. A slot has none.
create or replace function _pgqueue.held(p_claim_id bigint) returns setof pgqueue.consumer_messages
language sql stable
as $$ select * from pgqueue.consumer_messages where claim_id = p_claim_id and state = 'claimed' $$;

-- The publications that are new for a consumer: it has not taken them.
create or replace function _pgqueue.new_ids(p_cursor pgqueue.consumer_cursors) returns int8multirange
language sql stable
as $$ select _pgqueue.gap_ids(p_cursor) + int8multirange(int8range(p_cursor.next_publication, null)) $$;

-- The messages that are new for a consumer, a set for each publication, in the order of the publications.
--   p_limit  look at so many publications after each gap, and as many in each gap; null: at all
create or replace function _pgqueue.new_sets(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                             p_limit bigint default null)
returns table (publication_id bigint, seqs int8multirange, priority int, published_at timestamptz,
               deliver_at timestamptz)
language sql stable
as $$
    select p.publication_id, case when p.seqs && k.kept then p.seqs - k.kept else p.seqs end, p.priority,
           p.published_at, p.deliver_at
    from (select _pgqueue.kept(p_cursor) as kept, _pgqueue.new_ids(p_cursor) as ids offset 0) k
    cross join lateral unnest(k.ids) g
    cross join lateral (select * from pgqueue.publications
                        where stream_id = p_consumer.stream_id and publication_id >= lower(g)
                          and publication_id < coalesce(upper(g), 9223372036854775807)
                        order by publication_id limit p_limit) p
    where _pgqueue.is_for(p.consumers, p_consumer.consumer_id) and (p.seqs <@ k.kept) is not true
$$;

-- What a consumer has taken of some messages, and not finished, by their keys: for those who send (judge_keys()).
--   p_seqs          the messages
--   p_keys          the hashes of their keys
--   p_publications  the publications that made them visible
--   p_quick         only what is known without looking at all runs
create or replace function _pgqueue.unfinished_of(p_consumer pgqueue.consumers, p_seqs int8multirange, p_keys bigint[],
                                                  p_publications bigint[], p_quick boolean)
returns setof int8multirange
language sql stable
as $$
    select r.seqs
    from (select m.seqs from _pgqueue.unfinished(p_consumer.consumer_id, upper(p_seqs)) m
          where not p_quick
            and (m.state <> 'waiting'
                 or m.key = any (case p_consumer.ordering when 'stream' then '{0}' else p_keys end))
          union all
          select m.seqs from pgqueue.consumer_messages m
          where p_quick and m.consumer_id = p_consumer.consumer_id
            and m.key = any (case p_consumer.ordering when 'stream' then '{0}' else p_keys end)
          union all
          select m.seqs
          from unnest(p_publications) f
          cross join lateral (select deliver_at from pgqueue.publications
                              where stream_id = p_consumer.stream_id and publication_id = f offset 0) p
          cross join lateral (select seqs from pgqueue.consumer_messages x
                              where x.consumer_id = p_consumer.consumer_id and x.state = 'delayed'
                                and x.not_visible_until = p.deliver_at offset 0) m
          where p_quick
          union all
          select s.seqs + coalesce(_pgqueue.rest_of(s), '{}') from pgqueue.slots s
          where p_quick and s.consumer_id = p_consumer.consumer_id) r
    where r.seqs && p_seqs
$$;
