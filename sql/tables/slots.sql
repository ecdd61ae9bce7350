-- Slots: messages that were cut ahead for small claims of a consumer without special settings
-- (consumers.way is simple). See queue/slots.sql.

-- A slot has the messages of one claim, and is that claim once it has a token: nobody writes a row of claims for it.
-- A claim changes no column that an index has. So each page keeps room for the second version of its rows.
create table if not exists pgqueue.slots (
    slot          bigint         not null,  -- of the numbers of claims: slots are served in their order
    arrival_no    bigint         not null,  -- of the run from which it was cut
    consumer_id   int            not null,
    priority      int            not null,
    message_count int            not null,
    piece         bigint,                   -- by key: the piece that it belongs to,
    key           bigint,                   -- ... their key, if that piece has slots of a key each,
    -- ... and what comes next of that key (null: nothing): the slot goes on. It is one range; or it is in parts of a
    -- claim each, the last one first, so that nobody takes a set of many ranges apart.
    rest          int8multirange[],
    size          int,                      -- ... with so many messages at a time, once its own are acknowledged
    whole         boolean,                  -- ... or, with ordering=stream, what comes next in the line; null: false
    -- What an acknowledgement sets comes after rest, which it leaves as it is if there are parts.
    seqs          int8multirange not null,
    parts         int,                      -- how many parts are still to come, which are the first; null: one range
    -- What a claim sets comes last: its record in the WAL has no column before these.
    token         bigint,                   -- the random bits of its claim's id; null: the slot is free
    claimed_at    timestamptz,
    lease_until   timestamptz,
    timeout       interval,                 -- the visibility timeout of its claim
    owner         text                      -- as that of a claim
) with (fillfactor = 50);

-- To read rest costs more where it is compressed.
do $$
begin
    if (select attstorage <> 'e' from pg_attribute where attrelid = 'pgqueue.slots'::regclass and attname = 'rest') then
        alter table pgqueue.slots alter column rest set storage external;
    end if;
end $$;
