-- A sentence for each view and each of its columns, for psql's \dv+ and \d+, and for guide/reference.md.

do $$
declare
    v_view text;
    v_new  text;
    v_name text;
    v_text text;
begin
    -- columns that several views have: a view below may say more of its own
    for v_view, v_name, v_text in
        select c.relname, a.attname, m[2]
        from regexp_matches($text$
stream: the stream's name
consumer: the consumer's name
priority: the messages' priority: higher is earlier
deliver_count: how many times it was delivered
claim_id: the claim's id, by which its owner settles it
owner: the application_name of the connection that claimed it
lease_until: until when other claimers leave it to its owner
claimed_at: when it was claimed
created_at: when it was created
paused: whether it is paused
ordering: none, key or stream
message_count: how many messages these are
advice: what to do, in words; null: nothing
attended_at: when somebody claimed last, to about a second; null: never
because: the reason for the status, in words
max_backlog: the largest backlog that is allowed; null: no limit
$text$, '^(\w+): (.*)$', 'gn') m
        join pg_attribute a on a.attname = m[1] and a.attnum > 0
        join pg_class c on c.oid = a.attrelid and c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'v'
    loop
        execute format('comment on column pgqueue.%I.%I is %L', v_view, v_name, v_text);
    end loop;
    -- each view, and below it its own columns; a text goes on with an indent of eight
    for v_new, v_name, v_text in
        select case m[1] when '' then m[2] end, m[2], regexp_replace(m[3], '\s+', ' ', 'g')
        from regexp_matches($text$
message_states: One row per message and consumer that is not done with it, with its state.
    seq: the message's number
    state: new (not taken yet), unfiltered (its filter has not judged it), ready, delayed, waiting (behind an earlier
        message of its key), claimed or dead
    not_visible_until: until when it is delayed; null: it is not delayed
    claim_id: the claim that holds it, or in which it died; null: none
    lease_until: until when other claimers leave it to its owner; null: it is not claimed
    last_error: why it failed last, or died; null: it has not failed, or its worker gave no reason
consumer_settings: One row per consumer: how it was created.
    max_deliver_count: deliveries after which a message that fails is a dead letter; null: never
    visibility_timeout: how long a claim is held without being extended
    topic: the topic that the keys of its messages match; null: any key
    condition: the jsonpath that its messages pass; null: no condition
    settings: the settings that it was given, by name: they keep their values
    defaults: its other settings, by name: they have their defaults, and follow them
dead_letters: One row per set of dead letters that died together: why, after how many deliveries, and in which claim.
    reason: a word such as rejected or expired, or the reason given to dead_letter()
    error: the last error that a worker gave; null: no worker gave one
    details: the details given to dead_letter(); null: none
    first_seq: the lowest number of the messages
    last_seq: the highest number of the messages
    owner: the application_name of the last worker that had them; null: none had
    claim_id: the claim in which they died; null: none
    died_at: when they died
consumer_stats: One row per consumer: how many messages it has before it, by state.
    new: messages that it has not taken yet: an estimate where estimated says so
    ready: messages that can be claimed
    delayed: messages that are to be delivered later
    waiting: messages behind an earlier message of their key
    claimed: messages in live claims
    dead: dead letters
    backlog: all messages that are neither claimed nor dead
    claims: live claims
    expired: live claims whose lease has ended
    next_expiry: when the first lease of a live claim ends, or ended; null: there is no claim
    skipped: messages that retention took from it, in all
    taken: messages that it took, in all, a message that it took twice counts twice: two looks give a rate
    settled: messages that were acknowledged or died, in all, a message that was settled twice counts twice: two looks
        give a rate
    oldest_at: when the oldest message was sent that could be delivered now; null: there is none
    oldest_claim_at: since when the oldest claim is held; null: there is none
    estimated: whether new and backlog are estimates, because more than 3,000 publications are new
    stuck: claims that a worker extends beyond ten visibility timeouts: its handler may hang
    status: the condition in one word, as in consumer_health
open_claims: One row per live claim: its owner, its messages, since when and until when it is held.
    query: the Spark query that holds it; null: a worker does
    reader: the checkpoint of that query, by the number that Spark's offsets have; null: a worker's claim
    expired: whether its lease has ended: the next claimer that needs its messages gets them
    messages: of a Spark query's claim messages that it had at first; of another one those that are left
    remaining: messages of it that are not settled
    first_seq: the lowest number of its messages
consumer_health: One row per consumer: its condition in one word, and why.
    status: the first that is true of: full (max_backlog is reached), paused, unattended (nobody has claimed for a
        minute), stuck (a worker extends a claim beyond ten visibility timeouts), failing (messages died in the last
        hour; or were delivered ten times, where max_deliver_count is never, or to Spark), dead_letters (older ones), ok
    backlog: messages that are neither claimed nor dead
    estimated: whether backlog is an estimate; the status is never judged by one
stream_retention: One row per stream: how long it keeps its messages, and which consumers hold messages that are due to
        go.
    keep_for: for how long messages are kept; null: no limit
    keep_messages: how many messages are kept; null: no limit
    keep_bytes: how many bytes of messages are kept; null: no limit
    until_done: whether messages go when every consumer is done with them
    unread: whether messages stay (keep) or go (drop) that are due while a consumer has not finished them
    keep_dead: for how long dead letters are kept; null: for ever
    bytes: bytes of its messages now, with indexes
    tables: how many tables hold its messages
    oldest_at: when the oldest publication was made that is still there; null: there is none
    trimmed: how many messages were trimmed, in all
    trimmed_at: when messages were trimmed last; null: never
    held_bytes: bytes of messages that are kept although they are due to go
    held_by: why they are kept: names of consumers, dead letters, transactions
    maintained_at: when maintain() looked at the stream last; null: never
stream_archives: One row per stream with an archive: where it is, what is in it, and what is still to be written to it.
    uri: the folder of new files; null: no more segments go there
    keep_for: how long files are kept, from the last message in them; null: for ever
    segments: segments that are in files
    messages: messages in the files
    bytes: bytes of the files
    newest_at: when the last of these messages was published; null: there is none
    archived_at: when a segment was written last; null: never
    waiting: segments that are closed, and not in files yet
    waiting_since: since when the first of them is closed
    attempts: attempts that are at work, or have left files for the next exporter to delete
group_stats: One row per partition of a group: which worker has it, and how far behind it is.
    group: the group's name
    partition: the partition's number, from 0
    worker: the worker that has it; null: none has
    lease_until: until when other workers leave it to that worker
    committed_at: when an offset was committed last; null: never
    committed: how far the partition is processed: arrival_no and seq of the last message that is done
    behind: messages of the whole group after that, of all keys: about one in as many as there are partitions is of this
        partition
    estimated: whether behind is an estimate, because more than 3,000 publications are new
stream_bindings: One row per binding of a topic of a stream to another stream.
    topic: messages whose key matches this topic are copied
    to_stream: the stream that gets the copies
    bound_at: since when messages are copied
message_history: One row per acknowledgement that is kept: the worker, the time, and the worker's result.
    seqs: the messages' numbers
    deliver_count: the largest number of deliveries of one of the messages
    result: the worker's result; null: the worker gave none
    done_at: when they were acknowledged
stream_schedules: One row per schedule: when it sends next, what it sent last, and what.
    schedule: the schedule's name
    cron: its cron expression; null: it has an interval
    every: its interval; null: it has a cron expression
    time_zone: the time zone of the expression or the interval
    next_at: its next time; null: it is paused
    last_planned_at: the time that its last message was due; null: there was none
    last_sent_at: when that message was sent
    last_seq: the number of that message; null: it could not be sent
    last_error: why that message could not be sent
    key: the key of its messages
    data: the payload of its messages, in a text or json stream
    data_bytes: the payload of its messages, in a binary stream
    headers: the headers of its messages, without schedule and planned_at
    priority: the priority of its messages
    consumers: the consumers that get its messages; null: all
    start_at: from when its interval is counted; null: it has no interval
stream_stats: One row per stream: its size, and the last number that it gave out.
    kind: text, json or binary
    consumers: how many consumers it has
    last_publication: the last publication that is visible; 0: there is none
    messages: messages that are stored: an estimate, the planner's or by what was sent
    bytes: bytes of its messages, with indexes
    staged_chunks: chunks of messages that Spark tasks have written and no batch has published yet
    last_seq: the last number that was given out
    settings: the settings that it was given, by name
    defaults: its other settings, by name, with their defaults
    sent: numbers given out to senders in all, those of transactions that were rolled back too: two looks give a rate; a
        crash or a promotion adds up to 32
captures: One row per table that is captured, with its stream.
    table: the table, with its schema
    owner: its owner
    options: how the table is captured, in words
    outbox: whether it is an outbox, whose rows are deleted after their capture
    uncaptured_partitions: partitions whose direct writes are not captured yet: maintain() adds them where it may; else
        capture again as the owner of the table
$text$, '^( *)(\w+): (.*(?:\n {8}.*)*)$', 'gn') m
    loop
        v_view := coalesce(v_new, v_view);
        continue when to_regclass('pgqueue.' || v_view) is null;  -- a schema may be without a feature
        if v_new is not null then
            execute format('comment on view pgqueue.%I is %L', v_view, v_text);
        else
            execute format('comment on column pgqueue.%I.%I is %L', v_view, v_name, v_text);
        end if;
    end loop;
end $$;
