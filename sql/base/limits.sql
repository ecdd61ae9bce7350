-- The constants of the queue. Each is an immutable function without arguments, so plans contain its value, and a call
-- costs nothing.
--
--   limit_*       how much one call does at once. Any value of at least 1 is correct, and the tests run with all limits
--                 at 2 or 3, and at 1. These values are fast.
--   max_*         the largest value of an argument
--   lane_*, place_*  the lane of a bundle, and special places in a lane
--   lock_class_*  the first number of advisory locks; the second one is the id of a stream or consumer
do $$
declare
    v_name  text;
    v_type  text;
    v_value text;
begin
    for v_name, v_type, v_value in values
        ('limit_take', 'int', '10000'),  -- publications that one take scans
        -- messages of publications that move to the archive at once, because their sizes are read
        ('limit_archived', 'bigint', '1000000'),
        -- ranges of trimmed publications that are known not to be missed by readers without a consumer
        ('limit_hidden', 'int', '1000'),
        ('limit_packed', 'bigint', '4096'),  -- publications of an archive that become one row
        ('limit_unarchived', 'bigint', '10000'),  -- publications that leave an archive at once
        ('limit_exported', 'bigint', '250000'),  -- numbers of messages that an exporter reads at once
        -- takes of one pass of a claim, while all taken messages are for other consumers or delayed
        ('limit_takes', 'int', '100'),
        -- publication ids without a visible publication that one take skips before it records them as a gap
        ('limit_unseen', 'int', '1000'),
        -- publications that claims take ahead of the cursor: where more are new, a claim takes them with the cursor.
        -- And a claim of this many messages moves the cursor
        ('limit_ahead', 'int', '16'),
        ('limit_gaps', 'int', '8'),  -- rows of gaps of a consumer before they are merged
        ('limit_gap_ranges', 'int', '1000'),  -- ranges up to which a row of gaps is merged with others
        -- ranges of a bundle: removing elements from a set costs in proportion to its ranges
        ('limit_ranges', 'int', '64'),
        ('limit_attempts', 'int', '10'),  -- failed deliveries that are stored of a message
        ('limit_error', 'int', '500'),  -- characters of the error of each
        -- messages up to which a claim is small: bundles of its size are prefetched for the next claims
        ('limit_small', 'int', '256'),
        ('limit_cut', 'int', '256'),  -- bundles that are cut at once
        ('limit_long', 'int', '1000'),  -- claims older than a second that one probe moves to lane_long()
        ('limit_lanes', 'int', '64'),  -- lanes that have a hint
        ('limit_expired', 'int', '100'),  -- expired claims that one claim releases
        ('limit_due', 'int', '1000'),  -- delayed bundles that one claim makes ready
        ('limit_schedules', 'int', '100'),  -- schedules of a stream whose messages one claim sends
        ('limit_filter', 'int', '10000'),  -- messages that are filtered at once for a filtered consumer
        -- how often one pass of a claim filters that many messages: those taken before, and new ones, which may be more
        -- urgent. A claim has up to three passes, and holds the consumer's lock meanwhile. If no message passes the
        -- filter, the next claim continues
        ('limit_filters', 'int', '2'),
        -- for how long one pass of a claim compares messages with a filter: large ones may take a second each
        ('filter_time', 'interval', 'interval ''2 s'''),
        -- bundles that are matched at once with the condition of a claim; and their messages, except those of the last
        ('limit_looked_for', 'int', '1000'),
        ('limit_counted', 'int', '10000'),  -- publications that are counted at once for a backlog
        -- publications that are counted for the statistics of a consumer, which some programs poll every few seconds.
        -- More are estimated
        ('limit_shown', 'int', '3000'),
        ('limit_read', 'int', '100000'),  -- publications that one read of an offset reader scans
        ('limit_deleted', 'int', '100000'),  -- old dedup keys of a stream that maintain() deletes at once
        ('limit_maintained', 'int', '100'),  -- streams that one maintain() checks, whose locks it holds to its end
        -- entries of key_backlog that maintain() checks, of a consumer with per_key_capacity
        ('limit_entries', 'int', '10000'),
        -- for how long retention waits for an offset reader that has recorded its offset
        ('reader_patience', 'interval', 'interval ''10 minutes'''),
        -- numbers from which on a call locks the numbers of the stream against other large calls
        ('limit_unlocked_seqs', 'int', '100'),
        -- how long a call waits for a lock, unless the session's lock_timeout is shorter
        ('patience', 'interval', 'interval ''1 minute'''),
        -- a claim gets nothing if one transaction had the consumer's lock after two waits of this time
        ('claim_patience', 'interval', 'interval ''0.5 s'''),
        -- publications that may be in progress at once: they have numbers of messages, and no publication id yet.
        -- Publications whose ids differ by more are in the order of their numbers, except those that a sink wrote long
        -- before it published them
        ('max_in_progress', 'int', '10000'),
        ('large_stream', 'bigint', '1::bigint << 30'),  -- bytes from which on a view warns about a missing retention

        -- segments
        ('segment_size', 'bigint', '1::bigint << 30'),  -- numbers of a segment
        -- the distance from a table that is too large to be read under a lock to the next segment
        ('segment_jump', 'bigint', '1::bigint << 40'),
        -- bytes of a table that may be read while senders wait: that takes some 20 ms
        ('segment_bytes_at_once', 'bigint', '16::bigint << 20'),
        -- about how many segments the kept messages have: the stream stores up to a segment more than it keeps
        ('segment_count', 'int', '8'),

        -- by key
        ('limit_chain', 'int', '24'),  -- bundles of a key that are assigned one behind the other
        ('limit_chain_of_stream', 'int', '128'),  -- ... of a consumer with ordering=stream
        ('limit_assign', 'int', '4096'),  -- messages that are assigned at once, about
        ('limit_inspected', 'int', '10000'),  -- messages that one claim reads
        ('limit_claim_all', 'int', '1000'),  -- messages from which on a claim may hold all keys

        ('max_key_bytes', 'int', '1024'),  -- bytes of a key: keys are indexed
        -- levels of objects and lists in the headers of a message: clients parse them by recursion
        ('max_header_depth', 'int', '100'),
        -- bytes that a stream may allow for a payload. A row is read as text, with binary data twice as long, in at
        -- most 1 GB
        ('max_max_bytes', 'int', '268435456'),
        ('max_max_header_bytes', 'int', '1048576'),  -- bytes that a stream may allow for the headers of a message
        -- bytes of headers that cannot be nested too deeply and are not checked: a level has at least two bytes
        ('short_headers', 'int', '2 * _pgqueue.max_header_depth()'),
        ('max_repaired_bytes', 'int', '32768'),  -- of a payload that jsonb cannot store unchanged
        ('max_reserved', 'int', '10000000'),  -- numbers that one call reserves: that takes 3 s
        ('max_partitions', 'int', '1024'),  -- partitions of a group
        ('max_offset_ranges', 'int', '10000'),  -- gaps of an offset that is kept outside of the database
        ('max_interval', 'interval', 'interval ''10 years'''),  -- a timeout or delay
        ('max_lease', 'interval', 'interval ''1 day'''),  -- the lease of a worker in a group
        ('max_condition_bytes', 'int', '4096'),  -- bytes of a condition: a jsonpath that each message is matched with

        -- lanes of consumer_messages, see queue/state/consumer_messages.sql; lower ones are those of priorities, and by
        -- key:
        ('lane_assigned', 'int', '0'),
        ('lane_unassigned', 'int', '1'),
        ('lane_delayed', 'int', '1000001'),
        ('lane_long', 'int', '1000002'),
        ('lane_waiting', 'int', '1000003'),
        ('place_of_members', 'bigint', '1::bigint << 62'),  -- in lane_long, after all leases: some 146,000 years
        ('place_of_free', 'bigint', '-1::bigint << 61'),  -- in lane_waiting, of keys that wait for no bundle
        ('place_behind', 'bigint', '-2'),  -- ... of the messages of a key behind the first one that waits
        ('place_behind_long', 'bigint', '1::bigint << 61'),  -- ... of keys that wait for bundles in lane_long
        ('lane_unfiltered', 'int', '1000004'),
        ('lane_freed', 'int', '1000005'),

        -- (1885826420 is the installer's)
        ('lock_class_consumer', 'int', '1885826421'),  -- the locks of consumers
        ('lock_class_publish', 'int', '1885826422'),  -- the publish locks of streams
        ('lock_class_waiting', 'int', '1885826423'),  -- the locks of sessions that wait for publications of a stream
        ('lock_class_maintain', 'int', '1885826425'),  -- the locks under which streams are maintained
        ('lock_class_history', 'int', '1885826424'),  -- the history locks of streams
        ('lock_class_schedules', 'int', '1885826426'),  -- the locks of the schedules of streams
        ('lock_class_seqs', 'int', '1885826427'),  -- the locks of the numbers of streams
        ('lock_class_export', 'int', '1885826428'),  -- the locks of the exporters of streams
        ('lock_class_new', 'int', '1885826429'),  -- the locks of what is new for consumers
        ('lock_class_publication', 'int', '1885826430')  -- the locks of publications that consumers take, by a hash
    loop
        execute format('create or replace function _pgqueue.%I() returns %s language sql immutable parallel safe as %L',
                       v_name, v_type, 'select ' || v_value);
    end loop;
end $$;

-- The channel that notifies of a stream's publications.
create or replace function _pgqueue.channel(p_stream_id int) returns text
language sql immutable parallel safe as $$ select 'pgqueue_' || p_stream_id $$;

-- The channel that notifies of the messages that a consumer has settled.
create or replace function _pgqueue.done_channel(p_consumer_id int) returns text
language sql immutable parallel safe as $$ select 'pgqueue_done_' || p_consumer_id $$;
