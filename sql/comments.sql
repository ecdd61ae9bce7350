-- One sentence for each thing that people call or ask, for \df+ and \dv+; the headers of the functions say the rest.

comment on schema pgqueue is 'A message queue and stream: see the comments of its functions and views.';

comment on function pgqueue.create_stream   is 'Creates a stream, an append-only sequence of messages.';
comment on function pgqueue.alter_stream    is 'Changes settings of a stream while it is in use.';
comment on function pgqueue.drop_stream     is 'Deletes a stream with its messages and consumers.';
comment on function pgqueue.create_consumer is 'Creates a consumer of a stream: a queue of its own over the stream''s messages.';
comment on function pgqueue.alter_consumer  is 'Changes settings of a consumer while it is in use.';
comment on function pgqueue.drop_consumer   is 'Deletes a consumer with all that it has not finished.';

comment on function pgqueue.seek   is 'Moves a consumer to a position in its stream, as if it were created there.';
comment on function pgqueue.replay is 'Delivers messages between two positions once more to a consumer that has finished them.';
comment on function pgqueue.pause  is 'Lets a consumer claim nothing, until it is resumed.';
comment on function pgqueue.resume is 'Lets a paused consumer claim again.';

comment on function pgqueue.bind       is 'Copies what is sent to a stream, and has a key of a topic, to another stream.';
comment on function pgqueue.unbind     is 'Copies nothing of a topic to another stream any more.';
comment on function pgqueue.test_topic is 'Whether a key is of a topic.';

comment on function pgqueue.send       is 'Publishes a message to a stream, in the caller''s transaction, and returns its number.';
comment on function pgqueue.send_batch is 'Publishes messages together, in the order given, and returns their numbers.';

comment on function pgqueue.create_schedule is 'Sends a message at each time that a cron expression, or an interval, says.';
comment on function pgqueue.drop_schedule   is 'Deletes a schedule; what it sent stays.';
comment on function pgqueue.pause_schedule  is 'Lets a schedule send nothing, until it is resumed.';
comment on function pgqueue.resume_schedule is 'Lets a paused schedule send again, from its next time on.';
comment on function pgqueue.schedule_times  is 'The next times that a cron expression, or an interval, says.';

comment on function pgqueue.capture    is 'Lets what is written to a table become messages of a stream, in the same transaction.';
comment on function pgqueue.release    is 'Captures a table no more.';
comment on function pgqueue.set_dedup_window is 'Says for how long a stream remembers the dedup keys of its messages.';

comment on function pgqueue.claim       is 'Claims messages for a consumer, without reading their payloads.';
comment on function pgqueue.receive     is 'Claims messages for a consumer and reads them, in the order of delivery.';
comment on function pgqueue.receive_where is 'Claims and reads messages that pass a condition, and leaves the others as they are.';
comment on function pgqueue.ack         is 'Acknowledges a claim, or some of its messages: they are done.';
comment on function pgqueue.is_suspected is 'Whether a claim holds messages that may kill their worker.';
comment on function pgqueue.nack        is 'Returns a claim, or some of its messages, to be delivered again.';
comment on function pgqueue.read_dead   is 'Reads dead letters of a consumer with what they hold, why they died and how often they were delivered.';
comment on function pgqueue.redrive     is 'Delivers dead letters again to the consumer that gave them up.';
comment on function pgqueue.purge_dead  is 'Deletes dead letters.';
comment on function pgqueue.cancel      is 'Takes messages from a consumer that has not finished them.';
comment on function pgqueue.retry       is 'Ends the delays of a consumer''s messages that failed, and lets them come in large claims again.';
comment on function pgqueue.defer       is 'Puts a claim, or some of its messages, off, with a state that comes back with them: no failure.';
comment on function pgqueue.extend      is 'Holds a claim longer, by an interval from now.';
comment on function pgqueue.dead_letter is 'Dead-letters a claim, or some of its messages: nobody gets them any more.';

comment on function pgqueue.read         is 'Reads the next messages of a stream after an offset, without claiming them, and returns the next offset.';
comment on function pgqueue.start_offset is 'The offset at which a reader begins: at the earliest message, at the latest, or at a time.';
comment on function pgqueue.read_to      is 'The offset after the next messages of a stream, without reading them.';
comment on function pgqueue.end_offset   is 'The offset at which a reader ends that has read up to another one.';
comment on function pgqueue.size_between is 'How many bytes of data there are between two offsets.';
comment on function pgqueue.offset_lag   is 'How many messages there are after an offset, and since when.';
comment on function pgqueue.read_plan    is 'The messages between two offsets as ranges of numbers, the same for ever.';

comment on function pgqueue.create_group     is 'Creates a group: workers that share a stream by partitions of its keys.';
comment on function pgqueue.drop_group       is 'Deletes a group of workers.';
comment on function pgqueue.reset_group      is 'Moves a group to another position of its stream.';
comment on function pgqueue.lease_partitions is 'Renews a worker''s lease in a group, and takes the partitions that it is due.';
comment on function pgqueue.leave_group      is 'Ends a worker of a group: its partitions are free.';
comment on function pgqueue.read_partitions  is 'Reads the next messages of a worker''s partitions, in order.';
comment on function pgqueue.plan_partitions  is 'What a worker of a group reads next, as ranges of numbers.';
comment on function pgqueue.note_offset      is 'Notes how far a reader is that keeps its offset itself: the group is then as far.';
comment on function pgqueue.commit_offset    is 'Notes how far a partition of a group is worked off, in the worker''s transaction.';

comment on function pgqueue.scan_messages     is 'The published messages of a stream as ranges of numbers, to read them in bulk.';
comment on function pgqueue.scan_pending      is 'What a consumer has not finished, and in which state, as ranges of numbers.';
comment on function pgqueue.scan_claimed      is 'What is in live claims, and whose these are, as ranges of numbers.';
comment on function pgqueue.scan_parts        is 'How to share out dead letters, history or publications among who reads them in parallel.';
comment on function pgqueue.scan_dead         is 'Dead letters of a part as ranges of numbers, and why they died.';
comment on function pgqueue.scan_archived     is 'What a consumer was done with, of a part, as ranges of numbers, with results and owners.';
comment on function pgqueue.scan_publications is 'Publications of a part: when, what and to whom.';

comment on function pgqueue.outcome          is 'What became of a message for a consumer: its state, the worker''s result, who had it, and when.';
comment on function pgqueue.listen_done      is 'Lets this session hear when a consumer is done with messages.';
comment on function pgqueue.start_waiting    is 'Waits for publications of a stream from now on: this session listens, and producers notify it.';
comment on function pgqueue.still_publishing is 'Those of some transactions that may still publish to a stream without notifying who waits.';
comment on function pgqueue.next_due         is 'When a claim makes sense again for who got nothing: a delay, a lease or a schedule.';
comment on function pgqueue.stop_waiting     is 'Does not wait for publications of a stream any more: producers need not notify this session.';

comment on function pgqueue.open_stream      is 'A stream''s id and kind by its name, for a Spark query.';
comment on function pgqueue.open_streams     is 'All streams with their ids and kinds, for a Spark query.';
comment on function pgqueue.open_consumer    is 'A consumer''s id and settings by its name, for a Spark query or a worker.';
comment on function pgqueue.last_publication is 'The last publication of a stream that is visible now.';
comment on function pgqueue.reader_claim     is 'The end offset of the next micro-batch of a Spark query; acknowledges the batches before it.';
comment on function pgqueue.reader_extend    is 'Holds the claims of a Spark query longer: its heartbeat.';
comment on function pgqueue.reader_resume    is 'Prepares the messages of a micro-batch to be read, again if need be.';
comment on function pgqueue.reader_plan      is 'The messages of a micro-batch as ranges of numbers, in the order of delivery.';
comment on function pgqueue.reader_query     is 'Records which Spark query a reader belongs to, and refuses a second one of the same query.';
comment on function pgqueue.reader_lost      is 'How many messages of a micro-batch its reader has lost to other claimers.';
comment on function pgqueue.reader_others    is 'What other readers of a consumer hold, and until when.';
comment on function pgqueue.reader_backlog   is 'How many messages a consumer has not claimed yet.';
comment on function pgqueue.reader_available is 'How many messages a consumer could claim now, about.';
comment on function pgqueue.reader_state     is 'What a Spark query holds, for who looks at its checkpoint.';
comment on function pgqueue.reader_release   is 'Gives back what a Spark query holds, and forgets its checkpoint.';
comment on function pgqueue.reader_fork      is 'Makes a reader for a copy of a checkpoint.';
comment on function pgqueue.recent_size      is 'How many bytes of data the last messages of a stream have, on average.';
comment on function pgqueue.reader_ack       is 'Acknowledges what a Spark query has finished, up to an offset.';
comment on function pgqueue.reader_lag       is 'How far a consumer is behind, in messages and since when.';

comment on function pgqueue.open_sink      is 'A stream''s id and kind by its name, for a Spark sink that publishes to these consumers.';
comment on function pgqueue.is_published   is 'Whether a batch of a sink, or a later one, was published.';
comment on function pgqueue.reserve        is 'Takes new numbers of a stream for messages that the caller writes and stages in this transaction.';
comment on function pgqueue.publish_written is 'Publishes messages that the caller wrote itself, with numbers that it reserved in this transaction.';
comment on function pgqueue.stage          is 'Records messages that a task of a sink has written, which nobody sees yet.';
comment on function pgqueue.publish_staged is 'Publishes all that was staged for a batch of a sink, once.';
comment on function pgqueue.settle_messages is 'Acknowledges, returns or dead-letters messages by their numbers, for a batch of a sink, once.';
comment on function pgqueue.revive_messages is 'Redrives or retries messages by their numbers, for a batch of a sink, once.';

comment on function pgqueue.set_retention  is 'Sets how long the messages of a stream are kept.';
comment on function pgqueue.maintain       is 'Trims what need not be kept, and deletes what failed writers left behind: a bounded part of it.';
comment on procedure pgqueue.maintain_all  is 'Calls maintain() until nothing is unfinished, in many short transactions; for pg_cron.';
comment on function pgqueue.is_restored    is 'Whether this database is on another server, or timeline, than was noted.';
comment on function pgqueue.recover        is 'Begins a new incarnation of each stream, after a restore or failover: offsets beyond that state are refused.';
comment on function pgqueue.create_roles   is 'Makes the group roles pgqueue_producer, _consumer, _observer and _admin, and grants them what they need.';
comment on function pgqueue.schema_version is 'The version of this schema.';

comment on function pgqueue.explain_message is 'Why a message is where it is, for one consumer, and until when.';
comment on function pgqueue.peek            is 'What a consumer has before it, with what it holds, without claiming it.';
comment on function pgqueue.peek_at         is 'Messages of a stream by their numbers, with what they hold.';
comment on function pgqueue.consumer_position is 'Where a consumer is in its stream.';
comment on function pgqueue.export_lines    is 'The messages of a stream as lines of JSON, page by page.';
comment on function pgqueue.import_lines    is 'Publishes messages that are written as lines of JSON, once where the stream has a dedup_window.';
comment on function pgqueue.key_stats       is 'The keys of which a consumer has most in hand: what waits, is delayed, and is in claims.';

comment on view pgqueue.message_states    is 'One row per message and consumer that is not done with it, with its state.';
comment on view pgqueue.consumer_settings is 'One row per consumer: how it was created.';
comment on view pgqueue.dead_letters      is 'One row per set of dead letters that died together: why, how often they were delivered, whose they were.';
comment on view pgqueue.consumer_stats    is 'One row per consumer: how many messages it has before it, by state.';
comment on view pgqueue.open_claims       is 'One row per live claim: who has which messages, since when and until when.';
comment on view pgqueue.consumer_health   is 'One row per consumer: how it fares, and why: ok, full, paused, unattended or failing.';
comment on view pgqueue.stream_retention  is 'One row per stream: how long its messages are kept, and what is kept although it is due, by whom.';
comment on view pgqueue.group_stats       is 'One row per partition of a group: who has it, and how far behind it is.';
comment on view pgqueue.stream_bindings  is 'One row per binding of a topic of a stream to another stream.';
comment on view pgqueue.message_history  is 'One row per acknowledgement that is kept: who, when, and what the worker said.';
comment on view pgqueue.stream_schedules is 'One row per schedule: when it sends next, what it sent last, and what.';
comment on view pgqueue.stream_stats      is 'One row per stream: its size, and the last number that it gave out.';
comment on view pgqueue.captures          is 'One row per table that is captured, with its stream.';

-- The columns of the views: what each is, for \d+ and guide/reference.md.
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
                     ('priority',      'of the message: higher is earlier'),
                     ('deliver_count', 'how often it was delivered'),
                     ('claim_id',      'the claim''s number, by which its owner settles it'),
                     ('owner',         'who claimed it: the application_name of its connection'),
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

comment on column pgqueue.message_states.seq               is 'the message''s number';
comment on column pgqueue.message_states.state             is
    'new (not taken yet), unsifted (its filter has not judged it), ready, delayed, waiting (behind an earlier one of its key), claimed '
    'or dead';
comment on column pgqueue.message_states.not_visible_until is 'until when it is delayed; null: it is not';
comment on column pgqueue.message_states.claim_id          is 'the claim that holds it, or in which it died; null: none';
comment on column pgqueue.message_states.lease_until       is 'until when other claimers leave it to its owner; null: it is not claimed';
comment on column pgqueue.message_states.last_error        is 'why it failed last, or died; null: it has not failed, or nothing was said';

comment on column pgqueue.consumer_settings.max_deliver_count  is 'a message that failed so often is a dead letter; null: never';
comment on column pgqueue.consumer_settings.visibility_timeout is 'how long a claim is held without being extended';
comment on column pgqueue.consumer_settings.topic              is 'of the messages that it gets; null: of any';
comment on column pgqueue.consumer_settings.condition          is 'the jsonpath that its messages pass; null: none';
comment on column pgqueue.consumer_settings.settings           is 'all settings that are not the default, by name';

comment on column pgqueue.consumer_stats.new             is 'messages that it has not taken yet: exact up to 3,000 publications, and close beyond';
comment on column pgqueue.consumer_stats.ready           is 'messages that can be claimed';
comment on column pgqueue.consumer_stats.delayed         is 'messages that are to be delivered later';
comment on column pgqueue.consumer_stats.waiting         is 'messages behind an earlier one of their key';
comment on column pgqueue.consumer_stats.claimed         is 'messages in live claims';
comment on column pgqueue.consumer_stats.dead            is 'dead letters';
comment on column pgqueue.consumer_stats.backlog         is 'all that is neither claimed nor dead';
comment on column pgqueue.consumer_stats.claims          is 'live claims';
comment on column pgqueue.consumer_stats.expired         is 'those of them whose lease ended';
comment on column pgqueue.consumer_stats.next_expiry     is 'when the first lease of a live claim ends, or ended; null: there is no claim';
comment on column pgqueue.consumer_stats.skipped         is 'messages that retention took from it in all';
comment on column pgqueue.consumer_stats.taken           is 'messages that it took in hand in all, once or again: two looks tell a rate';
comment on column pgqueue.consumer_stats.settled         is 'messages that were acknowledged or died in all, once or again: two looks tell a rate';
comment on column pgqueue.consumer_stats.oldest_at       is 'when the oldest message was sent that could be delivered now; null: there is none';
comment on column pgqueue.consumer_stats.oldest_claim_at is 'since when the oldest claim is held; null: there is none';

comment on column pgqueue.open_claims.query     is 'the Spark query whose claim it is; null: a worker''s';
comment on column pgqueue.open_claims.reader    is 'its checkpoint, by the number that Spark''s offsets have; null: a worker''s';
comment on column pgqueue.open_claims.expired   is 'whether its lease ended: the next claimer who needs its messages gets them';
comment on column pgqueue.open_claims.messages  is 'messages that it had at first';
comment on column pgqueue.open_claims.remaining is 'those of them that are not settled';
comment on column pgqueue.open_claims.first_seq is 'the lowest number of a message in it';

comment on column pgqueue.consumer_health.status      is
    'full (max_backlog is reached), paused, unattended (nobody has claimed for a minute), failing (messages died in the last hour), or '
    'ok: the first that is so';
comment on column pgqueue.consumer_health.because     is 'why, in words';
comment on column pgqueue.consumer_health.backlog     is 'messages that it has before it';
comment on column pgqueue.consumer_health.max_backlog is 'how many it may have; null: any number';
comment on column pgqueue.consumer_health.attended_at is 'when somebody claimed last, to a second or so; null: never';

comment on column pgqueue.stream_retention.keep_for      is 'for how long messages are kept; null: no limit';
comment on column pgqueue.stream_retention.keep_messages is 'how many are kept; null: no limit';
comment on column pgqueue.stream_retention.keep_bytes    is 'how many bytes of them are kept; null: no limit';
comment on column pgqueue.stream_retention.until_done    is 'whether they go when every consumer is done with them';
comment on column pgqueue.stream_retention.unread        is 'what becomes of those that a consumer still owes: keep or drop';
comment on column pgqueue.stream_retention.keep_dead     is 'for how long dead letters are kept; null: for ever';
comment on column pgqueue.stream_retention.bytes         is 'what its messages take now, with indexes';
comment on column pgqueue.stream_retention.tables        is 'how many tables these are in';
comment on column pgqueue.stream_retention.oldest_at     is 'when the oldest publication was made that is there; null: none is';
comment on column pgqueue.stream_retention.trimmed       is 'how many messages were trimmed in all';
comment on column pgqueue.stream_retention.trimmed_at    is 'when some were trimmed last; null: never';
comment on column pgqueue.stream_retention.held_bytes    is 'what is kept although it is due';
comment on column pgqueue.stream_retention.held_by       is 'by whom: consumers, dead letters, transactions';
comment on column pgqueue.stream_retention.maintained_at is 'when maintain() looked at it last; null: never';
comment on column pgqueue.stream_retention.advice        is 'what to do, in words; null: nothing';

comment on column pgqueue.dead_letters.reason     is 'a word, such as rejected, expired, or what was given to dead_letter';
comment on column pgqueue.dead_letters.error      is 'the last error that a worker told; null: none did';
comment on column pgqueue.dead_letters.details    is 'what was given to dead_letter beside; null: nothing';
comment on column pgqueue.dead_letters.first_seq  is 'the lowest number among them';
comment on column pgqueue.dead_letters.last_seq   is 'the highest';
comment on column pgqueue.dead_letters.owner      is 'who had them last: an application_name; null: nobody';
comment on column pgqueue.dead_letters.claim_id   is 'the claim in which they died; null: none';
comment on column pgqueue.dead_letters.died_at    is 'when they died';

comment on column pgqueue.stream_bindings.topic     is 'the topic of the keys of what is copied';
comment on column pgqueue.stream_bindings.to_stream is 'the stream to which it is copied';
comment on column pgqueue.stream_bindings.bound_at  is 'since when';

comment on column pgqueue.message_history.seqs          is 'the messages'' numbers';
comment on column pgqueue.message_history.deliver_count is 'how often one of them was delivered, at most';
comment on column pgqueue.message_history.result        is 'what the worker said; null: nothing';
comment on column pgqueue.message_history.done_at       is 'when they were acknowledged';

comment on column pgqueue.stream_schedules.schedule        is 'its name';
comment on column pgqueue.stream_schedules.cron            is 'its cron expression; null: it has an interval';
comment on column pgqueue.stream_schedules.every           is 'its interval; null: it has a cron expression';
comment on column pgqueue.stream_schedules.time_zone       is 'in which these are meant';
comment on column pgqueue.stream_schedules.next_at         is 'its next time; null: it is paused';
comment on column pgqueue.stream_schedules.last_planned_at is 'the time of its last message; null: there was none';
comment on column pgqueue.stream_schedules.last_sent_at    is 'when that was sent';
comment on column pgqueue.stream_schedules.last_seq        is 'its number; null: it could not be sent';
comment on column pgqueue.stream_schedules.last_error      is 'why not';
comment on column pgqueue.stream_schedules.key             is 'of the messages that it sends';
comment on column pgqueue.stream_schedules.data            is 'what they hold, in a text or json stream';
comment on column pgqueue.stream_schedules.data_bytes      is 'what they hold, in a binary one';
comment on column pgqueue.stream_schedules.headers         is 'their headers, without schedule and planned_at';
comment on column pgqueue.stream_schedules.priority        is 'their priority';
comment on column pgqueue.stream_schedules.consumers       is 'to these alone; null: to all';
comment on column pgqueue.stream_schedules.start_at        is 'from when its interval is counted; null: it has none';

comment on column pgqueue.stream_stats.kind             is 'text, json or binary';
comment on column pgqueue.stream_stats.consumers        is 'how many it has';
comment on column pgqueue.stream_stats.last_publication is 'the last one that is visible; 0: none';
comment on column pgqueue.stream_stats.messages         is 'those that are stored: an estimate, the planner''s';
comment on column pgqueue.stream_stats.bytes            is 'what they take, with indexes';
comment on column pgqueue.stream_stats.staged_blocks    is 'what tasks of Spark have written and no batch has published yet';
comment on column pgqueue.stream_stats.last_seq         is 'the last number that was given out';
comment on column pgqueue.stream_stats.settings         is 'settings that are not the default, by name';
comment on column pgqueue.stream_stats.sent             is 'numbers given out to senders in all, those of what was rolled back too: two looks tell a rate';

comment on column pgqueue.group_stats."group"      is 'the group''s name';
comment on column pgqueue.group_stats.partition    is 'its number, from 0';
comment on column pgqueue.group_stats.worker       is 'who has it; null: nobody';
comment on column pgqueue.group_stats.lease_until  is 'until when others leave it to that worker';
comment on column pgqueue.group_stats.committed_at is 'when something was committed last; null: never';
comment on column pgqueue.group_stats.committed    is 'how far it is: line_no and seq of the last message that is done';
comment on column pgqueue.group_stats.behind       is
    'messages of the group after that, of all keys: of these it has about one in as many as there are '
    'partitions';

comment on column pgqueue.captures."table"               is 'the table, with its schema';
comment on column pgqueue.captures.owner                 is 'its owner';
comment on column pgqueue.captures.options               is 'how it is captured, in words';
comment on column pgqueue.captures.outbox                is 'whether it is an outbox, whose rows are deleted again';
comment on column pgqueue.captures.uncaptured_partitions is
    'partitions to which what is written directly is not captured; maintain() changes that where it may, else capture again as the '
    'owner of the table';
