-- A sentence for each view and each of its columns, for psql's \dv+ and \d+, and for guide/reference.md.

do $$
declare
    v_view text;
    v_new  text;
    v_name text;
    v_text text;
begin
    -- columns of several views; a view below may have its own text
    for v_view, v_name, v_text in
        select c.relname, a.attname, m[2]
        from regexp_matches($text$
stream: the stream's name
consumer: the consumer's name
priority: the messages' priority: higher is earlier
deliver_count: how many times it was delivered
claim_id: the claim's id, with which its owner settles it
owner: the application_name of the connection that claimed it
lease_until: when its lease ends
claimed_at: when it was claimed
created_at: when it was created
paused: whether it is paused
ordering: none, key or stream
message_count: number of messages
advice: the recommended action, as text; null: none
attended_at: time of the last claim, accurate to about a second; null: never
because: the reason for the status, as text
max_backlog: the largest backlog that is allowed; null: no limit
$text$, '^(\w+): (.*)$', 'gn') m
        join pg_attribute a on a.attname = m[1] and a.attnum > 0
        join pg_class c on c.oid = a.attrelid and c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'v'
    loop
        execute format('comment on column pgqueue.%I.%I is %L', v_view, v_name, v_text);
    end loop;
    -- each view, and below it its own columns; continuation lines have an indent of eight
    for v_new, v_name, v_text in
        select case m[1] when '' then m[2] end, m[2], regexp_replace(m[3], '\s+', ' ', 'g')
        from regexp_matches($text$
message_states: One row per message and consumer that has not finished it, with its state.
    seq: the message's number
    state: new (not claimed yet), unfiltered (not yet checked by the filter), ready, delayed, waiting (for an earlier
        message of its key), claimed or dead
    not_visible_until: until when it is delayed; null: it is not delayed
    claim_id: the claim that holds it, or in which it was dead-lettered; null: none
    lease_until: when the lease of its claim ends; null: it is not claimed
    last_error: why it last failed, or was dead-lettered; null: it has not failed, or its worker gave no reason
consumer_settings: One row per consumer: how it was created.
    max_deliver_count: deliveries after which a failed message is dead-lettered; null: never
    visibility_timeout: how long a lease lasts unless it is extended
    topic: the topic that the keys of its messages match; null: any key
    condition: the jsonpath that its messages match; null: no condition
    settings: the given settings, by name
    defaults: the other settings, by name, with their current defaults
dead_letters: One row per set of messages dead-lettered together: why, after how many deliveries, and in which claim.
    reason: a word such as rejected or expired, or the reason given to dead_letter()
    error: the last error that a worker reported; null: none
    details: the details given to dead_letter(); null: none
    first_seq: the lowest number of the messages
    last_seq: the highest number of the messages
    owner: the application_name of the last worker that claimed them; null: none
    claim_id: the claim in which they were dead-lettered; null: none
    died_at: when they were dead-lettered
consumer_stats: One row per consumer: the number of its messages, by state.
    new: messages that it has not claimed yet: an estimate if estimated is true
    ready: messages that can be claimed
    delayed: messages that are delivered later
    waiting: messages that wait for an earlier message of their key
    claimed: messages in live claims
    dead: dead letters
    backlog: all messages that are neither claimed nor dead
    claims: live claims
    expired: live claims whose lease has expired
    next_expiry: when the first lease of a live claim ends, or ended; null: there is no claim
    skipped: total messages that retention removed before it had finished them
    taken: total messages that it took; a message that it took twice counts twice. The difference of two values is a
        rate
    settled: total messages that were acknowledged or dead-lettered; one that was settled twice counts twice. The
        difference of two values is a rate
    oldest_at: when the oldest message that could be delivered now was sent; null: there is none
    oldest_claim_at: when the oldest claim was made; null: there is none
    estimated: whether new and backlog are estimates, because more than 3,000 publications are new
    stuck: claims that a worker extends beyond ten visibility timeouts: its handler may hang
    status: the status in one word, as in consumer_health
open_claims: One row per live claim: its owner, its messages, its age and its lease.
    query: the Spark query that holds it; null: a worker holds it
    reader: the id of that query's checkpoint, as in Spark's offsets; null: a worker's claim
    expired: whether its lease has expired, so that the next claim can take over its messages
    messages: for a Spark query, the original number of messages; for a worker, the remaining ones
    remaining: its messages that are not settled
    first_seq: the lowest number of its messages
consumer_health: One row per consumer: its status in one word, and the reason.
    status: the first that applies: full (max_backlog is reached), paused, unattended (no claim for a minute),
        stuck (a worker extends a claim beyond ten visibility timeouts), failing (messages were dead-lettered in the
        last hour; or delivered ten times), dead_letters (older ones), ok
    backlog: messages that are neither claimed nor dead
    estimated: whether backlog is an estimate; the status never depends on an estimate
stream_retention: One row per stream: how long it keeps its messages, and which consumers hold due messages.
    keep_for: for how long messages are kept; null: no limit
    keep_messages: how many messages are kept; null: no limit
    keep_bytes: how many bytes of messages are kept; null: no limit
    until_done: whether messages are deleted when every consumer has finished them
    unread: whether due messages that a consumer has not finished are kept (keep) or deleted (drop)
    keep_dead: for how long dead letters are kept; null: no limit
    bytes: current bytes of its messages, with indexes
    tables: how many tables hold its messages
    oldest_at: when the oldest stored publication was made; null: there is none
    trimmed: total trimmed messages
    trimmed_at: when messages were last trimmed; null: never
    held_bytes: bytes of due messages that are kept
    held_by: why they are kept: names of consumers, dead letters, transactions
    maintained_at: when maintain() last handled the stream; null: never
stream_archives: One row per stream with an archive: its folder, its contents, and what is not written yet.
    uri: the folder of new files; null: no new segments are archived
    keep_for: how long files are kept, from their last message; null: no limit
    segments: segments that are in files
    messages: messages in the files
    bytes: bytes of the files
    newest_at: when the last of these messages was published; null: there is none
    archived_at: when the last segment was written; null: never
    waiting: closed segments that are not in files yet
    waiting_since: when the first of them was closed
    attempts: attempts that are running, or have left files for the next exporter to delete
group_stats: One row per partition of a group: its worker, and its lag.
    group: the group's name
    partition: the partition's number, from 0
    worker: its worker; null: none
    lease_until: when the worker's lease ends
    committed_at: when an offset was last committed; null: never
    committed: the committed offset: arrival_no and seq of the last processed message
    behind: messages of the whole group after that offset, of all partitions; divide by the number of partitions to
        estimate the lag of this one
    estimated: whether behind is an estimate, because more than 3,000 publications are new
stream_bindings: One row per binding of a topic of a stream to another stream.
    topic: messages whose key matches this topic are copied
    to_stream: the stream that receives the copies
    bound_at: when the binding was created
message_history: One row per recorded acknowledgement: the worker, the time, and the worker's result.
    seqs: the messages' numbers
    deliver_count: the largest number of deliveries of one of the messages
    result: the worker's result; null: none
    done_at: when they were acknowledged
stream_schedules: One row per schedule: its next time, its last message, and its message.
    schedule: the schedule's name
    cron: its cron expression; null: it has an interval
    every: its interval; null: it has a cron expression
    time_zone: the time zone of the expression or the interval
    next_at: its next time; null: it is paused
    last_planned_at: the planned time of its last message; null: there is none
    last_sent_at: when that message was sent
    last_seq: the number of that message; null: it could not be sent
    last_error: why that message could not be sent
    key: the key of its messages
    data: the payload of its messages, in a text or json stream
    data_bytes: the payload of its messages, in a binary stream
    headers: the headers of its messages, without schedule and planned_at
    priority: the priority of its messages
    consumers: the consumers that receive its messages; null: all
    start_at: the first time of its interval; null: it has no interval
stream_stats: One row per stream: its size, and its last number.
    kind: text, json or binary
    consumers: how many consumers it has
    last_publication: the last publication that is visible or was trimmed; 0: there is none
    messages: an estimate of the stored messages, from the planner's statistics or from sent
    bytes: bytes of its messages, with indexes
    staged_chunks: chunks of messages that Spark tasks have written and no batch has published yet
    last_seq: the last assigned number
    settings: the given settings, by name
    defaults: the other settings, by name, with their current defaults
    sent: total numbers assigned to senders, including those of rolled-back transactions. The difference of two values
        is a rate; a crash or a promotion adds up to 32
captures: One row per captured table, with its stream.
    table: the table, with its schema
    owner: its owner
    options: how the table is captured, as text
    outbox: whether it is an outbox, whose rows are deleted after their capture
    uncaptured_partitions: partitions whose direct writes are not captured yet: maintain() adds them if it may; else
        call capture() again as the owner of the table
$text$, '^( *)(\w+): (.*(?:\n {8}.*)*)$', 'gn') m
    loop
        v_view := coalesce(v_new, v_view);
        continue when to_regclass('pgqueue.' || v_view) is null;  -- a feature may not be installed
        if v_new is not null then
            execute format('comment on view pgqueue.%I is %L', v_view, v_text);
        else
            execute format('comment on column pgqueue.%I.%I is %L', v_view, v_name, v_text);
        end if;
    end loop;
end $$;
