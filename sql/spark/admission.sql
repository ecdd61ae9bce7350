-- The size of a micro-batch of a Spark query. consumer_available (operate/consumer_lag.sql) returns how many messages
-- are available.

-- As serve_claim(), for a claim of at most p_max_bytes of data, and at least one message. The claim is made and
-- measured. A claim with too much data is rolled back, and made again with as many messages as fit. So the bound is
-- exact, whichever messages are claimed, and one try is enough if p_want is about the number that fits. Needs the
-- consumer's lock. Returns the cursor, which the caller stores, and how many messages and bytes the claim has.
create or replace function _pgqueue.serve_claim_within(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                       p_want bigint, p_upto bigint, p_reader uuid, p_max_bytes bigint,
                                                       out o_cursor pgqueue.consumer_cursors,
                                                       out o_claimed pgqueue.claimed, out o_bytes bigint)
language plpgsql as $$
declare
    v_fill  record;
    v_size  record;
    v_tries int := 0;
begin
    loop
        begin
            v_fill := _pgqueue.serve_claim(p_consumer, p_cursor, p_want, p_upto, p_reader);
            o_cursor := v_fill.o_cursor;
            o_claimed := v_fill.o_claimed;
            v_size := _pgqueue.size_of_claim(p_consumer.stream_id, o_claimed, p_max_bytes);
            if v_size.o_fitting >= o_claimed.message_count or (o_claimed.message_count > 1) is not true then
                o_bytes := v_size.o_bytes;
                return;
            end if;
            raise exception using errcode = 'PQ099';
        exception when sqlstate 'PQ099' then
            -- concurrent claims may change the messages each time, but their number shrinks
            v_tries := v_tries + 1;
            p_want := greatest(1, least(v_size.o_fitting, case when v_tries > 3 then p_want / 2 end));
        end;
    end loop;
end $$;

-- Whether the limits of a whole consumer (queue/claim/throttle.sql) allow no message now, although some are left that
-- were published up to p_upto. Called before a claim, and with the consumer's lock: until its end the limits can only
-- allow more.
create or replace function _pgqueue.limits_hold_back(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                                     p_upto bigint) returns boolean
language plpgsql as $$
declare
    v_below bigint;
begin
    if not _pgqueue.is_throttled(p_consumer) or _pgqueue.throttled_until(p_consumer, p_cursor) is null then
        return false;
    elsif lower(_pgqueue.new_ids(p_cursor)) <= p_upto then
        return true;
    end if;
    -- other claimers may have taken later messages, which have higher numbers than the last publications up to p_upto
    v_below := (select max(upper(seqs)) from _pgqueue.last_readable(p_consumer.stream_id, false, p_upto + 1, 1000));
    return exists (select from _pgqueue.unfinished(p_consumer.consumer_id, coalesce(v_below, 9223372036854775807))
                   where state <> 'claimed' and (not_visible_until > clock_timestamp()) is not true);
end $$;

-- The number of bytes of data of a claim, and how many of its messages fit into p_max_bytes, in the order of delivery.
-- It sums up blocks of 1,000 numbers first, and then the messages of one block. The data itself is not read.
create or replace function _pgqueue.size_of_claim(p_stream_id int, p_claim pgqueue.claimed, p_max_bytes bigint,
                                                  out o_bytes bigint, out o_fitting bigint)
language plpgsql stable as $$
begin
    execute format($query$
        with range as materialized (
            select row_number() over (order by m.i, lower(g)) as no, lower(g) as lo, upper(g) as hi
            from (select seqs, row_number() over () as i from _pgqueue.claimed_bundles($1)) m
            cross join lateral unnest(m.seqs) g
        ), block as materialized (
            select r.no, b.lo, b.hi, m.messages, m.bytes
            from range r
            cross join lateral (select i as lo, least(i + 1000, r.hi) as hi
                                from generate_series(r.lo, r.hi - 1, 1000) i) b
            cross join lateral (select count(*) as messages,
                                coalesce(sum(coalesce(octet_length(data), octet_length(data_bytes))), 0) as bytes
                                from pgqueue.messages_%1$s where seq >= b.lo and seq < b.hi) m
        ), edge as materialized (
            select * from (select *, sum(bytes) over line as upto, sum(messages) over line - messages as before
                           from block window line as (order by no, lo)) b
            where upto > $2 order by no, lo limit 1
        )
        select coalesce((select sum(bytes) from block), 0),
               coalesce((select before from edge)
                        + (select count(*)
                           from edge e
                           cross join lateral (select sum(coalesce(octet_length(data), octet_length(data_bytes)))
                                                          over (order by seq) as bytes
                                               from pgqueue.messages_%1$s where seq >= e.lo and seq < e.hi) m
                           where e.upto - e.bytes + m.bytes <= $2),
                        9223372036854775807)
        $query$, p_stream_id)
    into o_bytes, o_fitting using p_claim, p_max_bytes;
end $$;

-- Returns the average number of bytes of data of the last 100 messages of a stream; null: it has none. A reader with a
-- limit of bytes estimates the number of messages with it.
create or replace function pgqueue.recent_size(p_stream_id int) returns float8
language plpgsql stable as $$
declare
    v_size float8;
begin
    if exists (select from pgqueue.streams where stream_id = p_stream_id) then
        execute format('select avg(coalesce(octet_length(data), octet_length(data_bytes))) '
                       'from (select data, data_bytes from pgqueue.messages_%s order by seq desc limit 100) m',
                       p_stream_id)
        into v_size;
    end if;
    return v_size;
end $$;
