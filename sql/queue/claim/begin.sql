-- The beginning of every claim. serve_claim() and do_due_work() do what a claim with the consumer's lock has to do
-- first.

-- Locks the claims of a checkpoint reader. The caller has the reader's lock. Errors: as lock_consumer().
create or replace function _pgqueue.lock_claims_of(p_reader uuid) returns void
language plpgsql as $$
begin
    perform _pgqueue.await('claims of checkpoint reader ' || p_reader,
        'select count(*) from (select from pgqueue.reader_claims where reader = ($2 ->> 0)::uuid '
        'order by claim_id for update) c',  -- lock: reader claim
        null, jsonb_build_array(p_reader));
end $$;

-- Locks what a checkpoint reader may change: itself, its claims, and its consumer. Returns the consumer. Errors: PQ002;
-- as lock_consumer().
create or replace function _pgqueue.own_reader(p_reader uuid, p_consumer_id int) returns pgqueue.consumers
language plpgsql as $$
begin
    perform _pgqueue.lock_reader(p_reader);
    perform _pgqueue.lock_claims_of(p_reader);
    perform _pgqueue.lock_consumer(p_consumer_id);
    return _pgqueue.consumer_of(p_consumer_id);
end $$;

-- Begins a claim: makes all checks that do not depend on what there is to claim, in one order for all calls, and sends
-- what schedules have due. (claim() calls it only if something may have to be refused or done: nearly never.)
--   p_call  claim: also receive, and the calls of pgmq. where: receive_where. reader: reader_claim. group:
--           plan_partitions and read_partitions
--   p_max   messages; of a reader null: all
--   p_visibility_timeout    null: the consumer's
--   p_stream, p_name        the consumer; for a reader ...
--   p_reader, p_consumer_id ... the reader, and the id of its consumer
-- Returns the consumer, with the visibility timeout of this claim. If it is paused, the caller claims nothing. Errors:
-- PQ007, PQ003, PQ001, PQ002, PQ006. Locks: for a reader, as own_reader(); the schedules that are due.
create or replace function _pgqueue.begin_claim(p_call text, p_max bigint, p_visibility_timeout interval,
                                                p_stream text default null, p_name text default null,
                                                p_reader uuid default null, p_consumer_id int default null)
returns pgqueue.consumers language plpgsql as $$
declare
    v_consumer pgqueue.consumers;
begin
    perform _pgqueue.check_claim(p_call, p_max, p_visibility_timeout);
    if p_call = 'reader' then
        v_consumer := _pgqueue.own_reader(p_reader, p_consumer_id);
    else
        v_consumer := _pgqueue.consumer(p_stream, p_name, case p_call when 'group' then 'group' else 'consumer' end);
    end if;
    v_consumer := _pgqueue.check_kind(p_call, v_consumer);
    v_consumer.visibility_timeout := coalesce(p_visibility_timeout, v_consumer.visibility_timeout);
    if v_consumer.scheduled then
        perform _pgqueue.on_claim(v_consumer.stream_id);
    end if;
    return v_consumer;
end $$;

-- Whether all claims of a consumer need its lock: its settings require it, or messages may have to be dropped first.
create or replace function _pgqueue.always_locks(p_consumer pgqueue.consumers) returns boolean
language sql as $$
    select _pgqueue.claims_in_turn(p_consumer)
        or (p_consumer.on_full = 'drop_oldest' and p_consumer.max_backlog is not null
            and _pgqueue.has_capacity(p_consumer, _pgqueue.last_seq(p_consumer.stream_id), 0) is null)
$$;
