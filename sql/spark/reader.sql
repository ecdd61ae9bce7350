-- Checkpoint readers: their tables, checks, and the end of their claims.

-- The checkpoint readers, one per checkpoint of a Spark query.
-- on drop_consumer
create table if not exists pgqueue.readers (
    reader      uuid        primary key,
    consumer_id int         not null,
    acked_claim bigint      not null default 0,
    last_claim  bigint      not null default 0,
    messages    bigint      not null default 0,  -- claimed in all
    lost        bigint      not null default 0,  -- acknowledged after the lease was lost
    query_id    text,
    created_at  timestamptz not null default clock_timestamp(),
    used_at     timestamptz not null default clock_timestamp(),  -- to an hour
    -- the process that last planned a batch, and the batch: if another process plans it again, ...
    planned_by  uuid,
    planned_to  bigint      not null default 0,  -- ... this is a delivery
    starts      int         not null default 0,  -- processes that started this batch, ...
    first_start timestamptz,                     -- ... and the time of the first start
    alone       boolean     not null default true,   -- no other reader of its query had messages at the last start
    isolate     boolean     not null default false,  -- it needs to be alone in the micro-batch (spark/quarantine.sql)
    unique (consumer_id, query_id)               -- two readers of one query would each get half of the messages
);

-- Messages of a Spark reader's claim that its query has settled by actions, as they were: they still belong to its
-- micro-batch (spark/actions.sql).
do $$
begin
    if to_regtype('pgqueue.settled_run') is null then
        create type pgqueue.settled_run as (
            lane int, arrival_no bigint, priority int, deliver_count int, seqs int8multirange);
    end if;
end $$;

-- The claims of checkpoint readers: each with its original set, until its reader has moved past it, so that an offset
-- (reader, claim) always names the same messages. The messages that it still holds are in bundles with its token.
-- on drop_consumer
create table if not exists pgqueue.reader_claims (
    reader        uuid           not null,
    claim_id      bigint         not null,
    consumer_id   int            not null,
    head          bigint         not null,            -- the first bundle of the claim
    token         bigint         not null,            -- of its bundles
    message_count bigint         not null,            -- messages at the start
    settled       bigint         not null default 0,  -- messages settled by the owner, in any way
    seqs          int8multirange not null,            -- the original set ...
    arrival_nos   int8multirange not null,            -- ... and the arrivals of its bundles, to claim them back;
                                                      -- empty: its consumer was moved, and nothing is claimed back
    settled_early pgqueue.settled_run[],              -- of seqs, what its query settled by actions; null: nothing
    primary key (reader, claim_id)
);

-- The messages of a claim that its query has settled by actions, without those that retention has trimmed since.
create or replace function _pgqueue.seqs_settled_early(p_claim pgqueue.reader_claims) returns int8multirange
language plpgsql stable as $$
begin
    return case when p_claim.settled_early is null then '{}'
                else (select range_agg(seqs) from unnest(p_claim.settled_early)) - coalesce(
        (select (_pgqueue.trimmed(stream_id)).o_seqs from pgqueue.consumers where consumer_id = p_claim.consumer_id),
        '{}') end;
end $$;

-- The number of messages that a claim of a checkpoint reader holds.
create or replace function _pgqueue.remaining(p_claim pgqueue.reader_claims) returns bigint
language plpgsql stable as $$
begin
    return (select coalesce(sum(message_count), 0) from _pgqueue.bundles_of(p_claim.head, p_claim.token));
end $$;

-- The row of a checkpoint reader; nulls for a new one. Raises PQ005 or PQ010 unless the checkpoint belongs to this
-- consumer of this database, in its current state.
create or replace function _pgqueue.check_reader(p_reader uuid, p_consumer_id int, p_start_claim bigint, p_claim bigint)
returns pgqueue.readers language plpgsql stable as $$
declare
    v_reader pgqueue.readers := (select r from pgqueue.readers r where reader = p_reader);
begin
    if v_reader.reader is null and p_claim > 0 then
        raise exception 'the checkpoint (at claim %) has a reader that does not exist in this database', p_claim
            using errcode = 'PQ005',
                  hint = 'It belongs to another database, or its consumer was dropped, or it was not used for so long '
                         'that its reader was deleted and its messages were returned. '
                         'Point url at the right database, or start with a new checkpoint.';
    elsif v_reader.consumer_id <> p_consumer_id then
        raise exception 'the checkpoint is of %, not of %', _pgqueue.consumer_name(v_reader.consumer_id),
                        _pgqueue.consumer_name(p_consumer_id)
            using errcode = 'PQ005',
                  hint = 'Use the stream and consumer that it was created with, or start with a new checkpoint.';
    elsif p_start_claim < v_reader.acked_claim then
        raise exception 'the checkpoint, at claim %, is older than what its query has acknowledged: up to claim %',
                        p_start_claim, v_reader.acked_claim
            using errcode = 'PQ010',
                  hint = 'Use the latest checkpoint, or a new one. '
                         'If two drivers run with this checkpoint, stop one of them.';
    elsif p_claim > v_reader.last_claim
          -- a number that was assigned again has other random bits
          or (p_claim > v_reader.acked_claim
              and not exists (select from pgqueue.reader_claims where reader = p_reader and claim_id = p_claim)) then
        raise exception 'the checkpoint is ahead of the database: claim % is unknown, the last one is %', p_claim,
                        v_reader.last_claim
            using errcode = 'PQ005',
                  hint = 'The database was restored to an earlier state, or a standby that lacked the last commits was '
                         'promoted. Start with a new checkpoint: '
                         'messages that the database has not acknowledged are delivered again.';
    end if;
    return v_reader;
end $$;

-- Deletes a checkpoint reader, and returns the messages that it holds. Needs the locks of the reader and the consumer.
--   p_how, p_note  as in return()
-- Returns the number of returned messages. Locks its claims.
create or replace function _pgqueue.delete_reader(p_consumer pgqueue.consumers, p_reader uuid, p_how text, p_note jsonb)
returns bigint language plpgsql as $$
declare
    v_stored  pgqueue.consumer_cursors := _pgqueue.cursor(p_consumer.consumer_id);
    v_cursor  pgqueue.consumer_cursors := v_stored;
    v_claim   pgqueue.reader_claims;
    v_bundles pgqueue.consumer_messages[];
    v_count   bigint := 0;
begin
    for v_claim in select * from pgqueue.reader_claims where reader = p_reader order by claim_id loop
        v_bundles := _pgqueue.lock_bundles(v_claim.head, v_claim.token);
        continue when v_bundles is null;
        v_count := v_count + _pgqueue.count_of(v_bundles);
        v_cursor := _pgqueue.return(p_consumer, v_cursor, v_bundles, null, p_how, clock_timestamp(), null, p_note);
    end loop;
    delete from pgqueue.reader_claims where reader = p_reader;
    delete from pgqueue.readers where reader = p_reader;
    perform _pgqueue.save_cursor(v_stored, _pgqueue.raise_hints(p_consumer, v_cursor), true);
    return v_count;
end $$;

-- Ends the claims of a checkpoint reader up to p_claim, and acknowledges the messages that they still hold. Needs the
-- locks of the reader and its claims. Returns whether there were any claims, how many messages they held, and how many
-- they had lost. Locks the bundles.
create or replace function _pgqueue.acknowledge_upto(p_reader uuid, p_claim bigint, out o_any boolean,
                                                     out o_acked bigint, out o_lost bigint)
language sql as $$
    with ended as (
        delete from pgqueue.reader_claims where reader = p_reader and claim_id <= p_claim returning *
    )
    select count(*) > 0, coalesce(sum(acked), 0)::bigint, coalesce(sum(message_count - settled - acked), 0)::bigint
    from (select message_count, settled, _pgqueue.finish(_pgqueue.lock_bundles(head, token), claim_id, null, false,
                                                         null, null) as acked
          from (select * from ended order by claim_id) e) e
$$;

-- Deletes the checkpoint readers that were not used for p_age, and have no claim that a running process still extends.
-- Their messages are returned, as when a lease ends. For maintain(). Returns the number of readers. Locks: those
-- readers, their consumers, their claims. It waits for no lock, because it may already hold the lock of another
-- consumer; the next call deletes the rest.
create or replace function _pgqueue.delete_readers(p_age interval) returns bigint
language plpgsql as $$
declare
    v_reader pgqueue.readers;
    v_count  bigint := 0;
begin
    for v_reader in
        select * from pgqueue.readers where used_at < clock_timestamp() - p_age order by consumer_id, reader
    loop
        continue when not _pgqueue.try_lock_reader(v_reader.reader)
            or not _pgqueue.try_lock_consumer(v_reader.consumer_id);
        continue when exists (select from pgqueue.reader_claims c
                              cross join lateral _pgqueue.bundles_of(c.head, c.token) h
                              where c.reader = v_reader.reader and h.lease_until > clock_timestamp());
        delete from pgqueue.readers where reader = v_reader.reader and used_at < clock_timestamp() - p_age;
        continue when not found;  -- used or deleted before the lock
        perform _pgqueue.delete_reader(c, v_reader.reader, 'one_failed',
                                        '{"error": "its reader was not used for long"}')
        from pgqueue.consumers c where consumer_id = v_reader.consumer_id;
        v_count := v_count + 1;
    end loop;
    return v_count;
end $$;
