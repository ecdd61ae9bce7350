-- History: the acknowledgements of consumers that keep history. See queue/history.sql.

-- An acknowledgement, of a whole claim or of some of its messages; or messages that were cancelled or replaced, without
-- a claim. Written once.
-- on drop_consumer
create table if not exists pgqueue.archived_messages (
    consumer_id   int            not null,
    done_at       timestamptz    not null,
    seqs          int8multirange not null,
    message_count bigint         not null,
    deliver_count int            not null,  -- of the message that was delivered most often
    claim_id      bigint,
    claimed_at    timestamptz,
    owner         text,                     -- the application_name of who claimed, or cancelled
    result        jsonb                     -- of replaced messages {"replaced_by": seq}
);
