-- After a restore, or the promotion of a standby that lacked commits, later commits are lost, and their numbers are
-- assigned again to other messages. The database itself is consistent. State outside of it is not: the offsets of
-- readers that do not claim, and the checkpoints of Spark queries.
--
--   * An offset has the incarnation of its stream, a random number. recover() gives each stream a new incarnation, and
--     records the last publication of the old one. An offset of the old incarnation remains valid if it has read
--     nothing beyond that publication; else it is refused (PQ005).
--   * A checkpoint has the id of a claim, half of which is random, and the id of its own reader. A checkpoint that is
--     ahead of the reader's row, or names an unknown claim, is refused too (check_reader() in spark/reader.sql),
--     without recover().
--
-- recover() also advances the sequences that are behind their rows after a restore or a replication (log/numbers.sql).
--
-- doctor reports a missing call of recover() (is_restored): the server, its timeline, the database or the data
-- directory is not the recorded one. A copied volume cannot be distinguished from the original that was restarted. A
-- promoted standby counts as restored: it may have lacked commits, and a restore to a point in time cannot be
-- distinguished from it. Nothing is refused for that alone, so a failover ends no query.

-- Returns whether this database is not the recorded one: another server, timeline, database, or copied files.
-- The installation and recover() record it. A copied volume is not detected, and neither is a copied directory if the
-- owner is not a superuser. Locks nothing.
create or replace function pgqueue.is_restored() returns boolean
language sql stable as $$
    select _pgqueue.is_elsewhere()
        or coalesce((select s.files_since <> (_pgqueue.server()).files_since
                     from pgqueue.servers s order by s.server_no desc limit 1), false)
$$;

-- Lists the sequences that are behind their rows, because they were restored or replicated without their values.
-- Sends, and other calls that need their numbers, fail (PQ011) until recover() has advanced them.
--   p_quick  read only rows that an index finds, as for doctor: they show that values of sequences are missing
-- Returns the sequence, its last number, and the highest number in a row. No row: no sequence is behind. Without
-- p_quick, it reads whole tables. Locks nothing.
create or replace function pgqueue.numbers_behind(p_quick boolean default false)
returns table (sequence text, last_number bigint, highest bigint)
language sql stable as $$
    select n.sequence::text, n.last_number, n.highest from _pgqueue.numbers(null, p_quick) n
    where n.last_number < n.highest
$$;

-- Begins a new incarnation of each stream, after a restore or a promotion, and advances sequences beyond their rows.
-- Call it once, before producers restart. Messages that they publish before the call count as restored, and an offset
-- that has read other publications with the same numbers would skip them. An unneeded call does no harm,
-- but exporters delete no earlier file of an archive then. A dump that was made while maintain() ran may lack messages:
-- with a warning, consumers skip them, and the stream counts them as trimmed. Returns a row per stream: the last
-- publication that counts as restored. Errors: PQ007; PQ011 on a standby; 55P03 when a session publishes, or has a
-- consumer's lock for a minute. Locks, to the end of the transaction: the rows of streams; where messages are missing,
-- their consumers.
create or replace function pgqueue.recover() returns table (stream text, last_publication bigint)
language plpgsql as $$
declare
    v_stream pgqueue.streams;
begin
    if pg_is_in_recovery() then
        raise exception 'this server is a standby'
            using errcode = 'PQ011', hint = 'Call recover() once it is promoted.';
    end if;
    perform _pgqueue.check_isolation();  -- an old snapshot lacks publications that offsets have read
    select s.* into v_stream from pgqueue.streams s cross join lateral unnest(_pgqueue.publishers(s.stream_id)) w
    where w not like '-1/%' limit 1;
    if found then  -- prepared transactions are older
        raise exception 'producers already publish to stream %', quote_literal(v_stream.name)
            using errcode = 'lock_not_available',
                  hint = 'Stop producers, call recover(), and restart them. Nothing was changed.';
    end if;
    perform _pgqueue.move_numbers();  -- first: the statements below need numbers
    perform _pgqueue.keep_secret();
    perform _pgqueue.await(
        'a stream',
        'select count(*) from (select from pgqueue.streams order by stream_id for update) s',  -- lock: stream
        null);
    for v_stream in select * from pgqueue.streams s order by s.stream_id loop
        stream := v_stream.name;
        last_publication := pgqueue.last_publication(v_stream.stream_id);
        insert into pgqueue.incarnations (incarnation, stream_id, last_publication)
        values (v_stream.incarnation, v_stream.stream_id, recover.last_publication);
        update pgqueue.streams s set incarnation = gen_random_uuid() where s.stream_id = v_stream.stream_id;
        return next;
    end loop;
    perform _pgqueue.skip_missing(o.c) from (select c from pgqueue.consumers c order by c.consumer_id) o;
    perform _pgqueue.trim_missing(o.s) from (select s from pgqueue.streams s order by s.stream_id) o;
    perform _pgqueue.on_recover();
    perform _pgqueue.record_server();
end $$;

-- Skips unfinished messages of a consumer that are not stored, except those in claims, which become dead letters when
-- they are delivered (receive()). The cost is proportional to the unfinished messages. Locks: the consumer, if messages
-- are missing.
create or replace function _pgqueue.skip_missing(p_consumer pgqueue.consumers) returns void
language plpgsql as $$
declare
    v_cursor  pgqueue.consumer_cursors := _pgqueue.cursor(p_consumer.consumer_id);
    v_new     int8multirange := _pgqueue.new_ids(v_cursor);
    v_owed    int8multirange := (select range_agg(o.seqs) from _pgqueue.new_and_unfinished(p_consumer, v_new, null) o)
        - coalesce(_pgqueue.excluded(v_cursor), '{}');
    v_missing int8multirange;
    v_upto    bigint;
begin
    if v_owed is null or _pgqueue.count_stored(p_consumer.stream_id, v_owed) = _pgqueue.cardinality(v_owed) then
        return;
    end if;
    v_missing := v_owed - _pgqueue.stored_messages(p_consumer.stream_id, v_owed);
    v_upto := (select max(o.publication_id) from _pgqueue.new_and_unfinished(p_consumer, v_new, '{}') o
               where _pgqueue.meets(o.seqs, v_missing));
    perform _pgqueue.lock_consumer(p_consumer.consumer_id);  -- skip() does nothing while another session has it
    while _pgqueue.skip(p_consumer, v_missing, coalesce(v_upto, 1)) loop end loop;
    raise warning 'consumer % of stream % skips % that the stream does not store', quote_literal(p_consumer.name),
        quote_literal(p_consumer.stream_name), _pgqueue.counted(_pgqueue.cardinality(v_missing), 'message');
end $$;

-- Trims the publications of messages that a stream does not store, except those that files of its archive have. These
-- are the messages of whole segments, which maintain() emptied after the snapshot of the dump, and before the dump
-- locked their tables. Consumers have skipped them. Locks: none that others wait for.
create or replace function _pgqueue.trim_missing(p_stream pgqueue.streams) returns void
language plpgsql as $$
declare
    v_segment pgqueue.segments;
    v_stored  boolean;
    v_missing int8multirange := '{}';
    v_ids     int8multirange;
    v_count   bigint;
begin
    for v_segment in select * from pgqueue.segments where stream_id = p_stream.stream_id and not emptied loop
        execute format('select exists (select from pgqueue.%I)',
                       _pgqueue.segment_name(v_segment.stream_id, v_segment.segment)) into v_stored;
        if not v_stored then
            v_missing := v_missing + int8multirange(int8range(v_segment.lo, v_segment.hi));
        end if;
    end loop;
    v_missing := v_missing * int8multirange(int8range(1, _pgqueue.last_seq(p_stream.stream_id) + 1))
                 - _pgqueue.on_trim(p_stream.stream_id);
    select range_agg(int8range(publication_id, publication_id, '[]')), sum(_pgqueue.cardinality(seqs * v_missing))
    into v_ids, v_count
    from pgqueue.publications where stream_id = p_stream.stream_id and seqs && v_missing;
    if v_ids is null then
        return;
    end if;
    delete from pgqueue.publications
    where stream_id = p_stream.stream_id and seqs && v_missing and seqs <@ v_missing;
    update pgqueue.publications
    set seqs = seqs - v_missing, message_count = _pgqueue.cardinality(seqs - v_missing)
    where stream_id = p_stream.stream_id and seqs && v_missing;
    v_ids := v_ids - coalesce((select range_agg(int8range(publication_id, publication_id, '[]'))
                               from pgqueue.publications
                               where stream_id = p_stream.stream_id and v_ids @> publication_id), '{}');
    perform _pgqueue.record_trim(p_stream.stream_id, v_ids, v_missing, v_count);
    raise warning 'stream % does not store %: they count as trimmed', quote_literal(p_stream.name),
        _pgqueue.counted(v_count, 'published message');
end $$;

-- The installation records the server once, and recover() afterwards. Columns that version 1 did not have are filled
-- in.
do $$
begin
    perform _pgqueue.record_server() where not exists (select from pgqueue.servers);
    perform _pgqueue.record_server()
    from (select * from pgqueue.servers order by server_no desc limit 1) s
    where s.database is null and not _pgqueue.is_elsewhere();
end $$;
