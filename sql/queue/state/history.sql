-- History: a consumer with keep_history keeps a record of what was acknowledged, by which worker, when, and with what
-- result. The token of a claim says whether its acknowledgement must record something: for keep_history, notify_done or
-- per_key_capacity, or because a reader has the claim (queue/state/consumer_messages.sql). Acknowledgements of other
-- claims do none of this.

-- An acknowledgement of a claim, or of some of its messages; or messages that were cancelled or replaced, without a
-- claim. A row is never updated.
-- on drop_consumer
create table if not exists pgqueue.completed_messages (
    consumer_id   int            not null,
    done_at       timestamptz    not null,
    seqs          int8multirange not null,
    message_count bigint         not null,
    deliver_count int            not null,  -- of the message that was delivered most often
    claim_id      bigint,
    claimed_at    timestamptz,
    owner         text,                     -- the application_name of the session that claimed, or cancelled
    result        jsonb                     -- of replaced messages {"replaced_by": seq}
);

-- Deletes the entries in key_backlog of messages that were just acknowledged.
create or replace function _pgqueue.delete_done_entries(p_consumer_id int, p_seqs int8multirange) returns void
language plpgsql as $$
begin
    delete from pgqueue.key_backlog
    where ctid = any (array(select b.ctid from unnest(p_seqs) g
                            cross join lateral (select x.ctid from pgqueue.key_backlog x
                                                where x.consumer_id = p_consumer_id
                                                  and x.seq >= lower(g) and x.seq < upper(g)
                                                for update skip locked) b));  -- lock: entry
end $$;

-- Records that messages of a claim were acknowledged, or that messages were cancelled: adds history and notifies, as
-- the settings of the consumer say.
--   p_bundle         has the consumer, the owner, and the time of the claim
--   p_claim_id       null: a cancellation
--   p_deliver_count  of the message that was delivered most often
create or replace function _pgqueue.record_done(p_bundle pgqueue.consumer_messages, p_claim_id bigint,
                                                p_seqs int8multirange, p_count bigint, p_deliver_count int,
                                                p_result jsonb) returns void
language plpgsql as $$
declare
    v_consumer pgqueue.consumers;
begin
    if p_count = 0 then
        return;
    end if;
    select * into v_consumer from pgqueue.consumers where consumer_id = p_bundle.consumer_id;
    if v_consumer.keep_history is not null then
        insert into pgqueue.completed_messages (consumer_id, done_at, seqs, message_count, deliver_count, claim_id,
                                                claimed_at, owner, result)
        values (p_bundle.consumer_id, clock_timestamp(), p_seqs, p_count, p_deliver_count, p_claim_id,
                p_bundle.claimed_at, p_bundle.owner, p_result);
    end if;
    if v_consumer.notify_done then
        perform pg_notify(_pgqueue.done_channel(p_bundle.consumer_id), '');
    end if;
    if v_consumer.per_key_capacity is not null then
        perform _pgqueue.delete_done_entries(p_bundle.consumer_id, p_seqs);
    end if;
end $$;

-- The first acknowledgement of a message; no row when there is none, or when it is no longer kept. The search reads all
-- acknowledgements since the message was written.
create or replace function _pgqueue.done_with(p_consumer pgqueue.consumers, p_seq bigint)
returns setof pgqueue.completed_messages language plpgsql stable as $$
declare
    v_written timestamptz;
begin
    execute format('select inserted_at from pgqueue.messages_%s where seq = $1', p_consumer.stream_id)
    into v_written using p_seq;
    return query
        select * from pgqueue.completed_messages
        where consumer_id = p_consumer.consumer_id and done_at >= coalesce(v_written, '-infinity') and seqs @> p_seq
        order by done_at limit 1;
end $$;

-- How messages with history ended: done, cancelled or replaced.
create or replace function _pgqueue.end_of(p_done pgqueue.completed_messages) returns text
language sql immutable as $$
    select case when p_done.claim_id is not null then 'done' when p_done.result is not null then 'replaced'
                else 'cancelled' end
$$;

-- Deletes history that is older than keep_history, at most limit_deleted() rows for each consumer. Returns how many
-- rows it deleted, and how many consumers have more. Locks: the deleted rows. It skips rows that others hold.
create or replace function _pgqueue.delete_history(out o_deleted bigint, out o_unfinished bigint)
language plpgsql as $$
declare
    v_consumer pgqueue.consumers;
    v_count    bigint;
begin
    o_deleted := 0;
    o_unfinished := 0;
    for v_consumer in
        select c.* from pgqueue.consumers c
        where exists (select from pgqueue.completed_messages a where a.consumer_id = c.consumer_id)
        order by c.consumer_id
    loop
        delete from pgqueue.completed_messages
        where ctid = any (array(select ctid from pgqueue.completed_messages
                                where consumer_id = v_consumer.consumer_id
                                  and done_at <= clock_timestamp() - coalesce(v_consumer.keep_history, '0')
                                order by done_at limit _pgqueue.limit_deleted()
                                for update skip locked));  -- lock: completed
        get diagnostics v_count = row_count;
        o_deleted := o_deleted + v_count;
        o_unfinished := o_unfinished + (v_count >= _pgqueue.limit_deleted())::int;
    end loop;
end $$;
