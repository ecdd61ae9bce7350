-- History: what was acknowledged of consumers that keep it. See core/history.sql.

-- An acknowledgement: of a whole claim, or of some of its messages. Written once.
create table if not exists pgqueue.archived_messages (
    consumer_id   int            not null,
    done_at       timestamptz    not null,
    seqs          int8multirange not null,
    message_count bigint         not null,
    deliver_count int            not null,  -- of the message that was delivered most often
    claim_id      bigint         not null,
    claimed_at    timestamptz    not null,
    owner         text,
    result        jsonb
);
