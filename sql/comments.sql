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
