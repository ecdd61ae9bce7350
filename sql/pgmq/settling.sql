-- Settling by message number: delete, archive, set_vt. Any caller that knows a number can settle the message, as in
-- pgmq: without a fence, also long after the lease has ended, and if another worker has claimed the message since.

-- The heads of the live claims that hold messages of a set, except those of Spark queries.
create or replace function pgmq._claims_of(p_consumer pgqueue.consumers, p_set int8multirange)
returns setof pgqueue.consumer_messages language sql stable as $$
    select distinct on (h.bundle_no) h.*
    from pgqueue.consumer_messages m
    cross join lateral _pgqueue.bundles(array[coalesce(m.head, m.bundle_no)]) h
    where p_set <> '{}' and m.consumer_id = p_consumer.consumer_id and m.token is not null and m.reader is null
      and _pgqueue.meets(m.seqs, p_set)
    order by h.bundle_no
$$;

-- Those messages of a set that a queue has, except those of Spark queries. It reads all bundles of the consumer and all
-- new publications.
create or replace function pgmq._unsettled(p_consumer pgqueue.consumers, p_set int8multirange) returns int8multirange
language sql stable as $$
    select coalesce(range_agg(h.seqs), '{}')
    from (select seqs from _pgqueue.unfinished(p_consumer.consumer_id) where reader is null
          union all
          select seqs from _pgqueue.new_sets(p_consumer, _pgqueue.cursor(p_consumer.consumer_id))) f
    cross join lateral (select _pgqueue.common(f.seqs, p_set) as seqs offset 0) h
    where h.seqs <> '{}'
$$;

-- Removes messages from a queue that are visible, delayed, or not in it. Returns those that it had. One call cancels
-- all that the queue has, because each call searches the queue. If another session settles some of them first, the call
-- is rolled back and repeated for each half, as its result is only a number. Locks: the consumer.
create or replace function pgmq._cancel(p_consumer pgqueue.consumers, p_set int8multirange) returns int8multirange
language plpgsql as $$
declare
    v_set   int8multirange := case when _pgqueue.cardinality(p_set) > 1 then pgmq._unsettled(p_consumer, p_set)
                                   else p_set end;
    v_seqs  bigint[] := array(select generate_series(lower(g), upper(g) - 1) from unnest(v_set) g);
    v_half  int := cardinality(v_seqs) / 2;
    v_count bigint;
begin
    if v_set = '{}' then
        return '{}';
    end if;
    v_count := pgqueue.cancel(p_consumer.stream_name, 'pgmq', v_seqs);
    if v_count between 1 and cardinality(v_seqs) - 1 then
        raise exception using errcode = 'PQ099';
    end if;
    return case when v_count > 0 then v_set else '{}' end;
exception when sqlstate 'PQ099' then
    return pgmq._cancel(p_consumer, pgmq._set(v_seqs[:v_half]))
         + pgmq._cancel(p_consumer, pgmq._set(v_seqs[v_half + 1:]));
end $$;

-- Removes messages from a queue, claimed or not. Returns those that it had. Locks: their claims; for unread messages,
-- the consumer.
create or replace function pgmq._settle(p_consumer pgqueue.consumers, p_set int8multirange) returns int8multirange
language plpgsql as $$
declare
    v_done    int8multirange := '{}';
    v_head    pgqueue.consumer_messages;
    v_bundles pgqueue.consumer_messages[];
    v_part    int8multirange;
begin
    perform _pgqueue.check_isolation();
    for v_head in select * from pgmq._claims_of(p_consumer, p_set) loop
        v_bundles := _pgqueue.lock_bundles(v_head.bundle_no, v_head.token);
        continue when v_bundles is null;
        v_part := _pgqueue.common(_pgqueue.seqs_of(v_bundles), p_set);
        perform _pgqueue.finish(v_bundles, _pgqueue.claim_id(v_head.bundle_no, v_head.token), v_part, false, null,
                                null);
        v_done := v_done + v_part;
    end loop;
    return v_done + case when p_set = v_done then '{}' else pgmq._cancel(p_consumer, p_set - v_done) end;
end $$;

-- The numbers of an array that are in a set, in the order of the array.
create or replace function pgmq._in_set(msg_ids bigint[], p_set int8multirange) returns setof bigint
language sql immutable as $$
    select i from (select i, min(n) as n from unnest(msg_ids) with ordinality u (i, n) group by i) d
    where p_set @> i order by n
$$;

create or replace function pgmq.delete(queue_name text, msg_id bigint) returns boolean
language plpgsql as $$ begin return pgmq._settle(pgmq._consumer(queue_name), pgmq._set(array[msg_id])) <> '{}'; end $$;

create or replace function pgmq.delete(queue_name text, msg_ids bigint[]) returns setof bigint
language plpgsql as $$
begin
    return query select pgmq._in_set(msg_ids, pgmq._settle(pgmq._consumer(queue_name), pgmq._set(msg_ids)));
end $$;

-- Moves messages from a queue to its archive, the view a_<queue>.
create or replace function pgmq.archive(queue_name text, msg_ids bigint[]) returns setof bigint
language plpgsql as $$
declare
    v_consumer pgqueue.consumers := pgmq._consumer(queue_name);
    v_rows     pgmq.message_record[] := array(select r from pgmq._rows(v_consumer, pgmq._set(msg_ids)) r);
    v_done     int8multirange := pgmq._settle(v_consumer, pgmq._set(msg_ids));
begin
    insert into pgmq._archived (queue_name, msg_id, read_ct, enqueued_at, last_read_at, vt, message, headers)
    select m.queue_name, r.msg_id, r.read_ct, r.enqueued_at, r.last_read_at, r.vt, r.message, r.headers
    from unnest(v_rows) r join pgmq.meta m on lower(m.queue_name) = v_consumer.stream_name
    where v_done @> r.msg_id
    on conflict on constraint _archived_pkey do update  -- delivered again after seek or replay
    set read_ct = excluded.read_ct, enqueued_at = excluded.enqueued_at, last_read_at = excluded.last_read_at,
        archived_at = now(), vt = excluded.vt, message = excluded.message, headers = excluded.headers;
    return query select pgmq._in_set(msg_ids, v_done);
end $$;

create or replace function pgmq.archive(queue_name text, msg_id bigint) returns boolean
language plpgsql as $$ begin return exists (select from pgmq.archive(queue_name, array[msg_id])); end $$;

-- Moves messages of a claim to a new claim, whose lease ends at p_until. Returns those that the claim held.
create or replace function pgmq._hold(p_head pgqueue.consumer_messages, p_set int8multirange, p_until timestamptz)
returns int8multirange language plpgsql as $$
declare
    v_bundles pgqueue.consumer_messages[] := _pgqueue.lock_bundles(p_head.bundle_no, p_head.token);
    v_part    int8multirange := _pgqueue.seqs_of(v_bundles) * p_set;
    v_bundle  pgqueue.consumer_messages;
begin
    if v_bundles is null or v_part = '{}' then
        return '{}';
    end if;
    foreach v_bundle in array _pgqueue.remove_messages(v_bundles, v_part) loop
        v_bundle.token := _pgqueue.new_token(v_bundle.token & 1 = 0);
        v_bundle.lease_until := p_until;
        v_bundle.members := null;
        v_bundle.head := null;
        v_bundle.lane := _pgqueue.lane_long();
        v_bundle.place := _pgqueue.place_at(p_until);
        perform _pgqueue.store(v_bundle, v_bundle.seqs);
    end loop;
    return v_part;
end $$;

-- Sets the time until which messages are not visible, claimed or not, and returns them.
create or replace function pgmq.set_vt(queue_name text, msg_ids bigint[], vt timestamptz)
returns setof pgmq.message_record language plpgsql as $$
declare
    v_consumer pgqueue.consumers := pgmq._consumer(queue_name);
    v_set      int8multirange := pgmq._set(msg_ids);
    v_held     int8multirange := '{}';
    v_head     pgqueue.consumer_messages;
begin
    perform _pgqueue.check_isolation();
    if isfinite(vt) is not true then
        raise exception 'vt must be a number of seconds or a time, not %', coalesce(vt::text, 'null')
            using errcode = 'P0001', column = 'vt';
    end if;
    for v_head in select * from pgmq._claims_of(v_consumer, v_set) loop
        if vt > clock_timestamp() then
            v_held := v_held + pgmq._hold(v_head, v_set, vt);
        else  -- its claim ends, because the message is visible at once
            perform _pgqueue.give_back(_pgqueue.claim_id(v_head.bundle_no, v_head.token), v_set, 'failed', '0', null);
        end if;
    end loop;
    if v_set <> v_held then  -- the messages that no claim holds
        perform pgqueue.postpone(v_consumer.stream_name, 'pgmq', array(
            select generate_series(lower(g), upper(g) - 1) from unnest(v_set - v_held) g), vt);
    end if;
    return query select * from pgmq._rows(v_consumer, v_set);
end $$;

create or replace function pgmq.set_vt(queue_name text, msg_ids bigint[], vt integer) returns setof pgmq.message_record
language plpgsql as $$
begin
    return query select * from pgmq.set_vt(queue_name, msg_ids, clock_timestamp() + make_interval(secs => vt));
end $$;

create or replace function pgmq.set_vt(queue_name text, msg_id bigint, vt timestamptz) returns setof pgmq.message_record
language plpgsql as $$ begin return query select * from pgmq.set_vt(queue_name, array[msg_id], vt); end $$;

create or replace function pgmq.set_vt(queue_name text, msg_id bigint, vt integer) returns setof pgmq.message_record
language plpgsql as $$ begin return query select * from pgmq.set_vt(queue_name, array[msg_id], vt); end $$;
