-- COPY by producers: a producer writes its messages into pgqueue.written, with numbers that its transaction reserved.
--
-- pgqueue.written stores nothing. Its only partition is the table of all messages, a default partition without a
-- condition. To route a row there, Postgres computes the partition key, which is the check: reserved() raises, or the
-- row is stored in its stream. So a row is checked before it is stored, and no session waits for a number that was not
-- reserved. Inserts into pgqueue.messages, as by send(), are not checked: a trigger or a constraint would slow down
-- each message, and a role that may insert there, as the owner, may change messages anyway. So the owner's sink copies
-- there too. Row security cannot be used: Postgres does not support COPY FROM with it.
--
-- The session has its last reservation as the last value of three sequences: setval() stores it, currval() reads it,
-- and both need a right on the sequence. This makes a row 0.5 us slower (0.1 us for each sequence); reading the table
-- of reservations would make it 10 us slower.

create sequence if not exists pgqueue.reserved_from;                -- the first number, ...
create sequence if not exists pgqueue.reserved_until;               -- ... the number after the last one, ...
create sequence if not exists pgqueue.reserved_for minvalue 0;      -- ... and (stream << 32) | transaction

-- Records a reservation for reserved(): of several ranges the last one. For the others, reserved() reads the table.
create or replace function _pgqueue.record_reserved(p_stream_id int, p_seqs int8multirange) returns void
language sql as $$
    select setval('pgqueue.reserved_from', lower(r)), setval('pgqueue.reserved_until', upper(r)),
           setval('pgqueue.reserved_for',
                  (p_stream_id::bigint << 32) | (pg_current_xact_id()::text::bigint & 4294967295))
    from unnest(p_seqs) r
$$;

-- Returns 0 for a number that this transaction reserved. Errors: PQ003 for any other number. (It is declared immutable,
-- although it is not, because Postgres requires that of a partition key. It is called for each row that is inserted
-- into pgqueue.written, and nowhere else.)
create or replace function _pgqueue.reserved(p_stream_id int, p_seq bigint) returns int
language plpgsql immutable parallel safe as $$
begin
    -- the last 32 bits of the transaction id: no session lasts for 4 billion transactions
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
