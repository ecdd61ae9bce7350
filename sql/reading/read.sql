-- Reading without claiming: the reader keeps its own offset (reading/offsets.sql). Reading writes nothing and waits for
-- nobody, and works on a standby. Messages that were published to named consumers alone are not read, and deliver_at is
-- not waited for.

-- Returns the offset at which a reader begins.
--   p_start  earliest: before all messages of the stream; latest: before messages that become visible from now on; a
--            timestamp: before messages that were published since; seq N: before the message of that number.
--            Transactions that are still running count as later.
--   p_archive  for a reader that reads the archive, too: what is there was not trimmed
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
--   p_offset  where the reader is
--   p_end     a position, as start_offset takes it: the reader has read what is before it
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
-- A source of PySpark 4.0 must name an end before Spark tells it where the query is. This call fits that end to the
-- start, and returns the same for the same two offsets, for ever. Errors: PQ001, PQ003, PQ005. Locks: none.
create or replace function pgqueue.end_after(p_stream text, p_from jsonb, p_to jsonb) returns jsonb
language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
begin
    return _pgqueue.offset_json(v_stream, _pgqueue.merge_offsets(_pgqueue.parse_offset(v_stream, 'p_from', p_from),
                                                                 _pgqueue.parse_offset(v_stream, 'p_to', p_to)));
end $$;

-- Tells how many messages are after a reader's offset, and when the first was published.
--   p_archive  as in start_offset
-- Returns how many messages there are after the offset (in up to 100,000 publications), and when the first of them was
-- published; null: there are none, or only far behind many publications for named consumers. Errors: PQ001, PQ003,
-- PQ005. Locks: none.
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
--   p_offset        an offset; or, to begin, null for "earliest", or what start_offset takes, as a JSON string
--   p_max           messages at most, and exactly so many if there are; null: all (of up to 100,000 publications)
--   p_upto          no publication after this one; null: all
--   p_skip_trimmed  pass over what retention has taken away, instead of failing
--   p_archive       as in start_offset
-- Returns p_offset when there is nothing new. An offset that differs may have no messages between: then all new
-- messages were for named consumers. Errors: PQ001, PQ003, PQ005, PQ010 when retention was faster. Locks: none. (Read
-- committed: at an old snapshot gaps stay open.)
create or replace function pgqueue.read_to(p_stream text, p_offset jsonb, p_max bigint default null,
                                           p_upto bigint default null, p_skip_trimmed boolean default false,
                                           p_archive boolean default false) returns jsonb
language plpgsql as $$
declare
    v_stream pgqueue.streams := _pgqueue.stream(p_stream);
    v_from   pgqueue.reading_offset;
    v_to     pgqueue.reading_offset;
begin
    if p_max < 1 then
        raise exception 'p_max is null or at least 1, not %', p_max using errcode = 'PQ003', column = 'p_max';
    end if;
    v_from := _pgqueue.offset_or_start(v_stream, p_offset, p_archive);
    v_to := _pgqueue.advance_offset(v_stream, v_from, coalesce(p_max, 9223372036854775807), p_upto);
    if p_skip_trimmed is not true then
        perform _pgqueue.check_not_trimmed(v_stream, 'p_offset', v_from, v_to);
    end if;
    return _pgqueue.durable_offset(v_stream, v_to, case when jsonb_typeof(p_offset) = 'object' then v_from end);
end $$;

-- An offset, or what stands for one at the beginning. Errors: PQ003, PQ005.
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
-- It is for a reader that reads the payloads by COPY. The answer for two offsets is the same for ever.
--   p_from, p_to    offsets that start_offset, read_to or read returned; the second one after the first
--   p_skip_trimmed  return what is left, instead of failing, when retention has taken some messages away
--   p_archive       as in start_offset: then files may have the payloads, see archive_files
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
            using errcode = 'PQ003', column = 'p_to',
                  hint = 'Give the offset that read_to returned for p_from, or a later one.';
    end if;
    return query select lower(g), upper(g) from unnest(_pgqueue.messages_between(v_stream.stream_id, v_from, v_to)) g;
    if p_skip_trimmed is not true then
        perform _pgqueue.check_not_trimmed(v_stream, 'p_from', v_from, v_to);
    end if;
end $$;

-- Returns how many bytes of data the messages between two offsets have. The data itself is not read.
-- Of a publication in the archive that an offset has cut, each message counts as many bytes as the others.
--   p_archive  for a reader that reads the archive, too
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
               coalesce(ceil(sum(p.data_bytes::numeric * _pgqueue.cardinality(p.seqs * v_seqs) / p.message_count)), 0)
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
--   p_max     messages at most, 1 to 100,000
-- Returns a row per message, in order of seq, each with the offset to read on from; when there is nothing new, one row
-- with the offset alone. Messages of a publication that is published later may have lower numbers. Errors: PQ001,
-- PQ003, PQ005, PQ010. Locks: none.
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
        'and x.seq >= $3 and x.seq < $4 order by x.seq) m',
        v_stream.stream_id)  -- the bounds of all are for the planner: it leaves out the other tables of the stream
    using v_seqs, v_next, lower(v_seqs), upper(v_seqs);
    get diagnostics v_count = row_count;
    if v_count = 0 then
        next_offset := v_next;
        return next;
    end if;
    perform _pgqueue.check_not_trimmed(v_stream, 'p_offset', v_from, v_to);
    if v_count < _pgqueue.cardinality(v_seqs) then
        -- for an old snapshot, too, a table that was emptied since is empty; but the snapshot has the publications, and
        -- not that they were trimmed
        raise exception 'retention has overtaken p_offset: % of % messages are not stored any more',
                        _pgqueue.cardinality(v_seqs) - v_count, _pgqueue.cardinality(v_seqs)
            using errcode = 'PQ010', column = 'p_offset',
                  hint = 'They were taken away after this transaction began: read with isolation level read committed. '
                         'Else start again, at "earliest".';
    end if;
end $$;
