-- The states of a consumer's messages, for code that reads them and changes nothing: views, statistics, peeking,
-- explaining, scanning, backlogs, retention, pgmq. Only this file derives states from bundles and gaps. The table at
-- the top of queue/state/bundles.sql names the functions that change states.
--
-- A message that is published to a consumer is new (new_sets()), unfinished (unfinished()), dead (a row of
-- dead_messages), or done. These functions are inlined.

-- What a consumer has taken and not finished: sets of messages in one state, and the claim that holds them.
--   p_below  only sets that begin before this number. (A condition of the caller on a column of another table would not
--            use the index.)
-- The columns from claim_id on are null unless the state is claimed. claim_count is the number of messages in the
-- claim.
create or replace function _pgqueue.unfinished(p_consumer_id int, p_below bigint default 9223372036854775807)
returns table (state text, lane int, priority int, deliver_count int, arrival_no bigint, place bigint, first_seq bigint,
               message_count bigint, seqs int8multirange, not_visible_until timestamptz, last_delivered_at timestamptz,
               note jsonb, key bigint, bundle_no bigint, claim_id bigint, owner text, reader uuid,
               claimed_at timestamptz, lease_until timestamptz, claim_count bigint)
language sql stable as $$
    select case when m.token is not null then 'claimed' when m.lane = _pgqueue.lane_unfiltered() then 'unfiltered'
                when m.lane = _pgqueue.lane_delayed()
                     and (m.key is null or m.place <= _pgqueue.place_at(m.not_visible_until))  -- else for tokens
                then 'delayed'
                when m.lane >= _pgqueue.lane_delayed()
                     or (m.predecessor is not null and not _pgqueue.is_deleted(m.predecessor)) then 'waiting'
                else 'ready' end,
           m.lane, m.priority,
           case when m.token is null then m.deliver_count else _pgqueue.one_more(m.deliver_count) end, m.arrival_no,
           m.place, lower(m.seqs), m.message_count, m.seqs, m.not_visible_until,
           coalesce(m.claimed_at, m.last_delivered_at), m.note,
           coalesce(m.key, case when m.predecessor is not null then m.keys[1] end), m.bundle_no,
           case when m.reader is null then _pgqueue.claim_id(coalesce(m.head, m.bundle_no), m.token)
                else (select r.claim_id from pgqueue.reader_claims r
                      where r.reader = m.reader and r.token = m.token) end,
           m.owner, m.reader, m.claimed_at,
           case when m.head is null then m.lease_until
                else (select h.lease_until from _pgqueue.bundles(array[m.head]) h where h.token = m.token) end,
           case when m.token is null then null when m.head is null and m.members is null then m.message_count
                else (select sum(h.message_count)
                      from _pgqueue.bundles_of(coalesce(m.head, m.bundle_no), m.token) h)::bigint end
    from pgqueue.consumer_messages m
    where m.consumer_id = p_consumer_id and m.first_seq < p_below and m.message_count > 0
$$;

-- The state of a set for users: what is not visible yet is delayed, also where it waits for a key or an order.
create or replace function _pgqueue.shown_state(p_state text, p_not_visible_until timestamptz) returns text
language sql volatile as $$
    select case when p_state in ('ready', 'waiting') and p_not_visible_until > clock_timestamp() then 'delayed'
                else p_state end
$$;

-- The claims of a consumer that hold messages, as their heads.
create or replace function _pgqueue.live_claims(p_consumer_id int) returns setof pgqueue.consumer_messages
language sql stable as $$
    select * from pgqueue.consumer_messages
    where consumer_id = p_consumer_id and token is not null and head is null
$$;

-- The live claims of a consumer, with the first message of each, for views.
create or replace function _pgqueue.shown_claims(p_consumer_id int)
returns table (claim_id bigint, owner text, reader uuid, claimed_at timestamptz, lease_until timestamptz,
               message_count bigint, remaining bigint, first_seq bigint)
language sql stable rows 10 as $$
    select m.claim_id, m.owner, m.reader, m.claimed_at, m.lease_until,
           coalesce((select r.message_count from pgqueue.reader_claims r
                     where r.reader = m.reader and r.claim_id = m.claim_id), m.claim_count),
           sum(m.message_count)::bigint, min(m.first_seq)
    from _pgqueue.unfinished(p_consumer_id) m where m.state = 'claimed'
    group by m.claim_id, m.owner, m.reader, m.claimed_at, m.lease_until, m.claim_count
$$;

-- The bundles that keep a key from being assigned, by number: assigned with it, or claimed; and whether such a claim
-- holds all keys.
create or replace function _pgqueue.users_of(p_consumer_id int, p_key bigint)
returns table (bundle_no bigint, all_keys boolean)
language sql stable as $$
    select m.bundle_no, m.keys is null from pgqueue.consumer_messages m
    where m.consumer_id = p_consumer_id
      and (p_key = any (m.keys) or (m.lane = _pgqueue.lane_long() and m.keys is null and m.token is not null))
$$;

-- The publications that are new for a consumer: those that it has not taken.
create or replace function _pgqueue.new_ids(p_cursor pgqueue.consumer_cursors) returns int8multirange
language sql stable as $$
    select _pgqueue.gap_ids(p_cursor) + int8multirange(int8range(p_cursor.next_publication, null))
        - coalesce((select range_agg(int8range(publication_id, publication_id, '[]')) from pgqueue.taken_ahead
                    where consumer_id = p_cursor.consumer_id and publication_id >= p_cursor.next_publication), '{}')
$$;

-- The first publication id behind all that is taken.
create or replace function _pgqueue.end_of_taken(p_cursor pgqueue.consumer_cursors) returns bigint
language plpgsql stable as $$
begin
    return greatest(p_cursor.next_publication, (
        select publication_id + 1 from pgqueue.taken_ahead
        where consumer_id = p_cursor.consumer_id and publication_id >= p_cursor.next_publication
        order by publication_id desc limit 1));
end $$;

-- The messages that are new for a consumer, a set for each publication, in the order of the publications.
--   p_limit  read at most this many publications after each gap, and in each gap; null: all
create or replace function _pgqueue.new_sets(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                             p_limit bigint default null)
returns table (publication_id bigint, seqs int8multirange, priority int, published_at timestamptz,
               deliver_at timestamptz)
language sql stable as $$
    select p.publication_id, _pgqueue.less(p.seqs, k.excluded), p.priority, p.published_at, p.deliver_at
    from (select _pgqueue.excluded(p_cursor) as excluded, _pgqueue.new_ids(p_cursor) as ids offset 0) k
    cross join lateral unnest(k.ids) g
    cross join lateral (select * from pgqueue.publications
                        where stream_id = p_consumer.stream_id and publication_id >= lower(g)
                          and publication_id < coalesce(upper(g), 9223372036854775807)
                        order by publication_id limit p_limit) p
    where _pgqueue.is_for(p.consumers, p_consumer.consumer_id) and _pgqueue.less(p.seqs, k.excluded) <> '{}'
$$;

-- What a consumer has taken and not finished of some messages, by their keys; for senders (unfinished_by_key()).
--   p_seqs          the messages
--   p_keys          the hashes of their keys
--   p_publications  the publications that made them visible
--   p_quick         only what can be found without reading all bundles
create or replace function _pgqueue.unfinished_of(p_consumer pgqueue.consumers, p_seqs int8multirange, p_keys bigint[],
                                                  p_publications bigint[], p_quick boolean) returns setof int8multirange
language sql stable as $$
    select r.seqs
    from (select m.seqs from pgqueue.consumer_messages m
          where not p_quick and m.consumer_id = p_consumer.consumer_id and m.first_seq < upper(p_seqs)
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
                              where x.consumer_id = p_consumer.consumer_id and x.lane = _pgqueue.lane_delayed()
                                and x.place = _pgqueue.place_at(p.deliver_at) offset 0) m
          where p_quick) r
    where _pgqueue.meets(r.seqs, p_seqs)
$$;
