-- Settling by message number: delete, archive, set_vt. Whoever knows a number settles the message, as with pgmq:
-- without a fence, also long after its time was over, and also when another worker has it by then.
--
-- The claim of a number is looked up in the consumer's claimed slots, which are few, and then in its open claims.

-- The open claims that hold some messages of a set.
create or replace function pgmq._claims_of(p_consumer pgqueue.consumers, p_set int8multirange) returns bigint[]
language plpgsql
as $$
declare
    v_low bigint := (_pgqueue.cursor(p_consumer.consumer_id)).slots_low;
begin
    return array(
        select _pgqueue.slot_claim(s.slot, s.token) as claim_id from pgqueue.slots s
        where p_set <> '{}' and s.consumer_id = p_consumer.consumer_id and s.slot >= v_low and s.token is not null
          and s.seqs && p_set
        union all
        select c.claim_id from pgqueue.claims c
        where p_set <> '{}' and c.consumer_id = p_consumer.consumer_id and c.live
          and exists (select from pgqueue.consumer_messages m
                      where m.claim_id = c.claim_id and m.state = 'claimed' and m.seqs && p_set)
        order by claim_id);
end $$;

-- Removes messages from a queue, whoever has them. Returns which of them it had. Locks: their slots and claims; for
-- messages that nobody has read, the consumer.
create or replace function pgmq._settle(p_consumer pgqueue.consumers, p_set int8multirange) returns int8multirange
language plpgsql
as $$
declare
    v_low   bigint := (_pgqueue.cursor(p_consumer.consumer_id)).slots_low;
    v_done  int8multirange;
    v_id    bigint;
    v_claim pgqueue.claims;
    v_part  int8multirange;
begin
    perform _pgqueue.check_isolation();
    if p_set = '{}' then
        return p_set;
    end if;
    with gone as (
        delete from pgqueue.slots  -- lock: slot
        where consumer_id = p_consumer.consumer_id and slot >= v_low and token is not null and seqs <@ p_set
          and rest is null
        returning seqs
    )
    select coalesce(range_agg(seqs), '{}') into v_done from gone;
    foreach v_id in array pgmq._claims_of(p_consumer, p_set - v_done) loop
        v_claim := _pgqueue.lock_claim(v_id, false);
        continue when v_claim.claim_id is null;
        v_part := (select range_agg(seqs * p_set) from pgqueue.consumer_messages
                   where claim_id = v_id and state = 'claimed' and seqs && p_set);
        continue when v_part is null;
        perform _pgqueue.shrink_claim(v_claim, v_claim.remaining
                                               - _pgqueue.finish(v_claim, v_part, false, null, null));
        v_done := v_done + v_part;
    end loop;
    -- the others are visible, or delayed, or not there
    for v_id in select s from unnest(p_set - v_done) g cross join lateral generate_series(lower(g), upper(g) - 1) s loop
        if pgqueue.cancel(p_consumer.stream_name, 'pgmq', array[v_id]) > 0 then
            v_done := v_done + int8multirange(int8range(v_id, v_id, '[]'));
        end if;
    end loop;
    return v_done;
end $$;

-- The numbers of an array that are in a set, in the order of the array.
create or replace function pgmq._those(msg_ids bigint[], p_set int8multirange) returns setof bigint
language sql immutable
as $$ select i from (select i, min(n) as n from unnest(msg_ids) with ordinality u (i, n) group by i) d
      where p_set @> i order by n $$;

create or replace function pgmq.delete(queue_name text, msg_id bigint) returns boolean
language plpgsql
as $$
begin
    return pgmq._settle(pgmq._consumer(queue_name), pgmq._set(array[msg_id])) <> '{}';
end $$;

create or replace function pgmq.delete(queue_name text, msg_ids bigint[]) returns setof bigint
language plpgsql
as $$
begin
    return query select pgmq._those(msg_ids, pgmq._settle(pgmq._consumer(queue_name), pgmq._set(msg_ids)));
end $$;

-- Moves messages from a queue to its archive, the view a_<queue>.
create or replace function pgmq.archive(queue_name text, msg_ids bigint[]) returns setof bigint
language plpgsql
as $$
declare
    v_consumer pgqueue.consumers := pgmq._consumer(queue_name);
    v_name     varchar := (select m.queue_name from pgmq.meta m
                           where pgmq._stream_of(m.queue_name) = pgmq._stream_of(archive.queue_name));
    v_rows     pgmq.message_record[] := array(select r from pgmq._rows(v_consumer, pgmq._set(msg_ids)) r);
    v_done     int8multirange := pgmq._settle(v_consumer, pgmq._set(msg_ids));
begin
    insert into pgmq._archived (queue_name, msg_id, read_ct, enqueued_at, last_read_at, vt, message, headers)
    select v_name, r.msg_id, r.read_ct, r.enqueued_at, r.last_read_at, r.vt, r.message, r.headers
    from unnest(v_rows) r where v_done @> r.msg_id;
    return query select pgmq._those(msg_ids, v_done);
end $$;

create or replace function pgmq.archive(queue_name text, msg_id bigint) returns boolean
language plpgsql
as $$ begin return exists (select from pgmq.archive(queue_name, array[msg_id])); end $$;

-- Gives messages of a claim a claim of their own, whose lease ends at a time. Returns which of them the claim held.
create or replace function pgmq._hold(p_claim_id bigint, p_set int8multirange, p_until timestamptz)
returns int8multirange
language plpgsql
as $$
declare
    v_claim pgqueue.claims := _pgqueue.lock_claim(p_claim_id, false);
    v_own   pgqueue.claims := v_claim;
    v_run   pgqueue.consumer_messages;
    v_part  int8multirange := '{}';
begin
    if v_claim.claim_id is null then
        return '{}';
    end if;
    v_own.claim_id := _pgqueue.new_claim_id();
    v_own.message_count := 0;
    for v_run in select * from _pgqueue.take_out(p_claim_id, p_set) loop
        v_run.claim_id := v_own.claim_id;
        v_own.message_count := v_own.message_count + _pgqueue.store_run(v_run, v_run.seqs);
        v_part := v_part + v_run.seqs;
    end loop;
    if v_own.message_count > 0 then
        v_own.remaining := v_own.message_count;
        v_own.settled := 0;
        v_own.lease_until := p_until;
        perform _pgqueue.record_claim(v_own);
        delete from pgqueue.claims where claim_id = p_claim_id and remaining = v_own.remaining;
        update pgqueue.claims
        set message_count = message_count - v_own.remaining, remaining = remaining - v_own.remaining
        where claim_id = p_claim_id;
    end if;
    return v_part;
end $$;

-- Says until when messages are not visible, whoever has them, and returns them.
create or replace function pgmq.set_vt(queue_name text, msg_ids bigint[], vt timestamptz)
returns setof pgmq.message_record
language plpgsql
as $$
declare
    v_consumer pgqueue.consumers := pgmq._consumer(queue_name);
    v_set      int8multirange := pgmq._set(msg_ids);
    v_held     int8multirange := '{}';
    v_id       bigint;
begin  -- what is not claimed, or not any more, is postponed
    perform _pgqueue.check_isolation();
    if isfinite(vt) is not true then
        raise exception 'vt is a number of seconds or a time, not %', coalesce(vt::text, 'null')
            using errcode = 'P0001', column = 'vt';
    end if;
    foreach v_id in array pgmq._claims_of(v_consumer, v_set) loop
        if vt > clock_timestamp() then
            v_held := v_held + pgmq._hold(v_id, v_set, vt);
        else  -- it is visible at once, so its claim ends
            perform _pgqueue.give_back(v_id, v_set, 'named', '0', null);
        end if;
    end loop;
    if v_set <> v_held then
        perform pgqueue.postpone(pgmq._stream_of(queue_name), 'pgmq',
                                 array(select s from unnest(v_set - v_held) g
                                       cross join lateral generate_series(lower(g), upper(g) - 1) s), vt);
    end if;
    return query select * from pgmq._rows(v_consumer, v_set);
end $$;

create or replace function pgmq.set_vt(queue_name text, msg_ids bigint[], vt integer) returns setof pgmq.message_record
language plpgsql
as $$
begin
    return query select * from pgmq.set_vt(queue_name, msg_ids, clock_timestamp() + make_interval(secs => vt));
end $$;

create or replace function pgmq.set_vt(queue_name text, msg_id bigint, vt timestamptz)
returns setof pgmq.message_record
language plpgsql
as $$ begin return query select * from pgmq.set_vt(queue_name, array[msg_id], vt); end $$;

create or replace function pgmq.set_vt(queue_name text, msg_id bigint, vt integer) returns setof pgmq.message_record
language plpgsql
as $$
begin
    return query select * from pgmq.set_vt(queue_name, array[msg_id], clock_timestamp() + make_interval(secs => vt));
end $$;
