-- Slots: messages that were cut ahead for small claims of a consumer without special settings
-- (consumers.quick). See queue/slots.sql.

-- A slot has the messages of one claim, and is that claim once it has a token: nobody writes a row of claims for it.
-- A claim changes no column that an index has. So each page keeps room for the second version of its rows.
create table if not exists pgqueue.slots (
    slot          bigint         not null,  -- of the numbers of claims: slots are served in their order
    arrival_no    bigint         not null,  -- of the run from which it was cut
    consumer_id   int            not null,
    priority      int            not null,
    message_count int            not null,
    seqs          int8multirange not null,
    piece         bigint,                   -- by key: the piece that it belongs to,
    key           bigint,                   -- ... their key, if that piece has slots of a key each,
    rest          int8multirange,           -- ... and what comes next of that key (null: nothing): the slot goes on,
    size          int,                      -- ... with so many messages at a time, once its own are acknowledged
    whole         boolean,                  -- ... or, with ordering=stream, what comes next in the line; null: false
    -- What a claim sets comes last: its record in the WAL has no column before these.
    token         bigint,                   -- the random bits of its claim's id; null: the slot is free
    claimed_at    timestamptz,
    lease_until   timestamptz,
    timeout       interval,                 -- the visibility timeout of its claim
    owner         text                      -- as that of a claim
) with (fillfactor = 50);
