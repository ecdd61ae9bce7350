-- Reading without claiming: the reader stores its own offset (reading/offsets.sql). Reading writes nothing, waits for
-- nothing, and works on a standby. Messages for named consumers are not read, and deliver_at is ignored.

-- Returns the offset at which a reader starts.
--   p_start  earliest: before all messages of the stream; latest: before messages that become visible from now on; a
--            timestamp: before messages that were published since then; seq N: before the message with that number.
--            Transactions that are still open count as later.
--   p_archive  for a reader that also reads the archive: messages there do not count as trimmed
-- Errors: PQ001, PQ003. Locks: the history, shared.
create or replace function pgqueue.start_offset(p_stream text, p_start text default 'earliest',
                                                p_archive boolean default false) returns jsonb
language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
begin
    return _pgqueue.durable_offset(
        v_stream, _pgqueue.offset_at(v_stream, coalesce(p_start, 'earliest'), 'p_start', p_archive), null);
end $$;

-- Returns the offset of an end position, but never one before the reader's own offset.
--   p_offset  the reader's offset
--   p_end     a position, as for start_offset: the reader reads up to it
--   p_archive  as in start_offset
-- Errors: PQ001, PQ003, PQ005. Locks: the history, shared.
create or replace function pgqueue.end_offset(p_stream text, p_offset jsonb, p_end text,
                                              p_archive boolean default false) returns jsonb
language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
    v_from   pgqueue.reading_offset := _pgqueue.parse_offset(v_stream, 'p_offset', p_offset, p_archive);
begin
    return _pgqueue.durable_offset(
        v_stream, _pgqueue.merge_offsets(v_from, _pgqueue.offset_at(v_stream, p_end, 'p_end', p_archive)), v_from);
end $$;

-- Returns the end offset after a start offset, for Spark before 4.1: never before the start.
-- A source of PySpark 4.0 must return an end offset before Spark passes it the start offset of the query. This call
-- adjusts that end to the start, and always returns the same for the same two offsets. Errors: PQ001, PQ003, PQ005.
-- Locks: none.
create or replace function pgqueue.end_after(p_stream text, p_from jsonb, p_to jsonb) returns jsonb
language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
begin
    return _pgqueue.offset_json(v_stream, _pgqueue.merge_offsets(_pgqueue.parse_offset(v_stream, 'p_from', p_from),
                                                                 _pgqueue.parse_offset(v_stream, 'p_to', p_to)));
end $$;

-- Counts the messages after a reader's offset, and finds when the first was published.
--   p_archive  as in start_offset
-- Returns the number of messages after the offset (in up to 100,000 publications), and when the first of them was
-- published; null: there are none, or only after many publications for named consumers. Errors: PQ001, PQ003, PQ005.
-- Locks: none.
create or replace function pgqueue.offset_lag(p_stream text, p_offset jsonb, p_archive boolean default false,
                                              out messages bigint, out since timestamptz)
language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
    v_from   pgqueue.reading_offset := _pgqueue.parse_offset(v_stream, 'p_offset', p_offset, p_archive);
begin
    messages := (_pgqueue.advance_offset(v_stream, v_from, 9223372036854775807, null)).messages - v_from.messages;
    if messages > 0 then
        select p.published_at into since
        from unnest(_pgqueue.unread_from(v_from)) g
        cross join lateral _pgqueue.first_readable(v_stream.stream_id, p_archive, lower(g),
                                                   coalesce(upper(g), 9223372036854775807), 1000) p
        where p.consumers is null
        limit 1;
    end if;
end $$;

-- Returns the offset after the next messages of a stream, without reading them.
--   p_offset        an offset; or, to start, null for "earliest", or a position of start_offset as a JSON string
--   p_max           the number of messages, if there are as many; null: all (of up to 100,000 publications)
--   p_upto          the last publication to read; null: all
--   p_skip_trimmed  skip trimmed messages, instead of failing
--   p_archive       as in start_offset
-- Returns p_offset when there are no new messages. If the result differs, there may still be no messages in between:
-- all new ones were for named consumers. Errors: PQ001, PQ003, PQ005, PQ010 when retention was faster. Locks: none.
-- (Use read committed: with an old snapshot gaps stay open.)
create or replace function pgqueue.read_to(p_stream text, p_offset jsonb, p_max bigint default null,
                                           p_upto bigint default null, p_skip_trimmed boolean default false,
                                           p_archive boolean default false) returns jsonb
language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
    v_from   pgqueue.reading_offset;
    v_to     pgqueue.reading_offset;
begin
    perform _pgqueue.check_positive('p_max', p_max);
    v_from := _pgqueue.offset_or_start(v_stream, p_offset, p_archive);
    v_to := _pgqueue.advance_offset(v_stream, v_from, coalesce(p_max, 9223372036854775807), p_upto);
    if p_skip_trimmed is not true then
        perform _pgqueue.check_not_trimmed(v_stream, 'p_offset', v_from, v_to);
    end if;
    return _pgqueue.durable_offset(v_stream, v_to, case when jsonb_typeof(p_offset) = 'object' then v_from end);
end $$;

-- The offset in p_offset, or the start offset that it names. Errors: PQ003, PQ005.
create or replace function _pgqueue.offset_or_start(p_stream pgqueue.streams, p_offset jsonb,
                                                    p_archive boolean default false) returns pgqueue.reading_offset
language plpgsql as $$
begin
    if p_offset is null or jsonb_typeof(p_offset) in ('null', 'string') then
        return _pgqueue.offset_at(p_stream, coalesce(p_offset #>> '{}', 'earliest'), 'p_offset', p_archive);
    end if;
    return _pgqueue.parse_offset(p_stream, 'p_offset', p_offset, p_archive);
end $$;

-- Returns the messages between two offsets as ranges [lo, hi) of seq, in the order of reading.
-- For readers that read the payloads by COPY. The result for two offsets never changes.
--   p_from, p_to    offsets that start_offset, read_to or read returned; p_to is after p_from
--   p_skip_trimmed  return the remaining messages, instead of failing, when some were trimmed
--   p_archive       as in start_offset: the payloads may be in files then, see archive_files
-- Errors: PQ001, PQ003, PQ005, PQ010. Locks: none.
create or replace function pgqueue.read_plan(p_stream text, p_from jsonb, p_to jsonb,
                                             p_skip_trimmed boolean default false, p_archive boolean default false)
returns table (lo bigint, hi bigint)
language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
    v_from   pgqueue.reading_offset := _pgqueue.parse_offset(v_stream, 'p_from', p_from, p_archive);
    v_to     pgqueue.reading_offset := _pgqueue.parse_offset(v_stream, 'p_to', p_to, p_archive);
begin
    if v_to.next_publication < v_from.next_publication
       or not _pgqueue.unread(v_to) * int8multirange(int8range(1, v_from.next_publication))
              <@ _pgqueue.unread(v_from) then
        raise exception 'p_to is before p_from'
            using errcode = 'PQ003', column = 'p_to, p_from',
                  hint = 'Pass the offset that read_to returned for p_from, or a later one.';
    end if;
    return query select lower(g), upper(g) from unnest(_pgqueue.messages_between(v_stream.stream_id, v_from, v_to)) g;
    if p_skip_trimmed is not true then
        perform _pgqueue.check_not_trimmed(v_stream, 'p_from', v_from, v_to);
    end if;
end $$;

-- Returns the total size of the data of the messages between two offsets, without reading it.
-- For a publication in the archive that an offset has cut, all messages count as equally large.
--   p_archive  for a reader that also reads the archive
-- Errors: PQ001, PQ003, PQ005. Locks: none.
create or replace function pgqueue.size_between(p_stream text, p_from jsonb, p_to jsonb,
                                                p_archive boolean default false) returns bigint
language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
    v_id     int := v_stream.stream_id;
    v_from   pgqueue.reading_offset := _pgqueue.parse_offset(v_stream, 'p_from', p_from, p_archive);
    v_to     pgqueue.reading_offset := _pgqueue.parse_offset(v_stream, 'p_to', p_to, p_archive);
    v_seqs   int8multirange := _pgqueue.messages_between(v_id, v_from, v_to);
    v_size   bigint := 0;
begin
    if p_archive then
        select v_seqs - coalesce(range_agg(p.seqs), '{}'),
               coalesce(ceil(sum(p.data_bytes::numeric * _pgqueue.cardinality(_pgqueue.common(p.seqs, v_seqs))
                                 / p.message_count)), 0)
        into v_seqs, v_size
        from unnest((_pgqueue.unread_from(v_from) - _pgqueue.unread_from(v_to) + _pgqueue.cut_between(v_from, v_to))
                    * (_pgqueue.trimmed(v_id)).o_archive) r
        cross join lateral (select * from _pgqueue.on_read(v_id, lower(r), upper(r)) offset 0) p
        where p.consumers is null and p.message_count > 0;
    end if;
    return v_size + coalesce((_pgqueue.data_bytes(v_id, array[v_seqs]))[1], 0);
end $$;

-- Reads the next messages of a stream after an offset, without claiming them.
--   p_offset  as in read_to
--   p_max     the largest number of messages, 1 to 100,000
-- Returns a row per message, in order of seq, each with the offset for the next call; without new messages, one row
-- with only the offset. Messages of a later publication may have lower numbers. Errors: PQ001, PQ003, PQ005, PQ010.
-- Locks: none.
create or replace function pgqueue.read(p_stream text, p_offset jsonb default null, p_max int default 1000)
returns table (seq bigint, key text, data text, data_bytes bytea, headers jsonb, inserted_at timestamptz,
               next_offset jsonb)
language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
    v_from   pgqueue.reading_offset;
    v_to     pgqueue.reading_offset;
    v_seqs   int8multirange;
    v_next   jsonb;
    v_count  bigint;
begin
    perform _pgqueue.check_number('p_max', p_max, 1, 100000);
    v_from := _pgqueue.offset_or_start(v_stream, p_offset);
    v_to := _pgqueue.advance_offset(v_stream, v_from, p_max, null);
    v_next := _pgqueue.durable_offset(v_stream, v_to, case when jsonb_typeof(p_offset) = 'object' then v_from end);
    v_seqs := _pgqueue.messages_between(v_stream.stream_id, v_from, v_to);
    return query execute format(
        'select m.seq, m.key, m.data, m.data_bytes, m.headers, m.inserted_at, $2 from unnest($1) g cross join lateral ('
        'select * from pgqueue.messages_%s x where x.seq >= lower(g) and x.seq < upper(g) '
        'and x.seq >= lower($1) and x.seq < upper($1) order by x.seq) m',
        v_stream.stream_id)  -- the bounds of $1 are for the planner, which excludes other segments
    using v_seqs, v_next;
    get diagnostics v_count = row_count;
    if v_count = 0 then
        next_offset := v_next;
        return next;
    end if;
    perform _pgqueue.check_not_trimmed(v_stream, 'p_offset', v_from, v_to);
    if v_count < _pgqueue.cardinality(v_seqs) then
        -- a truncated table is empty even for an old snapshot, which still sees the publications, and not the trim
        raise exception 'retention has overtaken p_offset: % of % messages are not stored any more',
                        _pgqueue.cardinality(v_seqs) - v_count, _pgqueue.cardinality(v_seqs)
            using errcode = 'PQ010', column = 'p_offset',
                  hint = 'They were trimmed after this transaction began: read with isolation level read committed, or '
                         'start again, at "earliest".';
    end if;
end $$;
