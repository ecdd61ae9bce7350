-- Positions: moving a consumer to another place of its stream, replaying, pausing and resuming.

-- Moves a consumer, or a group, to a position in its stream, as if it were created there.
-- The consumer forgets what it has taken and not finished, and its claims end. Their owners are told when they come
-- back; a Spark query at it fails tasks that read (PQ012), and goes on from the position. Dead letters stay dead. The
-- workers of a group go on from the position without a stop, and may still commit what they have read before.
--   p_to  earliest, latest, a timestamp, seq and a number, or an offset: as p_start of create_consumer
-- Returns how many messages it forgot: those that it had taken and not finished (of a group: that not all partitions
-- had passed), which come again only where they are after the position; and those that it skips.
-- Errors: PQ001, PQ002, PQ003, PQ007; PQ005 for an offset of something else; 55P03 when a transaction that holds some
-- of the consumer's messages stays open for 10 s. Locks, to the end of the transaction: the history, shared; the
-- consumer, its claims and its messages.
create or replace function pgqueue.seek(p_stream text, p_consumer text, p_to text) returns bigint
language sql as $$ select _pgqueue.seek(_pgqueue.consumer(p_stream, p_consumer), p_to, 'p_to') $$;

-- Moves a consumer that is known: see seek.
--   p_argument  what the caller calls p_to
create or replace function _pgqueue.seek(p_consumer pgqueue.consumers, p_to text, p_argument text) returns bigint
language plpgsql as $$
declare
    v_seen record;
begin
    perform _pgqueue.check_isolation();
    v_seen := _pgqueue.resolve_position(p_consumer.stream_id, p_to, p_argument);
    -- in tries: a claimer may hold bundles that this needs, and need the consumer's lock
    return _pgqueue.await(
        'messages, a claim or the lock of ' || _pgqueue.consumer_name(p_consumer.consumer_id),
        'select _pgqueue.move(c, ($2 ->> 0)::int8multirange, ($2 -> 1)::bigint, '
        'array(select jsonb_array_elements_text($2 -> 2)), ($2 ->> 3)::int8multirange) '
        'from pgqueue.consumers c where c.consumer_id = $1', p_consumer.consumer_id,
        jsonb_build_array(v_seen.o_seen, v_seen.o_next, v_seen.o_publishers, v_seen.o_cut),
        p_try => interval '5 ms', p_limit => interval '10 s')::bigint;
end $$;

-- One try to move a consumer: see seek, and for the arguments resolve_position().
create or replace function _pgqueue.move(p_consumer pgqueue.consumers, p_seen int8multirange, p_next bigint,
                                         p_publishers text[], p_cut int8multirange) returns bigint
language plpgsql as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_new    int8multirange;  -- the publications that it had not taken
    v_kept   int8multirange;  -- their messages that are not new for it
    v_gone   bigint;
    v_count  bigint;
    v_dead   int8multirange;
begin
    perform _pgqueue.lock_consumer_alone(p_consumer.consumer_id);
    v_stored := _pgqueue.cursor(p_consumer.consumer_id);
    v_cursor := _pgqueue.pass_taken(v_stored, true);
    v_gone := _pgqueue.delete_bundles(p_consumer.consumer_id);
    v_new := _pgqueue.new_ids(v_cursor);
    v_kept := coalesce(_pgqueue.excluded(v_cursor), '{}');
    v_count := v_gone + _pgqueue.messages_in(p_consumer, p_seen * v_new, v_kept)
        + coalesce((select sum(_pgqueue.cardinality(p.seqs * p_cut - v_kept))
                    from _pgqueue.published(p_consumer.stream_id,
                                            (int8multirange(int8range(1, p_next)) - p_seen) * v_new) p
                    where p_cut is not null and p.seqs && p_cut
                      and _pgqueue.is_for(p.consumers, p_consumer.consumer_id)), 0);
    delete from pgqueue.consumer_gaps where consumer_id = p_consumer.consumer_id;
    v_dead := (select range_agg(seqs) from pgqueue.dead_messages where consumer_id = p_consumer.consumer_id);
    v_cursor.forgotten := v_cursor.forgotten + v_gone;
    v_cursor.gaps := '{}';
    v_cursor.hints := null;
    -- Only a gap keeps messages from the consumer. So where some of its messages are dead, all that it took before
    -- becomes one gap.
    if v_dead is not null and v_cursor.next_publication > p_next then
        p_next := v_cursor.next_publication;
        p_publishers := _pgqueue.publishers(p_consumer.stream_id);  -- of what was taken since the position was found
    end if;
    v_cursor := _pgqueue.cursor_from(v_cursor, p_seen, p_next, p_publishers, coalesce(v_dead + p_cut, v_dead, p_cut));
    v_cursor.hints := _pgqueue.rebuild_hints(v_cursor);
    perform _pgqueue.save_cursor(v_stored, v_cursor, true);
    perform _pgqueue.enter_keys(p_consumer);
    perform _pgqueue.delete_newest(p_consumer.consumer_id);
    return v_count;
end $$;

-- Delivers messages between two positions once more to a consumer that has finished or skipped them.
-- They arrive at the end of the consumer's line. Messages that the consumer has taken and not finished, or not taken
-- yet, come as they would; dead letters stay dead.
--   p_from  from this position on, see seek
--   p_to    up to this position, without what is after it
-- Returns how many messages these are.
-- Errors: PQ001, PQ002, PQ003, PQ006 for a group, PQ007. Locks: the history, shared; then the consumer.
create or replace function pgqueue.replay(p_stream text, p_consumer text, p_from text, p_to text default 'latest')
returns bigint language plpgsql as $$
declare
    v_consumer pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
    v_from     record;
    v_to       record;
    v_stored   pgqueue.consumer_cursors;
    v_cursor   pgqueue.consumer_cursors;
    v_less     record;
    v_ids      int8multirange;
    v_kept     int8multirange;
begin
    if v_consumer.partitions is not null then
        -- whether a message is done depends on its partition, which is not known here
        raise exception '% is a group, which replays nothing', quote_literal(p_consumer)
            using errcode = 'PQ006', hint = 'Call seek: all partitions go on from a position.';
    end if;
    perform _pgqueue.check_isolation();
    v_from := _pgqueue.resolve_position(v_consumer.stream_id, p_from, 'p_from');
    v_to := _pgqueue.resolve_position(v_consumer.stream_id, p_to, 'p_to');
    v_ids := v_to.o_seen - v_from.o_seen  -- and those that the second position cuts
        + coalesce((select range_agg(int8range(p.publication_id, p.publication_id, '[]'))
                    from _pgqueue.published(v_consumer.stream_id, int8multirange(int8range(1, v_to.o_next))
                                                                  - v_to.o_seen - v_from.o_seen) p
                    where p.seqs && v_to.o_cut), '{}');
    -- in tries: a session that claims new messages may need the consumer's lock next
    perform _pgqueue.await('the lock of ' || _pgqueue.consumer_name(v_consumer.consumer_id),
                           'select 0 from _pgqueue.lock_consumer_alone($1::int)', v_consumer.consumer_id,
                           p_try => interval '5 ms');
    v_stored := _pgqueue.cursor(v_consumer.consumer_id);
    v_kept := coalesce((select range_agg(seqs)
                        from (select seqs from _pgqueue.unfinished(v_consumer.consumer_id)
                              union all
                              select seqs from pgqueue.dead_messages
                              where consumer_id = v_consumer.consumer_id) m), '{}');
    v_less := _pgqueue.release_kept(v_consumer, _pgqueue.pass_taken(v_stored, true), v_ids, v_kept + _pgqueue.outside(
        v_consumer.stream_id, v_ids, v_from.o_next, v_from.o_cut, v_to.o_seen, v_to.o_cut));
    v_cursor := v_less.p_cursor;
    v_ids := v_ids * int8multirange(int8range(1, v_cursor.next_publication)) - _pgqueue.gap_ids(v_cursor);
    -- what is kept applies to all gaps: so nothing of a publication that is in another gap
    v_kept := v_kept + _pgqueue.outside(v_consumer.stream_id, v_ids, v_from.o_next, v_from.o_cut, v_to.o_seen,
                                        v_to.o_cut);
    v_cursor := _pgqueue.record_gap(v_cursor, v_ids, '{}', true, v_kept);
    perform _pgqueue.save_cursor(v_stored, v_cursor, true);
    perform _pgqueue.enter_keys(v_consumer);
    perform _pgqueue.delete_newest(v_consumer.consumer_id);
    return v_less.o_count + _pgqueue.messages_in(v_consumer, v_ids, v_kept);
end $$;

-- The messages of publications that are before the first of two positions, or after the second: of the publications
-- that a position cuts. For the arguments see seen_from().
create or replace function _pgqueue.outside(p_stream_id int, p_ids int8multirange, p_from_next bigint,
                                            p_from_cut int8multirange, p_to_seen int8multirange,
                                            p_to_cut int8multirange)
returns int8multirange language sql stable as $$
    select coalesce((select range_agg(p.seqs) * p_from_cut
                     from _pgqueue.published(p_stream_id, p_ids * int8multirange(int8range(1, p_from_next))) p
                     where p.seqs && p_from_cut), '{}')
         + coalesce((select range_agg(p.seqs) - p_to_cut from _pgqueue.published(p_stream_id, p_ids - p_to_seen) p),
                    '{}')
$$;

-- Takes messages out of what gaps keep, so that they arrive again: messages that the consumer had not finished when the
-- gap was made, that it has finished since, and that a replay asks for.
--   p_ids   the publications that the replay asks for
--   p_kept  what the consumer has not finished now
-- Returns the cursor, and how many of these messages are of publications in those gaps.
create or replace function _pgqueue.release_kept(p_consumer pgqueue.consumers, inout p_cursor pgqueue.consumer_cursors,
                                                 p_ids int8multirange, p_kept int8multirange, out o_count bigint)
language plpgsql as $$
declare
    v_gap  pgqueue.consumer_gaps;
    v_seqs record;
begin
    o_count := 0;
    for v_gap in
        select * from pgqueue.consumer_gaps
        where consumer_id = p_cursor.consumer_id and gap_no = any (p_cursor.gaps) and not excluded <@ p_kept
    loop
        select coalesce(range_agg(p.seqs), '{}') * (v_gap.excluded - p_kept) as again,
               coalesce(range_agg(p.seqs) filter (where v_gap.publication_ids @> p.publication_id), '{}')
                   * (v_gap.excluded - p_kept) as here
        into v_seqs
        from _pgqueue.published(p_consumer.stream_id, p_ids) p
        where p.seqs && (v_gap.excluded - p_kept) and _pgqueue.is_for(p.consumers, p_consumer.consumer_id);
        continue when v_seqs.again = '{}';
        p_cursor := _pgqueue.delete_gaps(p_cursor, array[v_gap.gap_no]);
        p_cursor := _pgqueue.record_gap(p_cursor, v_gap.publication_ids, v_gap.publishers, v_gap.look,
                                        v_gap.excluded - v_seqs.again);
        o_count := o_count + _pgqueue.cardinality(v_seqs.here);
    end loop;
end $$;

-- Pauses a consumer: it claims nothing until it is resumed.
-- Claimed messages stay claimed, and are settled as ever; published messages wait. A claim that is under way may still
-- get messages. Safe to repeat.
-- Errors: PQ001, PQ002. Locks: none that others wait for.
create or replace function pgqueue.pause(p_stream text, p_consumer text) returns void
language sql as $$ select _pgqueue.set_paused(p_stream, p_consumer, true) $$;

-- Lets a paused consumer claim again, and wakes up workers that wait for messages. Safe to repeat.
-- Errors: PQ001, PQ002. Locks: none that others wait for.
create or replace function pgqueue.resume(p_stream text, p_consumer text) returns void
language sql as $$ select _pgqueue.set_paused(p_stream, p_consumer, false) $$;

-- Pauses or resumes a consumer.
create or replace function _pgqueue.set_paused(p_stream text, p_consumer text, p_paused boolean) returns void
language plpgsql as $$
declare
    v_consumer pgqueue.consumers := _pgqueue.consumer(p_stream, p_consumer);
begin
    perform _pgqueue.await('the settings of ' || _pgqueue.consumer_name(v_consumer.consumer_id),
        'update pgqueue.consumers set paused = not paused where consumer_id = $1 and paused <> ($2 -> 0)::boolean '
        'returning 0',  -- lock: settings
        v_consumer.consumer_id, jsonb_build_array(p_paused));
    if not p_paused then
        perform _pgqueue.wake(v_consumer.stream_id);
    end if;
end $$;
