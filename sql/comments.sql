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
last_publication: The last publication of a stream that is visible now; 0: none.
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
is_suspected: Tells whether a claim holds messages that may kill their worker.
retry: Ends the delays of failed messages, and lets them come in large claims again, for example after an outage.
extend: Extends the lease of a claim: it ends p_by from now, or later if it would anyway.
dead_letter: Dead-letters a claim, or the given messages of it: nobody receives them any more.
consumer_backlog: Counts the messages that a consumer has not claimed yet.
send: Publishes a message to a stream, in the caller's transaction, and returns its number.
send_batch: Publishes messages together, in the order given, and returns their numbers.
server_of: Returns the server of a key, where a stream is on several servers: a number from 0 to p_servers - 1.
claim: Claims at most p_max messages for a consumer, without reading their payloads.
receive: Claims at most p_max messages for a consumer and reads them, in the order of delivery.
receive_where: Claims and reads messages that pass a condition, and leaves the others as they are.
start_waiting: Starts to wait for publications of a stream: this session listens, and producers notify it.
still_publishing: Returns which of some transactions may still be publishing to a stream.
next_due: Returns when a consumer that got nothing should claim again: when a delay or lease ends, or a schedule is due.
stop_waiting: Stops waiting: producers need not notify this session.
set_retention: Sets how long the messages of a stream are kept; without limits: without end, the default.
seek: Moves a consumer, or a group, to a position in its stream, as if it were created there.
replay: Delivers messages between two positions once more to a consumer that has finished or skipped them.
pause: Pauses a consumer: it claims nothing until it is resumed.
resume: Lets a paused consumer claim again, and wakes up workers that wait for messages.
create_consumer: Creates a consumer of a stream: a queue of its own over the stream's messages.
alter_consumer: Changes settings of a consumer while it is in use.
drop_consumer: Deletes a consumer, or a group, with all that it has not finished.
open_sink: Returns the stream of a name, to write to, and checks the consumers to publish to.
create_stream: Creates a stream, an append-only sequence of messages.
alter_stream: Changes settings of a stream while it is in use.
drop_stream: Deletes a stream with its messages and consumers.
create_group: Creates a group: workers that share a stream by partitions of its keys.
note_offset: Sets a group to the offset of a reader that keeps its own offset, as a Spark query does.
lease_partitions: Renews a worker's lease in a group, or begins it, and takes the free partitions that are the worker's
    share.
leave_group: Ends a worker of a group: its partitions are free, except those that it is committing.
commit_offset: Records how far a partition of a group is done, in the worker's own transaction.
plan_partitions: Plans what a worker of a group reads next, as ranges [lo, hi) of seq in the order of delivery.
read_partitions: Reads the next messages of a worker's partitions, in order.
test_topic: Tells whether a key is of a topic.
bind: Copies messages of a topic that are sent to a stream from now on to another stream.
unbind: Stops copying messages of a topic to another stream.
redrive: Delivers dead letters again to the consumer that gave them up.
purge_dead: Deletes dead letters: they cannot be redriven any more, and their messages need not be kept for them.
read_dead: Reads dead letters with what they hold, in the order of their numbers, and changes nothing.
cancel: Takes messages from a consumer that has not finished them.
postpone: Postpones unclaimed messages of a consumer: none of them is delivered before a time.
consumer_lag: Tells how far a consumer is behind, for the progress of its Spark query.
consumer_available: Counts the messages that a consumer could claim now, for queries that wait for a number of messages.
peek: Shows the messages that a consumer gets next, with what they hold, and changes nothing.
peek_at: Shows published messages of a stream by their numbers, whichever consumers get them.
consumer_position: Shows how far a consumer is in its stream, for people: the first message that it has not taken.
explain_message: Explains why a message is where it is, for one consumer.
key_stats: Shows the keys that a consumer is busy with, first those of which it holds most.
outcome: Tells how a message ended for a consumer, or in which state it is.
failures: Lists the failed deliveries of a message that a consumer has not finished, or gave up: the last ten, in their
    order.
listen_done: Lets this session hear when a consumer is done with messages, acknowledged or dead.
scan: Returns rows of a table of a queue as ranges of messages: lo, hi, and the wanted columns, in this order.
scan_claimed: Returns the messages in live claims, with the ids and owners of these claims, as scan does.
scan_bounds: Divides dead letters, history or publications into shares of equal size, for parallel readers.
scan_where: Checks a condition on the rows of a table, for the one who asks it: an expression of SQL over columns.
is_restored: Tells whether this database is not where it was noted: another server, timeline, database, or copied files.
numbers_behind: Lists the sequences that are behind their rows: restored or replicated without their values.
recover: Begins a new incarnation of each stream, after a restore or a promotion, and moves sequences beyond their rows.
reader_ack: Acknowledges what a Spark query has finished, up to an offset of Spark's commit log.
reader_state: The state of a checkpoint reader, compared with its checkpoint: no row when the database does not know it.
reader_release: Gives back what a Spark query holds, and forgets its checkpoint reader.
reader_fork: Makes a checkpoint reader for a copy of a checkpoint, which goes on where the first one is.
recent_size: How many bytes of data the last 100 messages of a stream have, on average; null: it has none.
open_stream: A stream's id and kind by its name, for a Spark query.
open_streams: All streams with their ids and kinds, for a Spark query that reads streams by a pattern.
open_consumer: A consumer's id and settings by its name, for a Spark query or a worker.
reader_claim: Acknowledges the finished batches of a Spark query, and returns the end offset of its next micro-batch.
reader_extend: Holds the claims of a Spark query longer: its heartbeat.
reader_resume: Prepares the messages of a micro-batch to be read, again if need be.
reader_lost: How many messages of a micro-batch its reader has lost to other claimers, because a lease ended.
reader_others: How many messages other readers of a consumer hold, and until when, if these do not come back.
reader_plan: The messages of a micro-batch as ranges of numbers [lo, hi), in the order of delivery.
reader_query: Records which Spark query a reader belongs to, and refuses a second reader of the same query.
is_published: Whether a batch of a sink, or a later one, was published.
unstage: Deletes staged chunks of a batch that failed, with their messages.
begin_write: Begins to write a batch of a sink: a try of it, which the tasks name when they stage.
reserve: Takes new numbers of a stream for messages that the caller writes and stages, or publishes, in this
    transaction.
publish_written: Publishes messages that the caller wrote itself, with numbers that it reserved in this transaction.
stage: Records messages that a task of a sink has written, which nobody sees yet.
publish_staged: Publishes all that was staged for a batch of a sink, once: the named staged chunks become visible
    together.
settle_messages: Acknowledges, returns or dead-letters messages by their numbers, for a batch of a sink, once for each
    consumer.
revive_messages: Redrives or retries messages by their numbers, for a batch of a sink, once for each consumer.
create_schedule: Sends a message at each time that a cron expression, or an interval, says.
drop_schedule: Deletes a schedule; messages that it sent stay.
pause_schedule: Pauses a schedule: it sends nothing until it is resumed.
resume_schedule: Lets a paused schedule send again, from its next time on; times that passed meanwhile are skipped.
schedule_times: Returns the next times of a cron expression, or an interval, before a schedule is created.
send_captured: Publishes rows that a trigger captured, in their order.
was_truncated: Whether this session's last message to a stream is that a captured table was truncated, in this
    transaction.
note_captures: Notes which capturing triggers a table and its partitions have; for capture and release.
capture_script: The statements by which a table's owner captures the table, or ends the capture, which capture and
    release execute.
execute_as: Executes statements as a role that the caller may become, and then is the caller again; for capture and
    release.
change_capture: Does what capture and release do: waits until nobody writes to the table, and executes capture_script as
    its owner.
capture: Captures a table: each write to it becomes a message of a stream, in the same transaction.
release: Ends the capture of a table; messages that were captured stay.
archive_files: Returns the segments of a stream that are in files, in order: their numbers from lo to below hi, and
    their files.
set_archive: Has the old messages of a stream written to files, before retention takes them out of Postgres.
drop_archive: Ends the archive of a stream, with all that is in it.
export_streams: The streams for which there is something to export or to delete, the dropped ones too.
lock_export: Locks the export of a stream, if no other exporter has it, to the end of the transaction.
begin_export: Begins to export the next segment of a stream; returns no row when there is none.
export_slices: Divides the segment of an attempt into slices of limit_exported() numbers, with the ids of the
    publications in each.
export_ranges: The messages of a slice as ranges in order, with what their publications say of them.
end_export: Notes that the segment of an attempt is in files, which were read back.
export_leftovers: The attempts of a stream whose files nothing refers to, for the caller to delete.
forget_leftover: Forgets an attempt whose files were deleted.
open_table: Checks a write to a table, before rows are staged: the target, the columns, the unique index, and rights.
open_table_write: Finds or makes the table for the staged rows of a write.
begin_table_batch: Begins a batch of a table, once, as its commit; apply_table_batch() calls it.
drop_table_write: Drops the staged rows of a write that is over, or will not commit.
apply_table_batch: Writes the staged rows of a batch into their table, once: tasks copied them, and this is the commit.
schema_of: Returns the columns of a stream's schema, as Spark writes a schema in JSON: for StructType.fromJson, and
    from_json.
maintain: Deletes what failed writers left, trims what retention need not keep, and forgets abandoned readers.
maintain_all: Calls maintain() until nothing is unfinished, each time in a transaction of its own: for pg_cron, or psql.
schema_version: The version of this schema.
create_roles: Makes the group roles pgqueue_producer, _consumer, _observer and _admin, and grants them what they need.
$text$, '^(\w+): (.*(?:\n .*)*)$', 'gn') m
        join pg_proc p on p.proname = m[1] and p.pronamespace = 'pgqueue'::regnamespace
    loop
        execute format('comment on routine pgqueue.%I is %L', v_name, v_text);
    end loop;
end $$;
