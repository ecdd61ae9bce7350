-- A sentence for each function that people call, for psql's \df+. Written by make docs, from
-- the first sentence of each function's header: change it there. view_comments.sql has those of
-- views and of their columns.

comment on schema pgqueue is
    'A message queue and stream: see the comments of its functions and views.';

do $$
declare
    v_name text;
    v_text text;
begin
    -- each function that is installed: a schema may be without a feature
    for v_name, v_text in
        select p.proname, regexp_replace(m[2], '\s+', ' ', 'g')
        from regexp_matches($text$
as_jsonpath: A JSON path from text; an error about the text names the argument.
check_timeout: Rejects a visibility timeout that is out of range.
last_publication: The last publication of a stream that is visible, in Postgres or in the archive, or was trimmed; 0:
    none.
start_offset: Returns the offset at which a reader starts.
end_offset: Returns the offset of an end position, but never one before the reader's own offset.
end_after: Returns the end offset after a start offset, for Spark before 4.1: never before the start.
offset_lag: Counts the messages after a reader's offset, and finds when the first was published.
read_to: Returns the offset after the next messages of a stream, without reading them.
read_plan: Returns the messages between two offsets as ranges [lo, hi) of seq, in the order of reading.
size_between: Returns the total size of the data of the messages between two offsets, without reading it.
read: Reads the next messages of a stream after an offset, without claiming them.
ack: Acknowledges a claim, or the given messages of it: they are done.
nack: Returns a claim, or the given messages of it, for another delivery: they failed.
defer: Defers a claim, or the given messages of it, without a failure: they are delivered later.
is_suspected: Returns whether a claim holds messages that may kill their worker.
retry: Ends the delays of failed messages and the bisection of their claims, for example after an outage.
extend: Extends the lease of a claim: it ends p_by from now, or later if it would anyway.
dead_letter: Dead-letters a claim, or the given messages of it: they are not delivered again.
consumer_backlog: Counts the messages that a consumer has not claimed yet.
send: Publishes a message to a stream, in the caller's transaction, and returns its number.
send_batch: Publishes messages together, in the order given, and returns their numbers.
server_of: Returns the server of a key, where a stream is on several servers: a number from 0 to p_servers - 1.
claim: Claims at most p_max messages for a consumer, without reading their payloads.
receive: Claims at most p_max messages for a consumer and reads them, in the order of delivery.
receive_where: Claims and reads messages that match a condition, and leaves the others as they are.
start_waiting: Starts to wait for publications of a stream: this session listens, and producers notify it.
still_publishing: Returns which of some transactions may still be publishing to a stream.
next_due: Returns when a consumer that received nothing should claim again: when a delay or lease ends, or a schedule is
    due.
stop_waiting: Stops waiting: producers need not notify this session.
seek: Moves a consumer, or a group, to a position in its stream, as if it were created there.
replay: Delivers messages between two positions again to a consumer that has finished or skipped them.
pause: Pauses a consumer: it claims nothing until it is resumed.
resume: Resumes a paused consumer, and wakes up workers that wait for messages.
create_consumer: Creates a consumer of a stream: a queue of its own over the stream's messages.
alter_consumer: Changes settings of a consumer while it is in use.
drop_consumer: Deletes a consumer or a group, with its unfinished messages.
open_sink: Returns the stream with a name, for writing, and checks the consumers to publish to.
create_stream: Creates a stream, an append-only sequence of messages.
alter_stream: Changes settings of a stream while it is in use.
drop_stream: Deletes a stream with its messages and consumers.
create_group: Creates a group: workers that share a stream, partitioned by key.
note_offset: Sets a group to the offset of a reader that keeps its own offset, as a Spark query does.
lease_partitions: Starts or renews a worker's lease in a group, and assigns free partitions to it, up to its share.
leave_group: Ends a worker of a group: its partitions are free, except those that it is committing.
commit_offset: Commits the offset of a partition of a group, in the worker's own transaction.
plan_partitions: Returns the next messages of a group's worker, as ranges [lo, hi) of seq in the order of delivery.
read_partitions: Reads the next messages of a worker's partitions, in order.
set_retention: Sets how long the messages of a stream are kept; without limits, the default, they are never deleted.
test_topic: Returns whether a topic matches a key.
bind: Copies messages of a topic to another stream, from now on.
unbind: Stops copying messages of a topic to another stream.
redrive: Delivers dead letters again to their consumer.
purge_dead: Deletes dead letters: they can no longer be redriven, and retention no longer keeps their messages.
read_dead: Reads dead letters with their payloads, in the order of their numbers, and changes nothing.
cancel: Cancels unfinished messages of a consumer.
postpone: Postpones unclaimed messages of a consumer: they are not delivered before a given time.
consumer_lag: Returns how far a consumer is behind, for the progress of its Spark query.
consumer_available: Counts the messages that a consumer could claim now, for queries that wait for a number of messages.
peek: Shows the next messages of a consumer, with their payloads, and changes nothing.
peek_at: Shows published messages of a stream by their numbers, for all consumers.
consumer_position: Shows the position of a consumer in its stream: the first message that it has not reached.
explain_message: Explains the state of a message for one consumer.
key_stats: Shows the keys with unfinished messages of a consumer, ordered by the number of messages.
outcome: Returns the outcome of a message for a consumer, or its state.
failures: Lists the last ten failed deliveries of an unfinished or dead-lettered message, in their order.
listen_done: Notifies this session when messages of a consumer end, acknowledged or dead.
scan: Returns rows of a table of a queue as ranges of messages: lo, hi, and the requested columns, in this order.
scan_claimed: Returns the messages in live claims as scan does, with the ids and owners of the claims.
scan_bounds: Divides dead letters, history or publications into shares of equal size, for parallel readers.
scan_where: Checks a condition on the rows of a table: an SQL expression over its columns.
is_restored: Returns whether this database is not the recorded one: another server, timeline, database, or copied files.
numbers_behind: Lists the sequences that are behind their rows, because they were restored or replicated without their
    values.
recover: Begins a new incarnation of each stream, after a restore or a promotion, and advances sequences beyond their
    rows.
reader_ack: Acknowledges what a Spark query has finished, up to an offset of Spark's commit log.
reader_state: Returns the state of a checkpoint reader, compared with its checkpoint; no row for an unknown reader.
reader_release: Returns the messages that a Spark query holds, and deletes its checkpoint reader.
reader_fork: Creates a checkpoint reader for a copy of a checkpoint, with the position of the original.
recent_size: Returns the average number of bytes of data of the last 100 messages of a stream; null: it has none.
open_stream: Returns the id and kind of a stream, for a Spark query.
open_streams: Returns all streams with their ids and kinds, for a Spark query that reads streams by a pattern.
open_consumer: Returns the id and settings of a consumer, for a Spark query or a worker.
reader_claim: Acknowledges the finished batches of a Spark query, and returns the end offset of its next micro-batch.
reader_extend: Extends the claims of a Spark query, as its heartbeat.
reader_resume: Prepares the messages of a micro-batch for a read or a repeated read.
reader_lost: Returns how many messages of a micro-batch its reader has lost to other claims, because a lease ended.
reader_others: Returns how many messages other readers of a consumer hold, and when their last lease ends.
reader_plan: Returns the messages of a micro-batch as ranges of numbers [lo, hi), in the order of delivery.
reader_query: Records the Spark query of a reader, and refuses a second reader of the same query.
begin_write_of: Names the query whose batch write the current transaction makes in foreachBatch.
is_published: Returns whether a batch of a sink, or a later one, was published.
unstage: Deletes staged chunks of a batch that failed, with their messages.
begin_write: Begins a write of a batch of a sink, and returns its number, which tasks pass to stage.
reserve: Reserves new numbers of a stream for messages that the caller writes and stages, or publishes, in this
    transaction.
publish_written: Publishes messages that the caller wrote, with numbers that it reserved in this transaction.
stage: Records messages that a task of a sink has written, before they are visible.
publish_staged: Publishes the staged chunks of a batch of a sink, once: they become visible together.
settle_messages: Acknowledges, returns or dead-letters messages by their numbers, for a batch of a sink, once for each
    consumer.
revive_messages: Redrives or retries messages by their numbers, for a batch of a sink, once for each consumer.
create_schedule: Sends a message at each time of a cron expression or an interval.
drop_schedule: Deletes a schedule; its messages remain.
pause_schedule: Pauses a schedule: it sends nothing until it is resumed.
resume_schedule: Resumes a paused schedule at its next time; times during the pause are skipped.
schedule_times: Returns the next times of a cron expression or an interval, without a schedule.
as_interval: An interval from text; an error about the text names the argument.
send_captured: Publishes the rows that a trigger captured, in their order.
was_truncated: Returns whether this session's last message to a stream is the truncate of a captured table, in this
    transaction.
note_captures: Records which capturing triggers a table and its partitions have; for capture and release.
capture_script: Returns the statements with which a table's owner captures the table, or ends the capture, for capture
    and release.
execute_as: Executes statements with the role of p_role, and then restores the role; for capture and release.
change_capture: Captures or releases a table: waits for its writers, and executes the statements of capture_script as
    its owner.
capture: Captures a table: each write to it becomes a message of a stream, in the same transaction.
release: Ends the capture of a table; its messages remain.
archive_files: Returns the archived segments of a stream, in order: their numbers from lo to below hi, and their files.
set_archive: Starts an archive of a stream: old messages are written to Parquet files before retention deletes them.
drop_archive: Ends the archive of a stream, and deletes its contents.
export_streams: Returns the streams with something to export or to delete, including dropped ones.
lock_export: Locks the export of a stream to the end of the transaction, if no other exporter holds it.
begin_export: Begins the export of the next segment of a stream; returns no row if there is none.
export_slices: Divides the segment of an attempt into slices of limit_exported() numbers, with the publication ids of
    each.
export_ranges: Returns the messages of a slice as ranges in order, with columns of their publications.
end_export: Records that the segment of an attempt is in files, which were read back.
export_leftovers: Returns the attempts of a stream whose files no segment refers to, for the caller to delete.
forget_leftover: Deletes the record of an attempt whose files were deleted.
open_table: Checks a write to a table, before rows are staged: the target, the columns, the unique index, and the
    rights.
open_table_write: Finds or creates the table for the staged rows of a write.
begin_table_batch: Begins the commit of a batch of a table, once; apply_table_batch() calls it.
drop_table_write: Drops the staged rows of a write that has ended, or will not commit.
apply_table_batch: Writes the staged rows of a batch into their table, once, as the commit of the batch.
schema_of: Returns the columns of a stream's schema as Spark's JSON, for StructType.fromJson and from_json.
maintain: Deletes what failed writers left behind, trims streams by their retention, and deletes abandoned readers.
maintain_all: Calls maintain() until nothing is unfinished, each time in a transaction of its own: for pg_cron, or psql.
schema_version: Returns the version of this schema.
create_roles: Creates the group roles pgqueue_producer, _consumer, _observer and _admin, and grants them their rights.
$text$, '^(\w+): (.*(?:\n .*)*)$', 'gn') m
        join pg_proc p on p.proname = m[1] and p.pronamespace = 'pgqueue'::regnamespace
    loop
        execute format('comment on routine pgqueue.%I is %L', v_name, v_text);
    end loop;
end $$;
