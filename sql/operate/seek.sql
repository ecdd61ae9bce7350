-- Positions: moving a consumer to another place of its stream, replaying, pausing and resuming.

-- Moves a consumer, or a group, to a position in its stream, as if it were created there.
-- The consumer drops its unfinished messages, and its claims end. Their owners get an error at their next call. In a
-- Spark query, tasks that read fail (PQ012), and the query continues from the position. Dead letters remain. The
-- workers of a group continue from the position, and may still commit what they have read before.
--   p_to  earliest, latest, a timestamp, seq and a number, or an offset: as p_start of create_consumer
-- Returns how many messages it dropped: those that it had taken and not finished (of a group: not processed by all
-- partitions), which are delivered again only if they are after the position; and those that it skips.
-- Errors: PQ001, PQ002, PQ003, PQ007; PQ005 for an offset of something else; 55P03 when a transaction that holds some
-- of the consumer's messages stays open for 10 s. Locks, to the end of the transaction: the history, shared; the
-- consumer, its claims and its messages.
create or replace function pgqueue.seek(p_stream text, p_consumer text, p_to text) returns bigint
language sql as $$ select _pgqueue.seek(_pgqueue.consumer(p_stream, p_consumer), p_to, 'p_to') $$;

-- Moves a consumer; see seek.
--   p_argument  the name of p_to in the caller, for errors
create or replace function _pgqueue.seek(p_consumer pgqueue.consumers, p_to text, p_argument text) returns bigint
language plpgsql as $$
declare
    v_seen record;
begin
    perform _pgqueue.check_isolation();
    v_seen := _pgqueue.resolve_position(p_consumer.stream_id, p_to, p_argument);
    -- in tries: a claim may hold bundles that this session needs, and need the consumer's lock
    return _pgqueue.await(
        'messages, a claim or the lock of ' || _pgqueue.consumer_name(p_consumer.consumer_id),
        'select _pgqueue.move(c, ($2 ->> 0)::int8multirange, ($2 -> 1)::bigint, '
        'array(select jsonb_array_elements_text($2 -> 2)), ($2 ->> 3)::int8multirange) '
        'from pgqueue.consumers c where c.consumer_id = $1', p_consumer.consumer_id,
        jsonb_build_array(v_seen.o_seen, v_seen.o_next, v_seen.o_publishers, v_seen.o_cut),
        p_try => interval '5 ms', p_limit => interval '10 s', p_class => _pgqueue.lock_class_consumer())::bigint;
end $$;

-- One try to move a consumer; see seek, and resolve_position() for the arguments.
create or replace function _pgqueue.move(p_consumer pgqueue.consumers, p_seen int8multirange, p_next bigint,
                                         p_publishers text[], p_cut int8multirange) returns bigint
language plpgsql as $$
declare
    v_stored pgqueue.consumer_cursors;
    v_cursor pgqueue.consumer_cursors;
    v_new    int8multirange;  -- the publications that it had not taken
    v_kept   int8multirange;  -- their messages that are not new for the consumer
    v_gone   bigint;
    v_count  bigint;
    v_dead   int8multirange;
begin
    perform _pgqueue.lock_consumer_alone(p_consumer.consumer_id);
    p_consumer := _pgqueue.consumer_now(p_consumer);
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
    -- Only a gap can exclude messages. So if the consumer has dead letters, all that it took before becomes one gap.
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

-- Delivers messages between two positions again to a consumer that has finished or skipped them.
-- They are delivered after the consumer's other messages. Unfinished and new messages are not affected; dead letters
-- remain.
--   p_from  the first position, see seek
--   p_to    the last position; messages after it are not replayed
-- Returns the number of messages.
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
        raise exception '% is a group, which cannot replay messages', quote_literal(p_consumer)
            using errcode = 'PQ006', hint = 'Use seek, which moves all partitions to a position.';
    end if;
    perform _pgqueue.check_isolation();
    v_from := _pgqueue.resolve_position(v_consumer.stream_id, p_from, 'p_from');
    v_to := _pgqueue.resolve_position(v_consumer.stream_id, p_to, 'p_to');
    v_ids := v_to.o_seen - v_from.o_seen  -- and those that the second position splits
        + coalesce((select range_agg(int8range(p.publication_id, p.publication_id, '[]'))
                    from _pgqueue.published(v_consumer.stream_id, int8multirange(int8range(1, v_to.o_next))
                                                                  - v_to.o_seen - v_from.o_seen) p
                    where _pgqueue.meets(p.seqs, v_to.o_cut)), '{}');
    -- in tries: a session that claims new messages may need the consumer's lock next
    perform _pgqueue.await('the lock of ' || _pgqueue.consumer_name(v_consumer.consumer_id),
                           'select 0 from _pgqueue.lock_consumer_alone($1::int)', v_consumer.consumer_id,
                           p_try => interval '5 ms', p_class => _pgqueue.lock_class_consumer());
    v_consumer := _pgqueue.consumer_now(v_consumer);
    v_stored := _pgqueue.cursor(v_consumer.consumer_id);
    v_kept := coalesce((select range_agg(seqs)
                        from (select seqs from _pgqueue.unfinished(v_consumer.consumer_id)
                              union all
                              select seqs from pgqueue.dead_messages
                              where consumer_id = v_consumer.consumer_id) m), '{}');
    v_less := _pgqueue.remove_exclusions(
        v_consumer, _pgqueue.pass_taken(v_stored, true), v_ids, v_kept + _pgqueue.outside(
            v_consumer.stream_id, v_ids, v_from.o_next, v_from.o_cut, v_to.o_seen, v_to.o_cut));
    v_cursor := v_less.p_cursor;
    v_ids := v_ids * int8multirange(int8range(1, v_cursor.next_publication)) - _pgqueue.gap_ids(v_cursor);
    -- exclusions apply to all gaps, so no publication that is in another gap
    v_kept := v_kept + _pgqueue.outside(v_consumer.stream_id, v_ids, v_from.o_next, v_from.o_cut, v_to.o_seen,
                                        v_to.o_cut);
    v_cursor := _pgqueue.record_gap(v_cursor, v_ids, '{}', true, v_kept);
    perform _pgqueue.save_cursor(v_stored, v_cursor, true);
    perform _pgqueue.enter_keys(v_consumer);
    perform _pgqueue.delete_newest(v_consumer.consumer_id);
    return v_less.o_count + _pgqueue.messages_in(v_consumer, v_ids, v_kept);
end $$;

-- The messages of publications that a position splits and that are before the first of two positions, or after the
-- second. For the arguments see seen_from().
create or replace function _pgqueue.outside(p_stream_id int, p_ids int8multirange, p_from_next bigint,
                                            p_from_cut int8multirange, p_to_seen int8multirange,
                                            p_to_cut int8multirange)
returns int8multirange language sql stable as $$
    select coalesce((select range_agg(p.seqs) * p_from_cut
                     from _pgqueue.published(p_stream_id, p_ids * int8multirange(int8range(1, p_from_next))) p
                     where _pgqueue.meets(p.seqs, p_from_cut)), '{}')
         + coalesce((select range_agg(p.seqs) - p_to_cut from _pgqueue.published(p_stream_id, p_ids - p_to_seen) p),
                    '{}')
$$;

-- Removes messages from the exclusions of gaps, so that they arrive again: messages of a replay that the consumer had
-- not finished when the gap was created, and has finished since.
--   p_ids   the publications of the replay
--   p_kept  the messages that the consumer has not finished now
-- Returns the cursor, and how many of these messages are of publications in those gaps.
create or replace function _pgqueue.remove_exclusions(p_consumer pgqueue.consumers,
                                                      inout p_cursor pgqueue.consumer_cursors, p_ids int8multirange,
                                                      p_kept int8multirange, out o_count bigint)
language plpgsql as $$
declare
    v_gap  pgqueue.consumer_gaps;
    v_less int8multirange;
    v_seqs record;
begin
    o_count := 0;
    for v_gap in
        select * from pgqueue.consumer_gaps
        where consumer_id = p_cursor.consumer_id and gap_no = any (p_cursor.gaps) and not excluded <@ p_kept
    loop
        v_less := v_gap.excluded - p_kept;
        select coalesce(range_agg(p.seqs), '{}') * v_less as again,
               coalesce(range_agg(p.seqs) filter (where v_gap.publication_ids @> p.publication_id), '{}') * v_less
                   as here
        into v_seqs
        from _pgqueue.published(p_consumer.stream_id, p_ids) p
        where _pgqueue.meets(p.seqs, v_less) and _pgqueue.is_for(p.consumers, p_consumer.consumer_id);
        continue when v_seqs.again = '{}';
        p_cursor := _pgqueue.delete_gaps(p_cursor, array[v_gap.gap_no]);
        p_cursor := _pgqueue.record_gap(p_cursor, v_gap.publication_ids, v_gap.publishers, v_gap.look,
                                        v_gap.excluded - v_seqs.again);
        o_count := o_count + _pgqueue.cardinality(v_seqs.here);
    end loop;
end $$;

-- Pauses a consumer: it claims nothing until it is resumed.
-- Claimed messages stay claimed, and can be settled; published messages wait. A claim in progress may still get
-- messages. Safe to repeat.
-- Errors: PQ001, PQ002. Locks: none that others wait for.
create or replace function pgqueue.pause(p_stream text, p_consumer text) returns void
language sql as $$ select _pgqueue.set_paused(p_stream, p_consumer, true) $$;

-- Resumes a paused consumer, and wakes up workers that wait for messages. Safe to repeat.
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
