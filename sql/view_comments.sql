-- A sentence for each view and each of its columns, for psql's \dv+ and \d+, and for guide/reference.md.

-- Columns that several views have. A view below may say more of its own.
do $$
declare
    v_view   text;
    v_column text[];
begin
    -- what they have in common
    for v_view, v_column in
        select c.relname, array[a.attname, d.comment]
        from (values ('stream',        'the stream''s name'),
                     ('consumer',      'the consumer''s name'),
                     ('priority',      'the messages'' priority: higher is earlier'),
                     ('deliver_count', 'how many times it was delivered'),
                     ('claim_id',      'the claim''s id, by which its owner settles it'),
                     ('owner',         'the application_name of the connection that claimed it'),
                     ('lease_until',   'until when other claimers leave it to its owner'),
                     ('claimed_at',    'when it was claimed'),
                     ('created_at',    'when it was created'),
                     ('paused',        'whether it is paused'),
                     ('ordering',      'none, key or stream'),
                     ('message_count', 'how many messages these are')) d (name, comment)
        join pg_attribute a on a.attname = d.name and a.attnum > 0
        join pg_class c on c.oid = a.attrelid and c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'v'
    loop
        execute format('comment on column pgqueue.%I.%I is %L', v_view, v_column[1], v_column[2]);
    end loop;
end $$;

comment on view pgqueue.message_states is 'One row per message and consumer that is not done with it, with its state.';
comment on column pgqueue.message_states.seq is 'the message''s number';
comment on column pgqueue.message_states.state is
    'new (not taken yet), unfiltered (its filter has not judged it), ready, delayed, waiting (behind an earlier '
    'message of its key), claimed or dead';
comment on column pgqueue.message_states.not_visible_until is 'until when it is delayed; null: it is not delayed';
comment on column pgqueue.message_states.claim_id is 'the claim that holds it, or in which it died; null: none';
comment on column pgqueue.message_states.lease_until is
    'until when other claimers leave it to its owner; null: it is not claimed';
comment on column pgqueue.message_states.last_error is
    'why it failed last, or died; null: it has not failed, or its worker gave no reason';

comment on view pgqueue.consumer_settings is 'One row per consumer: how it was created.';
comment on column pgqueue.consumer_settings.max_deliver_count is
    'deliveries after which a message that fails is a dead letter; null: no limit';
comment on column pgqueue.consumer_settings.visibility_timeout is 'how long a claim is held without being extended';
comment on column pgqueue.consumer_settings.topic is 'the topic that the keys of its messages match; null: any key';
comment on column pgqueue.consumer_settings.condition is 'the jsonpath that its messages pass; null: no condition';
comment on column pgqueue.consumer_settings.settings is 'all settings that differ from their defaults, by name';

comment on view pgqueue.dead_letters is
    'One row per set of dead letters that died together: why, after how many deliveries, and in which claim.';
comment on column pgqueue.dead_letters.reason is
    'a word such as rejected or expired, or the reason given to dead_letter()';
comment on column pgqueue.dead_letters.error is 'the last error that a worker gave; null: no worker gave one';
comment on column pgqueue.dead_letters.details is 'the details given to dead_letter(); null: none';
comment on column pgqueue.dead_letters.first_seq is 'the lowest number of the messages';
comment on column pgqueue.dead_letters.last_seq is 'the highest number of the messages';
comment on column pgqueue.dead_letters.owner is 'the application_name of the last worker that had them; null: none had';
comment on column pgqueue.dead_letters.claim_id is 'the claim in which they died; null: none';
comment on column pgqueue.dead_letters.died_at is 'when they died';

comment on view pgqueue.consumer_stats is 'One row per consumer: how many messages it has before it, by state.';
comment on column pgqueue.consumer_stats.new is
    'messages that it has not taken yet: an estimate where estimated says so';
comment on column pgqueue.consumer_stats.ready is 'messages that can be claimed';
comment on column pgqueue.consumer_stats.delayed is 'messages that are to be delivered later';
comment on column pgqueue.consumer_stats.waiting is 'messages behind an earlier message of their key';
comment on column pgqueue.consumer_stats.claimed is 'messages in live claims';
comment on column pgqueue.consumer_stats.dead is 'dead letters';
comment on column pgqueue.consumer_stats.backlog is 'all messages that are neither claimed nor dead';
comment on column pgqueue.consumer_stats.claims is 'live claims';
comment on column pgqueue.consumer_stats.expired is 'live claims whose lease has ended';
comment on column pgqueue.consumer_stats.next_expiry is
    'when the first lease of a live claim ends, or ended; null: there is no claim';
comment on column pgqueue.consumer_stats.skipped is 'messages that retention took from it, in all';
comment on column pgqueue.consumer_stats.taken is
    'messages that it took, in all, a message that it took twice counts twice: two looks give a rate';
comment on column pgqueue.consumer_stats.settled is
    'messages that were acknowledged or died, in all, a message that was settled twice counts twice: two looks give '
    'a rate';
comment on column pgqueue.consumer_stats.oldest_at is
    'when the oldest message was sent that could be delivered now; null: there is none';
comment on column pgqueue.consumer_stats.oldest_claim_at is 'since when the oldest claim is held; null: there is none';
comment on column pgqueue.consumer_stats.estimated is
    'whether new and backlog are estimates, because more than 3,000 publications are new';

comment on view pgqueue.open_claims is
    'One row per live claim: its owner, its messages, since when and until when it is held.';
comment on column pgqueue.open_claims.query is 'the Spark query that holds it; null: a worker does';
comment on column pgqueue.open_claims.reader is
    'the checkpoint of that query, by the number that Spark''s offsets have; null: a worker''s claim';
comment on column pgqueue.open_claims.expired is
    'whether its lease has ended: the next claimer that needs its messages gets them';
comment on column pgqueue.open_claims.messages is 'messages that it had at first; of a small claim those that are left';
comment on column pgqueue.open_claims.remaining is 'messages of it that are not settled';
comment on column pgqueue.open_claims.first_seq is 'the lowest number of its messages';

comment on view pgqueue.consumer_health is
    'One row per consumer: whether it is ok, full, paused, unattended or failing, and why.';
comment on column pgqueue.consumer_health.status is
    'the first that is true of: full (max_backlog is reached), paused, unattended (nobody has claimed for a '
    'minute), failing (messages died in the last hour, or were delivered ten times where max_deliver_count is not '
    'set), ok';
comment on column pgqueue.consumer_health.because is 'the reason for the status, in words';
comment on column pgqueue.consumer_health.backlog is 'messages that are neither claimed nor dead';
comment on column pgqueue.consumer_health.max_backlog is 'the largest backlog that is allowed; null: no limit';
comment on column pgqueue.consumer_health.attended_at is 'when somebody claimed last, to about a second; null: never';
comment on column pgqueue.consumer_health.estimated is 'whether backlog is an estimate; the status never goes by one';

comment on view pgqueue.stream_retention is
    'One row per stream: how long it keeps its messages, and which consumers hold messages that are due to go.';
comment on column pgqueue.stream_retention.keep_for is 'for how long messages are kept; null: no limit';
comment on column pgqueue.stream_retention.keep_messages is 'how many messages are kept; null: no limit';
comment on column pgqueue.stream_retention.keep_bytes is 'how many bytes of messages are kept; null: no limit';
comment on column pgqueue.stream_retention.until_done is 'whether messages go when every consumer is done with them';
comment on column pgqueue.stream_retention.unread is
    'whether messages stay (keep) or go (drop) that are due while a consumer has not finished them';
comment on column pgqueue.stream_retention.keep_dead is 'for how long dead letters are kept; null: for ever';
comment on column pgqueue.stream_retention.bytes is 'bytes of its messages now, with indexes';
comment on column pgqueue.stream_retention.tables is 'how many tables hold its messages';
comment on column pgqueue.stream_retention.oldest_at is
    'when the oldest publication was made that is still there; null: there is none';
comment on column pgqueue.stream_retention.trimmed is 'how many messages were trimmed, in all';
comment on column pgqueue.stream_retention.trimmed_at is 'when messages were trimmed last; null: never';
comment on column pgqueue.stream_retention.held_bytes is 'bytes of messages that are kept although they are due to go';
comment on column pgqueue.stream_retention.held_by is
    'why they are kept: names of consumers, dead letters, transactions';
comment on column pgqueue.stream_retention.maintained_at is 'when maintain() looked at the stream last; null: never';
comment on column pgqueue.stream_retention.advice is 'what to do, in words; null: nothing';

comment on view pgqueue.stream_archives is
    'One row per stream with an archive: where it is, what is in it, and what is still to be written to it.';
comment on column pgqueue.stream_archives.uri is 'the folder of new files; null: no more segments go there';
comment on column pgqueue.stream_archives.keep_for is
    'how long files are kept, from the last message in them; null: for ever';
comment on column pgqueue.stream_archives.segments is 'segments that are in files';
comment on column pgqueue.stream_archives.messages is 'messages in the files';
comment on column pgqueue.stream_archives.bytes is 'bytes of the files';
comment on column pgqueue.stream_archives.newest_at is
    'when the last of these messages was published; null: there is none';
comment on column pgqueue.stream_archives.archived_at is 'when a segment was written last; null: never';
comment on column pgqueue.stream_archives.waiting is 'segments that are closed, and not in files yet';
comment on column pgqueue.stream_archives.waiting_since is 'since when the first of them is closed';
comment on column pgqueue.stream_archives.attempts is
    'attempts that are at work, or have left files for the next exporter to delete';
comment on column pgqueue.stream_archives.advice is 'what to do, in words; null: nothing';

comment on view pgqueue.group_stats is
    'One row per partition of a group: which worker has it, and how far behind it is.';
comment on column pgqueue.group_stats."group" is 'the group''s name';
comment on column pgqueue.group_stats.partition is 'the partition''s number, from 0';
comment on column pgqueue.group_stats.worker is 'the worker that has it; null: none has';
comment on column pgqueue.group_stats.lease_until is 'until when other workers leave it to that worker';
comment on column pgqueue.group_stats.committed_at is 'when an offset was committed last; null: never';
comment on column pgqueue.group_stats.committed is
    'how far the partition is processed: line_no and seq of the last message that is done';
comment on column pgqueue.group_stats.behind is
    'messages of the whole group after that, of all keys: about one in as many as there are partitions is of this '
    'partition';
comment on column pgqueue.group_stats.estimated is
    'whether behind is an estimate, because more than 3,000 publications are new';

comment on view pgqueue.stream_bindings is 'One row per binding of a topic of a stream to another stream.';
comment on column pgqueue.stream_bindings.topic is 'messages whose key matches this topic are copied';
comment on column pgqueue.stream_bindings.to_stream is 'the stream that gets the copies';
comment on column pgqueue.stream_bindings.bound_at is 'since when messages are copied';

comment on view pgqueue.message_history is
    'One row per acknowledgement that is kept: the worker, the time, and the worker''s result.';
comment on column pgqueue.message_history.seqs is 'the messages'' numbers';
comment on column pgqueue.message_history.deliver_count is 'the largest number of deliveries of one of the messages';
comment on column pgqueue.message_history.result is 'the worker''s result; null: the worker gave none';
comment on column pgqueue.message_history.done_at is 'when they were acknowledged';

comment on view pgqueue.stream_schedules is 'One row per schedule: when it sends next, what it sent last, and what.';
comment on column pgqueue.stream_schedules.schedule is 'the schedule''s name';
comment on column pgqueue.stream_schedules.cron is 'its cron expression; null: it has an interval';
comment on column pgqueue.stream_schedules.every is 'its interval; null: it has a cron expression';
comment on column pgqueue.stream_schedules.time_zone is 'the time zone of the expression or the interval';
comment on column pgqueue.stream_schedules.next_at is 'its next time; null: it is paused';
comment on column pgqueue.stream_schedules.last_planned_at is
    'the time that its last message was due; null: there was none';
comment on column pgqueue.stream_schedules.last_sent_at is 'when that message was sent';
comment on column pgqueue.stream_schedules.last_seq is 'the number of that message; null: it could not be sent';
comment on column pgqueue.stream_schedules.last_error is 'why that message could not be sent';
comment on column pgqueue.stream_schedules.key is 'the key of its messages';
comment on column pgqueue.stream_schedules.data is 'the payload of its messages, in a text or json stream';
comment on column pgqueue.stream_schedules.data_bytes is 'the payload of its messages, in a binary stream';
comment on column pgqueue.stream_schedules.headers is 'the headers of its messages, without schedule and planned_at';
comment on column pgqueue.stream_schedules.priority is 'the priority of its messages';
comment on column pgqueue.stream_schedules.consumers is 'the consumers that get its messages; null: all';
comment on column pgqueue.stream_schedules.start_at is 'from when its interval is counted; null: it has no interval';

comment on view pgqueue.stream_stats is 'One row per stream: its size, and the last number that it gave out.';
comment on column pgqueue.stream_stats.kind is 'text, json or binary';
comment on column pgqueue.stream_stats.consumers is 'how many consumers it has';
comment on column pgqueue.stream_stats.last_publication is 'the last publication that is visible; 0: there is none';
comment on column pgqueue.stream_stats.messages is
    'messages that are stored: an estimate, the planner''s or by what was sent';
comment on column pgqueue.stream_stats.bytes is 'bytes of its messages, with indexes';
comment on column pgqueue.stream_stats.staged_chunks is
    'chunks of messages that Spark tasks have written and no batch has published yet';
comment on column pgqueue.stream_stats.last_seq is 'the last number that was given out';
comment on column pgqueue.stream_stats.settings is 'settings that differ from their defaults, by name';
comment on column pgqueue.stream_stats.sent is
    'numbers given out to senders in all, those of transactions that were rolled back too: two looks give a rate; a '
    'crash or a promotion adds up to 32';

comment on view pgqueue.captures is 'One row per table that is captured, with its stream.';
comment on column pgqueue.captures."table" is 'the table, with its schema';
comment on column pgqueue.captures.owner is 'its owner';
comment on column pgqueue.captures.options is 'how the table is captured, in words';
comment on column pgqueue.captures.outbox is 'whether it is an outbox, whose rows are deleted after their capture';
comment on column pgqueue.captures.uncaptured_partitions is
    'partitions whose direct writes are not captured yet: maintain() adds them where it may; else capture again as '
    'the owner of the table';
