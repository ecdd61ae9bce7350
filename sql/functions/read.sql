-- Reading without claiming: by offsets that the reader keeps (core/offsets.sql). Nothing is written, nobody is waited for, and a standby
-- will do. What was published to named consumers alone is not read, and deliver_at is not waited for.

-- The offset at which a reader begins.
--   p_start  earliest: before all messages that there are; latest: before what becomes visible from now on; a timestamp: before what
--            was published since; seq N: before the message of that number. Transactions that are still running count as later.
-- Errors: PQ001, PQ003. Locks: the history, shared.
create or replace function pgqueue.start_offset(p_stream text, p_start text default 'earliest') returns jsonb
language plpgsql
as $$
declare
    v_stream pgqueue.streams := pgqueue._stream(p_stream);
begin
    return pgqueue._offset_json(v_stream, pgqueue._offset_at(v_stream, coalesce(p_start, 'earliest'), 'p_start'));
end $$;

-- The offset at which a reader ends that has read up to another one: never before that.
--   p_offset  where the reader is
--   p_end     a position, as start_offset takes it: the reader has read what is before it
-- Errors: PQ001, PQ003, PQ005. Locks: the history, shared.
create or replace function pgqueue.end_offset(p_stream text, p_offset jsonb, p_end text) returns jsonb
language plpgsql
as $$
declare
    v_stream pgqueue.streams := pgqueue._stream(p_stream);
    v_from   pgqueue.reading_offset := pgqueue._parse_offset(v_stream, 'p_offset', p_offset);
begin
    return pgqueue._offset_json(v_stream, pgqueue._offset_not_before(v_from, pgqueue._offset_at(v_stream, p_end, 'p_end')));
end $$;

-- An end that was found by who did not know the start, for who has read up to that: never before it. The same for the same two, for ever.
-- (A source of PySpark 4.0 is asked for an end before it is told where the query is.) Errors: PQ001, PQ003, PQ005. Locks: none.
create or replace function pgqueue._end_after(p_stream text, p_from jsonb, p_to jsonb) returns jsonb
language plpgsql
as $$
declare
    v_stream pgqueue.streams := pgqueue._stream(p_stream);
begin
    return pgqueue._offset_json(v_stream, pgqueue._offset_not_before(pgqueue._parse_offset(v_stream, 'p_from', p_from),
                                                                     pgqueue._parse_offset(v_stream, 'p_to', p_to)));
end $$;

-- How far a reader is behind.
-- Returns how many messages there are after its offset (in up to 100,000 publications), and when the first of them was published; null: none,
-- or it is behind many that are for named consumers. Errors: PQ001, PQ003, PQ005. Locks: none.
create or replace function pgqueue.offset_lag(p_stream text, p_offset jsonb, out messages bigint, out since timestamptz)
language plpgsql
as $$
declare
    v_stream pgqueue.streams := pgqueue._stream(p_stream);
    v_from   pgqueue.reading_offset := pgqueue._parse_offset(v_stream, 'p_offset', p_offset);
begin
    messages := (pgqueue._read_on(v_stream, v_from, 9223372036854775807, null)).messages - v_from.messages;
    if messages > 0 then
        select p.published_at into since
        from unnest(pgqueue._unread(v_from) + int8multirange(int8range(v_from.next_publication, null))) g
        cross join lateral (select published_at, consumers from pgqueue.publications
                            where stream_id = v_stream.stream_id and publication_id >= lower(g)
                              and publication_id < coalesce(upper(g), 9223372036854775807)
                            order by publication_id limit 1000) p
        where p.consumers is null
        limit 1;
    end if;
end $$;

-- The offset after the next messages.
--   p_offset  an offset; or, to begin, null for "earliest", or what start_offset takes, as a JSON string
--   p_max     messages at most, and exactly so many if there are; null: what there is (of up to 100,000 publications)
--   p_upto    no publication after this one; null: all
--   p_skip_trimmed  pass over what retention has taken away, instead of failing
-- Returns p_offset when there is nothing new. An offset that differs may have no messages between: then all that came was for named consumers.
-- Errors: PQ001, PQ003, PQ005, PQ010 when retention was faster. Locks: none. (Read committed: at an old snapshot gaps stay open.)
create or replace function pgqueue.read_to(p_stream text, p_offset jsonb, p_max bigint default null, p_upto bigint default null,
                                           p_skip_trimmed boolean default false) returns jsonb
language plpgsql
as $$
declare
    v_stream pgqueue.streams := pgqueue._stream(p_stream);
    v_from   pgqueue.reading_offset;
    v_to     pgqueue.reading_offset;
begin
    if p_max < 1 then
        raise exception 'p_max is null or at least 1, not %', p_max using errcode = 'PQ003', column = 'p_max';
    end if;
    v_from := pgqueue._offset_or_start(v_stream, p_offset);
    v_to := pgqueue._read_on(v_stream, v_from, coalesce(p_max, 9223372036854775807), p_upto);
    if p_skip_trimmed is not true then
        perform pgqueue._check_not_trimmed(v_stream, 'p_offset', v_from, v_to);
    end if;
    return pgqueue._offset_json(v_stream, v_to);
end $$;

-- An offset, or what stands for one at the beginning. Errors: PQ003, PQ005.
create or replace function pgqueue._offset_or_start(p_stream pgqueue.streams, p_offset jsonb) returns pgqueue.reading_offset
language plpgsql
as $$
begin
    if p_offset is null or jsonb_typeof(p_offset) in ('null', 'string') then
        return pgqueue._offset_at(p_stream, coalesce(p_offset #>> '{}', 'earliest'), 'p_offset');
    end if;
    return pgqueue._parse_offset(p_stream, 'p_offset', p_offset);
end $$;

-- The messages between two offsets as ranges [lo, hi) of seq, in the order of reading: for who reads the payloads by COPY.
--   p_from, p_to  offsets that start_offset, read_to or read returned; the second one after the first
--   p_skip_trimmed  what is left of them, instead of failing, when retention has taken some away
-- The same for ever. Errors: PQ001, PQ003, PQ005, PQ010. Locks: none.
create or replace function pgqueue.read_plan(p_stream text, p_from jsonb, p_to jsonb, p_skip_trimmed boolean default false)
returns table (lo bigint, hi bigint)
language plpgsql
as $$
declare
    v_stream pgqueue.streams := pgqueue._stream(p_stream);
    v_from   pgqueue.reading_offset := pgqueue._parse_offset(v_stream, 'p_from', p_from);
    v_to     pgqueue.reading_offset := pgqueue._parse_offset(v_stream, 'p_to', p_to);
begin
    if v_to.next_publication < v_from.next_publication
       or not pgqueue._unread(v_to) * int8multirange(int8range(1, v_from.next_publication)) <@ pgqueue._unread(v_from) then
        raise exception 'p_to is before p_from' using errcode = 'PQ003', column = 'p_to', hint = 'Give the offset that read_to returned for p_from, or a later one.';
    end if;
    return query select lower(g), upper(g) from unnest(pgqueue._messages_between(v_stream.stream_id, v_from, v_to)) g;
    if p_skip_trimmed is not true then
        perform pgqueue._check_not_trimmed(v_stream, 'p_from', v_from, v_to);
    end if;
end $$;

-- How many bytes of data the messages between two offsets have. The data itself is not read.
-- Errors: PQ001, PQ003, PQ005. Locks: none.
create or replace function pgqueue.size_between(p_stream text, p_from jsonb, p_to jsonb) returns bigint
language plpgsql
as $$
declare
    v_stream pgqueue.streams := pgqueue._stream(p_stream);
    v_seqs   int8multirange := pgqueue._messages_between(v_stream.stream_id, pgqueue._parse_offset(v_stream, 'p_from', p_from),
                                                         pgqueue._parse_offset(v_stream, 'p_to', p_to));
    v_size   bigint;
begin
    execute format(
        'select coalesce(sum(coalesce(octet_length(m.data), octet_length(m.data_bytes))), 0) from unnest($1) g cross join lateral ('
        'select * from pgqueue.messages_%s x where x.seq >= lower(g) and x.seq < upper(g) and x.seq >= $2 and x.seq < $3 offset 0) m',
        v_stream.stream_id)
    into v_size using v_seqs, lower(v_seqs), upper(v_seqs);
    return v_size;
end $$;

-- Reads the next messages of a stream, without claiming them.
--   p_offset  as in read_to
--   p_max     messages at most, 1 to 100,000
-- Returns a row per message, in order of seq, each with the offset to read on from; when there is nothing new, one row with that alone.
-- Messages of a publication that is published later may have lower numbers. Errors: PQ001, PQ003, PQ005, PQ010. Locks: none.
create or replace function pgqueue.read(p_stream text, p_offset jsonb default null, p_max int default 1000)
returns table (seq bigint, key text, data text, data_bytes bytea, headers jsonb, inserted_at timestamptz, next_offset jsonb)
language plpgsql
as $$
declare
    v_stream pgqueue.streams := pgqueue._stream(p_stream);
    v_from   pgqueue.reading_offset;
    v_to     pgqueue.reading_offset;
    v_seqs   int8multirange;
    v_next   jsonb;
    v_count  bigint;
begin
    perform pgqueue._check_number('p_max', p_max, 1, 100000);
    v_from := pgqueue._offset_or_start(v_stream, p_offset);
    v_to := pgqueue._read_on(v_stream, v_from, p_max, null);
    v_next := pgqueue._offset_json(v_stream, v_to);
    v_seqs := pgqueue._messages_between(v_stream.stream_id, v_from, v_to);
    return query execute format(
        'select m.seq, m.key, m.data, m.data_bytes, m.headers, m.inserted_at, $2 from unnest($1) g cross join lateral ('
        'select * from pgqueue.messages_%s x where x.seq >= lower(g) and x.seq < upper(g) and x.seq >= $3 and x.seq < $4 order by x.seq) m',
        v_stream.stream_id)  -- the bounds of all are for the planner: it leaves out the other tables of the stream
    using v_seqs, v_next, lower(v_seqs), upper(v_seqs);
    get diagnostics v_count = row_count;
    if v_count = 0 then
        next_offset := v_next;
        return next;
    end if;
    perform pgqueue._check_not_trimmed(v_stream, 'p_offset', v_from, v_to);
    if v_count < pgqueue._cardinality(v_seqs) then
        -- a table that was emptied since is so for an old snapshot too, which still has the publications and not that they were trimmed
        raise exception 'retention has overtaken p_offset: % of % messages are not stored any more', pgqueue._cardinality(v_seqs) - v_count,
                        pgqueue._cardinality(v_seqs)
            using errcode = 'PQ010', column = 'p_offset',
                  hint = 'They were taken away after this transaction began: read with isolation level read committed. Else begin anew, at "earliest".';
    end if;
end $$;
