-- The numbers that the queue goes by, each with a name.
--
--   limit_*       how much one call does at once. Any value of at least 1 is right, and the tests run with all of them
--                 at 2 or 3, and at 1. These are the fast ones.
--   max_*         the largest value of an argument
--   lock_class_*  the first number of advisory locks; the second is the id of a stream or consumer
-- All are constants, so a plan holds their value and a call costs nothing.

-- Publications that one take walks.
create or replace function _pgqueue.limit_take() returns int language sql immutable parallel safe as 'select 10000';

-- New publications that may wait while runs of the same urgency are ready.
create or replace function _pgqueue.limit_waiting() returns int language sql immutable parallel safe as 'select 16';

-- Messages of publications that move to the archive at once: their sizes are read.
create or replace function _pgqueue.limit_archived()
returns bigint language sql immutable parallel safe as 'select 1000000';

-- Publications of an archive that become one row.
create or replace function _pgqueue.limit_packed()
returns bigint language sql immutable parallel safe as 'select 4096';

-- Publications that leave an archive at once.
create or replace function _pgqueue.limit_unarchived()
returns bigint language sql immutable parallel safe as 'select 10000';

-- Numbers of messages that an exporter reads at once.
create or replace function _pgqueue.limit_exported()
returns bigint language sql immutable parallel safe as 'select 250000';

-- Takes of one claim, while the taken messages are for other consumers or for later; but a claim has two passes.
create or replace function _pgqueue.limit_takes() returns int language sql immutable parallel safe as 'select 100';

-- Publication ids without a visible publication that one look walks over before it notes them as a gap.
create or replace function _pgqueue.limit_unseen() returns int language sql immutable parallel safe as 'select 1000';

-- Rows of gaps that a consumer keeps before they are merged.
create or replace function _pgqueue.limit_gaps() returns int language sql immutable parallel safe as 'select 8';

-- Ranges up to which a row of gaps is merged with others.
create or replace function _pgqueue.limit_gap_ranges()
returns int language sql immutable parallel safe as 'select 1000';

-- Ranges of a run: taking elements out of a set costs in proportion to its ranges.
create or replace function _pgqueue.limit_ranges() returns int language sql immutable parallel safe as 'select 64';

-- Failed deliveries that are kept of a message, and characters of the error of each.
create or replace function _pgqueue.limit_attempts() returns int language sql immutable parallel safe as 'select 10';
create or replace function _pgqueue.limit_error() returns int language sql immutable parallel safe as 'select 500';

-- Slices that a run is cut into for small claims, or pieces that are dealt by key: messages that fail or become free
-- meanwhile come after them.
create or replace function _pgqueue.limit_pieces() returns int language sql immutable parallel safe as 'select 64';

-- Messages up to which a claim is small.
create or replace function _pgqueue.limit_slice_size() returns int language sql immutable parallel safe as 'select 256';

-- Slots that are cut at once for small claims.
create or replace function _pgqueue.limit_slots() returns int language sql immutable parallel safe as 'select 256';

-- Runs, about, that are claimed without the consumer's lock before the place where the line begins is stored anew.
create or replace function _pgqueue.limit_behind() returns int language sql immutable parallel safe as 'select 64';

-- Lanes whose first place is remembered.
create or replace function _pgqueue.limit_lanes() returns int language sql immutable parallel safe as 'select 64';

-- Expired claims that one claim releases.
create or replace function _pgqueue.limit_expired() returns int language sql immutable parallel safe as 'select 100';

-- Delayed runs that one claim makes ready.
create or replace function _pgqueue.limit_due() returns int language sql immutable parallel safe as 'select 1000';

-- Schedules of a stream whose messages one claim sends.
create or replace function _pgqueue.limit_schedules() returns int language sql immutable parallel safe as 'select 100';

-- Messages that are filtered at once for a filtered consumer.
create or replace function _pgqueue.limit_filter() returns int language sql immutable parallel safe as 'select 10000';

-- How often one pass of a claim filters that many messages: what was taken before, and what is new, which may be more
-- urgent. A claim has up to three passes, and holds the consumer's lock meanwhile. Where nothing passes, the next claim
-- goes on.
create or replace function _pgqueue.limit_filters() returns int language sql immutable parallel safe as 'select 2';

-- Runs that are judged at once for a claim with a condition; and their messages, without those of the last run.
create or replace function _pgqueue.limit_looked_for()
returns int language sql immutable parallel safe as 'select 1000';

-- Publications that are counted at once, where a backlog is counted.
create or replace function _pgqueue.limit_counted() returns int language sql immutable parallel safe as 'select 10000';

-- Publications that are counted for the statistics of a consumer, which some programs ask for every few seconds. More
-- are estimated.
create or replace function _pgqueue.limit_shown() returns int language sql immutable parallel safe as 'select 3000';

-- Publications that one read walks, of an offset reader.
create or replace function _pgqueue.limit_read() returns int language sql immutable parallel safe as 'select 100000';

-- Old dedup keys of a stream that maintain() deletes at once.
create or replace function _pgqueue.limit_forgotten()
returns int language sql immutable parallel safe as 'select 100000';

-- Streams that one maintain() looks at, whose locks it holds to its end.
create or replace function _pgqueue.limit_maintained() returns int language sql immutable parallel safe as 'select 100';

-- Entries of key_backlog that maintain() looks at, of a consumer with per_key_capacity.
create or replace function _pgqueue.limit_entries() returns int language sql immutable parallel safe as 'select 10000';

-- By key: messages of a piece.
create or replace function _pgqueue.limit_piece_by_key()
returns int language sql immutable parallel safe as 'select 64';

-- By key: slots of a key that are cut ahead, one behind the other.
create or replace function _pgqueue.limit_chain() returns int language sql immutable parallel safe as 'select 16';

-- By key: messages of the line that are dealt at once.
create or replace function _pgqueue.limit_deal() returns int language sql immutable parallel safe as 'select 4096';

-- By key: when this many keys became free, they are dealt first, without the line.
create or replace function _pgqueue.limit_stock() returns int language sql immutable parallel safe as 'select 32';

-- By key: pieces that are dealt before a piece that is still open counts as old.
create or replace function _pgqueue.limit_old() returns int language sql immutable parallel safe as 'select 200';

-- By key: messages that one claim looks at.
create or replace function _pgqueue.limit_looks() returns int language sql immutable parallel safe as 'select 10000';

-- By key: messages that a claim wants at least to have the line whole.
create or replace function _pgqueue.limit_whole() returns int language sql immutable parallel safe as 'select 1000';

-- For how long retention counts on an offset reader after it has noted its offset.
create or replace function _pgqueue.reader_patience()
returns interval language sql immutable parallel safe as $$ select interval '10 minutes' $$;

-- Numbers of one call from which on it keeps others from taking many at the same time.
create or replace function _pgqueue.limit_unlocked_seqs()
returns int language sql immutable parallel safe as 'select 100';

-- Bytes of a key: keys are indexed.
create or replace function _pgqueue.max_key_bytes() returns int language sql immutable parallel safe as 'select 1024';

-- Levels of objects and lists in the headers of a message: clients read them by recursion.
create or replace function _pgqueue.max_header_depth() returns int language sql immutable parallel safe as 'select 100';

-- Bytes that a stream may allow for a payload. A row is read as text, with binary data twice as long, in at most 1 GB.
create or replace function _pgqueue.max_max_bytes()
returns int language sql immutable parallel safe as 'select 268435456';

-- Bytes that a stream may allow for the headers of a message.
create or replace function _pgqueue.max_max_header_bytes()
returns int language sql immutable parallel safe as 'select 1048576';

-- Bytes of headers that cannot be nested too deep, so that nobody looks: a level takes two bytes at least.
create or replace function _pgqueue.short_headers()
returns int language sql immutable parallel safe as 'select 2 * _pgqueue.max_header_depth()';

-- Numbers that one call reserves: that takes 3 s.
create or replace function _pgqueue.max_reserved()
returns int language sql immutable parallel safe as 'select 10000000';

-- Partitions of a group.
create or replace function _pgqueue.max_partitions() returns int language sql immutable parallel safe as 'select 1024';

-- Gaps of an offset that is kept outside of the database.
create or replace function _pgqueue.max_offset_ranges()
returns int language sql immutable parallel safe as 'select 10000';

-- A timeout or delay.
create or replace function _pgqueue.max_interval()
returns interval language sql immutable parallel safe as $$ select interval '10 years' $$;

-- The lease of a worker in a group.
create or replace function _pgqueue.max_lease()
returns interval language sql immutable parallel safe as $$ select interval '1 day' $$;

-- Bytes of a condition: a jsonpath that is asked of each message.
create or replace function _pgqueue.max_condition_bytes()
returns int language sql immutable parallel safe as 'select 4096';

-- The locks of consumers. (1885826420 is the installer's.)
create or replace function _pgqueue.lock_class_consumer()
returns int language sql immutable parallel safe as 'select 1885826421';

-- The publish locks of streams.
create or replace function _pgqueue.lock_class_publish()
returns int language sql immutable parallel safe as 'select 1885826422';

-- The locks of sessions that wait for publications of a stream.
create or replace function _pgqueue.lock_class_waiting()
returns int language sql immutable parallel safe as 'select 1885826423';

-- The locks under which streams are maintained.
create or replace function _pgqueue.lock_class_maintain()
returns int language sql immutable parallel safe as 'select 1885826425';

-- The history locks of streams.
create or replace function _pgqueue.lock_class_history()
returns int language sql immutable parallel safe as 'select 1885826424';

-- The locks of the schedules of streams.
create or replace function _pgqueue.lock_class_schedules()
returns int language sql immutable parallel safe as 'select 1885826426';

-- The locks of the numbers of streams.
create or replace function _pgqueue.lock_class_seqs()
returns int language sql immutable parallel safe as 'select 1885826427';

-- The locks of the exporters of streams.
create or replace function _pgqueue.lock_class_export()
returns int language sql immutable parallel safe as 'select 1885826428';

-- The channel that notifies of a stream's publications.
create or replace function _pgqueue.channel(p_stream_id int) returns text language sql immutable parallel safe
as $$ select 'pgqueue_' || p_stream_id $$;

-- The channel that notifies of the messages that a consumer has settled.
create or replace function _pgqueue.done_channel(p_consumer_id int) returns text language sql immutable parallel safe
as $$ select 'pgqueue_done_' || p_consumer_id $$;
