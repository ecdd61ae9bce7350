-- What may be written by COPY: a producer writes its messages into pgqueue.written, and with the numbers alone that its
-- transaction reserved.
--
-- pgqueue.written holds nothing. Its one partition is the table of all messages, which has no condition, because it is
-- the default one. To route a row there, Postgres computes the key of the partition, and that is the check: reserved()
-- raises, or the row goes on to its stream. So a row is checked before it is anywhere, and nobody ever waits for a
-- number that somebody made up. Who inserts into pgqueue.messages, as send() does, is not asked: a trigger or a
-- constraint would cost each message there; and whoever may do that, as the owner, may do anything with messages, so
-- the owner's sink copies there too. Row security is no way either: Postgres refuses COPY with it.
--
-- The last reservation of a session is kept in the session, as the last value of three sequences: setval() keeps it
-- there, currval() reads it, and neither can be done without a right on the sequence. That makes a row 0.5 us slower
-- (0.1 us for each sequence); to look into the table of reservations would make it 10 us slower.

create sequence if not exists pgqueue.reserved_from;                -- the first number, ...
create sequence if not exists pgqueue.reserved_until;               -- ... the number after the last one, ...
create sequence if not exists pgqueue.reserved_for minvalue 0;      -- ... and the stream << 32 | the transaction

-- Notes a reservation for reserved(): of several ranges the last one, for the rows of the others are looked up then.
create or replace function _pgqueue.record_reserved(p_stream_id int, p_seqs int8multirange) returns void
language sql as $$
    select setval('pgqueue.reserved_from', lower(r)), setval('pgqueue.reserved_until', upper(r)),
           setval('pgqueue.reserved_for',
                  (p_stream_id::bigint << 32) | (pg_current_xact_id()::text::bigint & 4294967295))
    from unnest(p_seqs) r
$$;

-- Returns 0 for a number that this transaction reserved. Errors: PQ003 for any other one. (It is called immutable,
-- which it is not, because Postgres asks that of the key of a partition. It is called for each row that is inserted
-- into pgqueue.written, and nowhere else.)
create or replace function _pgqueue.reserved(p_stream_id int, p_seq bigint) returns int
language plpgsql immutable parallel safe as $$
begin
    -- of the transaction its last 32 bits: no session outlives 4 billion transactions
    if p_seq >= currval('pgqueue.reserved_from'::regclass) and p_seq < currval('pgqueue.reserved_until'::regclass)
       and (p_stream_id::bigint << 32) | (txid_current_if_assigned() & 4294967295)
           = currval('pgqueue.reserved_for'::regclass) then
        return 0;
    end if;
    if not exists (select from pgqueue.reservations
                   where xid = pg_current_xact_id_if_assigned() and stream_id = p_stream_id and seqs @> p_seq) then
        raise exception 'seq % of stream % was not reserved by this transaction', coalesce(p_seq::text, 'null'),
                        coalesce(p_stream_id::text, 'null')
            using errcode = 'PQ003', column = 'p_seqs',
                  hint = 'Call pgqueue.reserve, write the messages and publish or stage them in one transaction.';
    end if;
    return 0;
end $$;

do $$
begin
    if to_regclass('pgqueue.written') is null then
        create table pgqueue.written (like pgqueue.messages including defaults)
            partition by list (_pgqueue.reserved(stream_id, seq));
        alter table pgqueue.written attach partition pgqueue.messages default;  -- lock: table
    end if;
end $$;
