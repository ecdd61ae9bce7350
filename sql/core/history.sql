-- History: consumers with keep_history keep what was acknowledged, by whom, when and with what result. A claim says whether its
-- consumer wants to know (claims.archive); an acknowledgement of any other one does nothing for it.

-- Notes that messages of a claim were acknowledged: keeps that, and notifies, as the consumer's settings say.
--   p_deliver_count  of the one that was delivered most often
create or replace function pgqueue._note_done(p_claim pgqueue.claims, p_seqs int8multirange, p_count bigint, p_deliver_count int, p_result jsonb) returns void
language plpgsql
as $$
declare
    v_consumer pgqueue.consumers;
begin
    if p_count = 0 then
        return;
    end if;
    select * into v_consumer from pgqueue.consumers where consumer_id = p_claim.consumer_id;
    if v_consumer.keep_history is not null then
        insert into pgqueue.archived_messages (consumer_id, done_at, seqs, message_count, deliver_count, claim_id, claimed_at, owner, result)
        values (p_claim.consumer_id, clock_timestamp(), p_seqs, p_count, p_deliver_count, p_claim.claim_id, p_claim.claimed_at, p_claim.owner, p_result);
    end if;
    if v_consumer.notify_done then
        perform pg_notify(pgqueue._done_channel(p_claim.consumer_id), '');
    end if;
    if v_consumer.per_key_capacity is not null then
        perform pgqueue._delete_done_entries(p_claim.consumer_id, p_seqs);
    end if;
end $$;

-- The acknowledgement of a message; no row when there is none, or it is not kept any more. Of a message that was delivered again after it
-- was acknowledged, the first. It reads what was acknowledged since the message was written.
create or replace function pgqueue._done_with(p_consumer pgqueue.consumers, p_seq bigint) returns setof pgqueue.archived_messages
language plpgsql stable
as $$
declare
    v_written timestamptz;
begin
    execute format('select inserted_at from pgqueue.messages_%s where seq = $1', p_consumer.stream_id) into v_written using p_seq;
    return query
        select * from pgqueue.archived_messages
        where consumer_id = p_consumer.consumer_id and done_at >= coalesce(v_written, '-infinity') and seqs @> p_seq
        order by done_at limit 1;
end $$;

-- Deletes what consumers need not keep of their history any more, at most _limit_forgotten() acknowledgements of each.
-- Returns how many, and how many consumers have more. Locks: those that it deletes; it waits for nobody.
create or replace function pgqueue._forget_history(out o_deleted bigint, out o_unfinished bigint)
language plpgsql
as $$
declare
    v_consumer pgqueue.consumers;
    v_count    bigint;
begin
    o_deleted := 0;
    o_unfinished := 0;
    for v_consumer in
        select c.* from pgqueue.consumers c
        where exists (select from pgqueue.archived_messages a where a.consumer_id = c.consumer_id) order by c.consumer_id
    loop
        delete from pgqueue.archived_messages
        where ctid = any (array(select ctid from pgqueue.archived_messages
                                where consumer_id = v_consumer.consumer_id and done_at <= clock_timestamp() - coalesce(v_consumer.keep_history, '0')
                                order by done_at limit pgqueue._limit_forgotten()
                                for update skip locked));
        get diagnostics v_count = row_count;
        o_deleted := o_deleted + v_count;
        o_unfinished := o_unfinished + (v_count >= pgqueue._limit_forgotten())::int;
    end loop;
end $$;
