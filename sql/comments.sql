-- A sentence for each function that people call, for psql's \df+. Written by make docs, from
-- the first sentence of each function's header: change it there. view_comments.sql has those of
-- views and of their columns.

comment on schema pgqueue is
    'A message queue and stream: see the comments of its functions and views.';

-- base/checks.sql
comment on routine pgqueue.check_timeout is 'Refuses a visibility timeout that is not allowed.';

-- queue/filters.sql
comment on routine pgqueue.as_jsonpath is 'A JSON path from text; an error about the text names the argument.';

-- publish/backlog.sql
comment on routine pgqueue.consumer_backlog is 'Counts the messages that a consumer has not claimed yet.';

-- functions/positions.sql
comment on routine pgqueue.seek is
    'Moves a consumer, or a group, to a position in its stream, as if it were created there.';
comment on routine pgqueue.replay is
    'Delivers messages between two positions once more to a consumer that has finished or skipped them.';
comment on routine pgqueue.pause is 'Pauses a consumer: it claims nothing until it is resumed.';
comment on routine pgqueue.resume is 'Lets a paused consumer claim again, and wakes up workers that wait for messages.';

-- functions/consumers.sql
comment on routine pgqueue.create_consumer is
    'Creates a consumer of a stream: a queue of its own over the stream''s messages.';
comment on routine pgqueue.alter_consumer is 'Changes settings of a consumer while it is in use.';
comment on routine pgqueue.drop_consumer is 'Deletes a consumer, or a group, with all that it has not finished.';

-- functions/streams.sql
comment on routine pgqueue.open_sink is
    'Returns the stream of a name, to write to, and checks the consumers to publish to.';
comment on routine pgqueue.create_stream is 'Creates a stream, an append-only sequence of messages.';
comment on routine pgqueue.alter_stream is 'Changes settings of a stream while it is in use.';
comment on routine pgqueue.schema_of is
    'Returns the columns of a stream''s schema, as Spark writes a schema in JSON: for StructType.fromJson, and '
    'from_json.';
comment on routine pgqueue.drop_stream is 'Deletes a stream with its messages and consumers.';

-- functions/publish.sql
comment on routine pgqueue.send is
    'Publishes a message to a stream, in the caller''s transaction, and returns its number.';
comment on routine pgqueue.send_batch is 'Publishes messages together, in the order given, and returns their numbers.';
comment on routine pgqueue.server_of is
    'Returns the server of a key, where a stream is on several servers: a number from 0 to below p_servers.';

-- functions/schedules.sql
comment on routine pgqueue.create_schedule is
    'Sends a message at each time that a cron expression, or an interval, says.';
comment on routine pgqueue.drop_schedule is 'Deletes a schedule; messages that it sent stay.';
comment on routine pgqueue.pause_schedule is 'Pauses a schedule: it sends nothing until it is resumed.';
comment on routine pgqueue.resume_schedule is
    'Lets a paused schedule send again, from its next time on; times that passed meanwhile are skipped.';
comment on routine pgqueue.schedule_times is
    'Returns the next times of a cron expression, or an interval, before a schedule is created.';

-- functions/filters.sql
comment on routine pgqueue.test_topic is 'Tells whether a key is of a topic.';
comment on routine pgqueue.bind is
    'Copies messages of a topic that are sent to a stream from now on to another stream.';
comment on routine pgqueue.unbind is 'Stops copying messages of a topic to another stream.';

-- functions/capture_function.sql
comment on routine pgqueue.send_captured is 'Publishes rows that a trigger captured, in their order.';
comment on routine pgqueue.was_truncated is
    'Whether this session''s last message to a stream is that a captured table was truncated, in this transaction.';

-- functions/capture.sql
comment on routine pgqueue.note_captures is
    'Notes which capturing triggers a table and its partitions have; for capture and release.';
comment on routine pgqueue.capture_script is
    'The statements by which a table''s owner captures the table, or ends the capture: capture and release execute '
    'them.';
comment on routine pgqueue.execute_as is
    'Executes statements as a role that the caller may become, and then is the caller again; for capture and release.';
comment on routine pgqueue.change_capture is
    'Does what capture and release do: waits until nobody writes to the table, and executes capture_script as its '
    'owner.';
comment on routine pgqueue.capture is
    'Captures a table: each write to it becomes a message of a stream, in the same transaction.';
comment on routine pgqueue.release is 'Ends the capture of a table; messages that were captured stay.';

-- functions/waiting.sql
comment on routine pgqueue.start_waiting is
    'Begins to wait for publications of a stream: this session listens from now on, and producers notify it.';
comment on routine pgqueue.still_publishing is
    'Returns which of some transactions may still be publishing to a stream.';
comment on routine pgqueue.next_due is
    'Returns when a consumer that got nothing should claim again: the next delay or lease ends, or a schedule is due.';
comment on routine pgqueue.stop_waiting is 'Stops waiting: producers need not notify this session any more.';

-- functions/receive.sql
comment on routine pgqueue.claim is 'Claims at most p_max messages for a consumer, without reading their payloads.';
comment on routine pgqueue.receive is
    'Claims at most p_max messages for a consumer and reads them, in the order of delivery.';

-- functions/receive_where.sql
comment on routine pgqueue.receive_where is
    'Claims and reads messages that pass a condition, and leaves the others as they are.';

-- functions/settle.sql
comment on routine pgqueue.ack is 'Acknowledges a claim, or the messages of it that are given: they are done.';
comment on routine pgqueue.nack is
    'Returns a claim, or the messages of it that are given, to be delivered again: they failed.';
comment on routine pgqueue.defer is
    'Puts off a claim, or some of its messages: they come later, and this is no failure.';
comment on routine pgqueue.is_suspected is 'Tells whether a claim holds messages that may kill their worker.';
comment on routine pgqueue.retry is
    'Ends the delays of failed messages, and lets them come in large claims again: after an outage, say.';
comment on routine pgqueue.extend is 'Holds a claim longer: its lease ends p_by from now, or later if it would anyway.';
comment on routine pgqueue.dead_letter is
    'Dead-letters a claim, or the messages of it that are given: nobody gets them any more.';

-- functions/dead.sql
comment on routine pgqueue.redrive is 'Delivers dead letters again to the consumer that gave them up.';
comment on routine pgqueue.purge_dead is
    'Deletes dead letters: nobody gets them any more, and their messages need not be kept for them.';
comment on routine pgqueue.read_dead is
    'Reads dead letters with what they hold, in the order of their numbers, and changes nothing.';

-- functions/cancel.sql
comment on routine pgqueue.cancel is 'Takes messages from a consumer that has not finished them.';

-- functions/postpone.sql
comment on routine pgqueue.postpone is
    'Postpones messages of a consumer that nobody has claimed: none is delivered before a time.';

-- functions/read.sql
comment on routine pgqueue.start_offset is 'Returns the offset at which a reader begins.';
comment on routine pgqueue.end_offset is
    'Returns the offset of an end position, but never one before the reader''s own offset.';
comment on routine pgqueue.end_after is
    'Returns the end offset after a start offset, for Spark before 4.1: never before the start.';
comment on routine pgqueue.offset_lag is
    'Tells how many messages are after a reader''s offset, and when the first was published.';
comment on routine pgqueue.read_to is 'Returns the offset after the next messages of a stream, without reading them.';
comment on routine pgqueue.read_plan is
    'Returns the messages between two offsets as ranges [lo, hi) of seq, in the order of reading.';
comment on routine pgqueue.size_between is 'Returns how many bytes of data the messages between two offsets have.';
comment on routine pgqueue.read is 'Reads the next messages of a stream after an offset, without claiming them.';

-- functions/groups.sql
comment on routine pgqueue.create_group is 'Creates a group: workers that share a stream by partitions of its keys.';
comment on routine pgqueue.note_offset is
    'Sets a group to the offset of a reader that keeps its own offset, as a Spark query does.';

-- functions/group_workers.sql
comment on routine pgqueue.lease_partitions is
    'Renews a worker''s lease in a group, or begins it, and takes the free partitions that are the worker''s share.';
comment on routine pgqueue.leave_group is
    'Ends a worker of a group: its partitions are free, except those that it is committing.';
comment on routine pgqueue.commit_offset is
    'Notes how far a partition of a group is worked off, in the worker''s own transaction.';
comment on routine pgqueue.plan_partitions is
    'Plans what a worker of a group reads next, as ranges [lo, hi) of seq in the order of delivery.';
comment on routine pgqueue.read_partitions is 'Reads the next messages of a worker''s partitions, in order.';

-- spark/checkpoint.sql
comment on routine pgqueue.reader_ack is
    'Acknowledges what a Spark query has finished, up to an offset of Spark''s commit log.';
comment on routine pgqueue.reader_state is
    'The state of a checkpoint reader, compared with its checkpoint: no row when the database does not know it.';
comment on routine pgqueue.reader_release is 'Gives back what a Spark query holds, and forgets its checkpoint reader.';
comment on routine pgqueue.reader_fork is
    'Makes a checkpoint reader for a copy of a checkpoint, which goes on where the first one is.';

-- spark/admission.sql
comment on routine pgqueue.recent_size is
    'How many bytes of data the last 100 messages of a stream have, on average; null: it has none.';

-- spark/archive.sql
comment on routine pgqueue.archive_files is
    'Returns the segments of a stream that are in files, in order: their numbers from lo to below hi, and their '
    'files.';

-- spark/source.sql
comment on routine pgqueue.open_stream is 'A stream''s id and kind by its name, for a Spark query.';
comment on routine pgqueue.open_streams is
    'All streams with their ids and kinds, for a Spark query that reads streams by a pattern.';
comment on routine pgqueue.open_consumer is 'A consumer''s id and settings by its name, for a Spark query or a worker.';
comment on routine pgqueue.last_publication is 'The last publication of a stream that is visible now; 0: none.';
comment on routine pgqueue.reader_claim is
    'Acknowledges the finished batches of a Spark query, and returns the end offset of its next micro-batch.';
comment on routine pgqueue.reader_extend is 'Holds the claims of a Spark query longer: its heartbeat.';
comment on routine pgqueue.reader_resume is 'Prepares the messages of a micro-batch to be read, again if need be.';
comment on routine pgqueue.reader_lost is
    'How many messages of a micro-batch its reader has lost to other claimers, because a lease ended.';
comment on routine pgqueue.reader_others is
    'How many messages other readers of a consumer hold, and until when, if these do not come back.';
comment on routine pgqueue.reader_plan is
    'The messages of a micro-batch as ranges of numbers [lo, hi), in the order of delivery.';
comment on routine pgqueue.reader_query is
    'Records which Spark query a reader belongs to, and refuses a second reader of the same query.';

-- spark/batches.sql
comment on routine pgqueue.is_published is 'Whether a batch of a sink, or a later one, was published.';

-- spark/unstage.sql
comment on routine pgqueue.unstage is 'Deletes staged chunks of a batch that failed, with their messages.';

-- spark/sink.sql
comment on routine pgqueue.begin_write is
    'Begins to write a batch of a sink: a try of it, which the tasks name when they stage.';
comment on routine pgqueue.reserve is
    'Takes new numbers of a stream for messages that the caller writes and stages, or publishes, in this transaction.';
comment on routine pgqueue.publish_written is
    'Publishes messages that the caller wrote itself, with numbers that it reserved in this transaction.';
comment on routine pgqueue.stage is 'Records messages that a task of a sink has written, which nobody sees yet.';
comment on routine pgqueue.publish_staged is
    'Publishes all that was staged for a batch of a sink, once: the named staged chunks become visible together.';

-- spark/actions.sql
comment on routine pgqueue.settle_messages is
    'Acknowledges, returns or dead-letters messages by their numbers, for a batch of a sink, once for each consumer.';
comment on routine pgqueue.revive_messages is
    'Redrives or retries messages by their numbers, for a batch of a sink, once for each consumer.';

-- spark/table_sink.sql
comment on routine pgqueue.open_table is
    'Checks a write to a table, before rows are staged: the target, the columns, the unique index, and rights.';
comment on routine pgqueue.open_table_write is 'Finds or makes the table for the staged rows of a write.';
comment on routine pgqueue.begin_table_batch is
    'Begins a batch of a table, once, as its commit; apply_table_batch() calls it.';
comment on routine pgqueue.drop_table_write is 'Drops the staged rows of a write that is over, or will not commit.';

-- spark/table_apply.sql
comment on routine pgqueue.apply_table_batch is
    'Writes the staged rows of a batch into their table, once: tasks copied them, and this is the commit.';

-- inspect/backlog.sql
comment on routine pgqueue.consumer_lag is 'Tells how far a consumer is behind, for the progress of its Spark query.';
comment on routine pgqueue.consumer_available is
    'Counts the messages that a consumer could claim now, for queries that wait for a number of messages.';

-- inspect/seeing.sql
comment on routine pgqueue.explain_message is 'Explains why a message is where it is, for one consumer.';
comment on routine pgqueue.key_stats is
    'Shows the keys that a consumer is busy with, first those of which it has most in hand.';

-- inspect/peeking.sql
comment on routine pgqueue.peek is
    'Shows the messages that a consumer gets next, with what they hold, and changes nothing.';
comment on routine pgqueue.peek_at is
    'Shows published messages of a stream by their numbers, whichever consumers get them.';
comment on routine pgqueue.consumer_position is
    'Shows how far a consumer is in its stream, for people: the first message that it has not taken.';

-- inspect/export.sql
comment on routine pgqueue.export_lines is
    'Returns the next messages of a stream as lines of JSON, in the order of publication.';
comment on routine pgqueue.import_lines is
    'Publishes messages that are lines of JSON, together and in their order, in the caller''s transaction.';

-- inspect/history.sql
comment on routine pgqueue.outcome is 'Tells how a message ended for a consumer, or in which state it is.';
comment on routine pgqueue.failures is
    'Lists the failed deliveries of a message that a consumer has in hand, or gave up: the last ten, in their order.';
comment on routine pgqueue.listen_done is
    'Lets this session hear when a consumer is done with messages, acknowledged or dead.';

-- inspect/scanning.sql
comment on routine pgqueue.scan_messages is
    'Returns the published messages of a stream as ranges, for all consumers, also those not due yet.';
comment on routine pgqueue.scan_pending is
    'Returns the messages that a consumer has not finished, and their states, as ranges.';
comment on routine pgqueue.scan_claimed is
    'Returns the messages in live claims, and the owners of these claims, as ranges.';
comment on routine pgqueue.scan_parts is
    'Divides dead letters, history or publications into parts, for parallel readers.';
comment on routine pgqueue.scan_dead is
    'Returns the dead letters of a part as ranges, in the order in which they died.';
comment on routine pgqueue.scan_archived is
    'Returns the history of a part as ranges, in the order of acknowledgement, with results and owners.';
comment on routine pgqueue.scan_publications is
    'Returns the publications of a part, a row each: when, what and to which consumers.';

-- inspect/where.sql
comment on routine pgqueue.scan_where is
    'Checks a condition on the rows of a table, for the one who asks it: an expression of SQL over columns.';

-- upkeep/retention.sql
comment on routine pgqueue.set_retention is
    'Sets how long the messages of a stream are kept; without limits: for ever, the default.';

-- upkeep/archive.sql
comment on routine pgqueue.set_archive is
    'Has the old messages of a stream written to files, before retention takes them out of Postgres.';
comment on routine pgqueue.drop_archive is 'Ends the archive of a stream, with all that is in it.';

-- upkeep/export.sql
comment on routine pgqueue.export_streams is
    'The streams for which there is something to export or to delete, the dropped ones too.';
comment on routine pgqueue.lock_export is
    'Locks the export of a stream, if no other exporter has it, to the end of the transaction.';
comment on routine pgqueue.begin_export is
    'Begins to export the next segment of a stream; returns no row when there is none.';
comment on routine pgqueue.export_slices is
    'Divides the segment of an attempt into slices of limit_exported() numbers, with the ids of the publications in '
    'each.';
comment on routine pgqueue.export_ranges is
    'The messages of a slice as ranges in order, with what their publications say of them.';
comment on routine pgqueue.end_export is 'Notes that the segment of an attempt is in files, as their footers say.';
comment on routine pgqueue.export_leftovers is
    'The attempts of a stream whose files nothing refers to, for the caller to delete.';
comment on routine pgqueue.forget_leftover is 'Forgets an attempt whose files were deleted.';

-- upkeep/maintain.sql
comment on routine pgqueue.maintain is
    'Deletes what failed writers left, trims what retention need not keep, and forgets abandoned readers.';
comment on routine pgqueue.maintain_all is
    'Calls maintain() until nothing is unfinished, each time in a transaction of its own: for pg_cron, or psql.';

-- upkeep/recover.sql
comment on routine pgqueue.is_restored is
    'Tells whether this database is on another server or timeline than was noted.';
comment on routine pgqueue.recover is 'Begins a new incarnation of each stream, after a restore or a promotion.';

-- version.sql
comment on routine pgqueue.schema_version is 'The version of this schema.';

-- roles.sql
comment on routine pgqueue.create_roles is
    'Makes the group roles pgqueue_producer, _consumer, _observer and _admin, and grants them what they need.';
