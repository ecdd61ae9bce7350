-- The numbers that the queue goes by, each with a name.
--
-- _limit_*: how much one call does at once. Any value of at least 1 is right, and the tests run with all of them at 2 or 3;
-- these are the fast ones. _max_*: what an argument may be. _lock_class_*, _channel: names shared with others.
-- All are constants, so a plan holds their value and a call costs nothing.

-- Publications that one take walks.
create or replace function pgqueue._limit_take() returns int language sql immutable parallel safe as 'select 10000';
-- New publications that may wait while something as urgent is ready.
create or replace function pgqueue._limit_waiting() returns int language sql immutable parallel safe as 'select 16';
-- Takes that one claim makes, while what it takes is for other consumers or for later.
create or replace function pgqueue._limit_takes() returns int language sql immutable parallel safe as 'select 100';
-- Publication ids without a visible publication that one look walks over before it notes them as a gap.
create or replace function pgqueue._limit_unseen() returns int language sql immutable parallel safe as 'select 1000';
-- Rows of gaps that a consumer keeps before they are merged.
create or replace function pgqueue._limit_gaps() returns int language sql immutable parallel safe as 'select 8';
-- Ranges up to which a row of gaps is merged with others.
create or replace function pgqueue._limit_gap_ranges() returns int language sql immutable parallel safe as 'select 1000';
-- Ranges of a run: taking elements out of a set costs in proportion to its ranges.
create or replace function pgqueue._limit_ranges() returns int language sql immutable parallel safe as 'select 64';
-- Pieces that a run is cut into for small claims, or that are dealt by key: what fails or becomes free meanwhile comes after them.
create or replace function pgqueue._limit_pieces() returns int language sql immutable parallel safe as 'select 64';
-- Messages up to which a claim is small.
create or replace function pgqueue._limit_piece_size() returns int language sql immutable parallel safe as 'select 256';
-- Runs, about, that are claimed without the consumer's lock before the place where the line begins is stored anew.
create or replace function pgqueue._limit_behind() returns int language sql immutable parallel safe as 'select 64';
-- Lanes whose first place is remembered.
create or replace function pgqueue._limit_lanes() returns int language sql immutable parallel safe as 'select 64';
-- Expired claims that one claim releases.
create or replace function pgqueue._limit_expired() returns int language sql immutable parallel safe as 'select 100';
-- Delayed runs that one claim makes ready.
create or replace function pgqueue._limit_due() returns int language sql immutable parallel safe as 'select 1000';
-- Schedules of a stream whose messages one claim sends.
create or replace function pgqueue._limit_schedules() returns int language sql immutable parallel safe as 'select 100';
-- Messages that are sifted at once for a filtered consumer, ...
create or replace function pgqueue._limit_sift() returns int language sql immutable parallel safe as 'select 10000';
-- ... and how often for one claim.
create or replace function pgqueue._limit_sifts() returns int language sql immutable parallel safe as 'select 20';
-- Runs, and messages but for those of the last run, that are judged at once for a claim with a condition.
create or replace function pgqueue._limit_looked_for() returns int language sql immutable parallel safe as 'select 1000';
-- Publications that are counted where a consumer's backlog decides something, ...
create or replace function pgqueue._limit_counted() returns int language sql immutable parallel safe as 'select 100000';
-- ... and for its statistics, which some ask for every few seconds.
create or replace function pgqueue._limit_shown() returns int language sql immutable parallel safe as 'select 3000';
-- Publications that one read walks, of those who read without claiming.
create or replace function pgqueue._limit_read() returns int language sql immutable parallel safe as 'select 100000';
-- Old dedup keys of a stream that maintain() deletes at once.
create or replace function pgqueue._limit_forgotten() returns int language sql immutable parallel safe as 'select 100000';
-- Entries of key_backlog that maintain() looks at, of a consumer with per_key_capacity.
create or replace function pgqueue._limit_entries() returns int language sql immutable parallel safe as 'select 10000';
-- By key: messages of a piece, ...
create or replace function pgqueue._limit_piece_by_key() returns int language sql immutable parallel safe as 'select 64';
-- ... messages of the line that are dealt at once, ...
create or replace function pgqueue._limit_deal() returns int language sql immutable parallel safe as 'select 4096';
-- ... keys that became free, from which on the line is not dealt with them, ...
create or replace function pgqueue._limit_stock() returns int language sql immutable parallel safe as 'select 32';
-- ... pieces that are dealt before one that is still open counts as old, ...
create or replace function pgqueue._limit_old() returns int language sql immutable parallel safe as 'select 200';
-- ... messages that one claim looks at, ...
create or replace function pgqueue._limit_looks() returns int language sql immutable parallel safe as 'select 10000';
-- ... and messages that a claim wants at least, to have the line whole.
create or replace function pgqueue._limit_whole() returns int language sql immutable parallel safe as 'select 1000';

-- For how long a reader is counted on after it has noted its offset.
create or replace function pgqueue._reader_patience() returns interval language sql immutable parallel safe as $$ select interval '10 minutes' $$;

-- Numbers from which on who takes them together keeps others from taking many.
create or replace function pgqueue._limit_unlocked_seqs() returns int language sql immutable parallel safe as 'select 100';

-- Bytes of a key: keys are indexed.
create or replace function pgqueue._max_key_bytes() returns int language sql immutable parallel safe as 'select 1024';
-- Levels of objects and lists in the headers of a message: clients read them by recursion.
create or replace function pgqueue._max_header_depth() returns int language sql immutable parallel safe as 'select 100';
-- What a stream may allow for a payload, and for headers. A row is read as text, with binary data twice as long, in at most 1 GB.
create or replace function pgqueue._max_max_bytes() returns int language sql immutable parallel safe as 'select 268435456';
create or replace function pgqueue._max_max_header_bytes() returns int language sql immutable parallel safe as 'select 1048576';
-- Bytes of headers that cannot be too deep, so that nobody looks: a level takes two at least.
create or replace function pgqueue._short_headers() returns int language sql immutable parallel safe as 'select 2 * pgqueue._max_header_depth()';
-- Partitions of a group.
create or replace function pgqueue._max_partitions() returns int language sql immutable parallel safe as 'select 1024';
-- Gaps of an offset that is kept outside of the database.
create or replace function pgqueue._max_offset_ranges() returns int language sql immutable parallel safe as 'select 10000';
-- A timeout or delay.
create or replace function pgqueue._max_interval() returns interval language sql immutable parallel safe as $$ select interval '10 years' $$;

-- The first key of consumers' advisory locks; the second is the id. (1885826420 is the installer's.)
create or replace function pgqueue._lock_class_consumer() returns int language sql immutable parallel safe as 'select 1885826421';
-- The first key of streams' publish locks; the second is the id.
create or replace function pgqueue._lock_class_publish() returns int language sql immutable parallel safe as 'select 1885826422';
-- The first key of the locks that sessions have while they wait for publications of a stream; the second is the stream's id.
create or replace function pgqueue._lock_class_waiting() returns int language sql immutable parallel safe as 'select 1885826423';
-- The first key of the locks under which streams are maintained; the second is the id.
create or replace function pgqueue._lock_class_maintain() returns int language sql immutable parallel safe as 'select 1885826425';

-- The first key of streams' history locks; the second is the id.
create or replace function pgqueue._lock_class_history() returns int language sql immutable parallel safe as 'select 1885826424';

-- The first key of the locks of streams' schedules; the second is the stream's id.
create or replace function pgqueue._lock_class_schedules() returns int language sql immutable parallel safe as 'select 1885826426';

-- The first key of the locks of streams' numbers; the second is the stream's id.
create or replace function pgqueue._lock_class_seqs() returns int language sql immutable parallel safe as 'select 1885826427';

-- The channel that notifies of a stream's publications.
create or replace function pgqueue._channel(p_stream_id int) returns text language sql immutable parallel safe
as $$ select 'pgqueue_' || p_stream_id $$;

-- The channel that notifies of what a consumer is done with.
create or replace function pgqueue._done_channel(p_consumer_id int) returns text language sql immutable parallel safe
as $$ select 'pgqueue_done_' || p_consumer_id $$;
