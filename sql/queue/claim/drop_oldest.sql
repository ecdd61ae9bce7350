-- Dropping the oldest messages of a consumer with a full backlog.

-- Makes the oldest messages of a backlog that is too large dead letters. Unfiltered messages stay. Needs the consumer's
-- lock. Returns the cursor, which the caller stores.
create or replace function _pgqueue.drop_oldest(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors)
returns pgqueue.consumer_cursors language plpgsql as $$
declare
    v_last    bigint := _pgqueue.last_seq(p_consumer.stream_id);
    v_since   timestamptz := clock_timestamp();
    v_backlog bigint;
    v_set     int8multirange;
begin
    if _pgqueue.has_capacity(p_consumer, v_last, 0) is not null then
        return p_cursor;
    end if;
    for i in 1..10 loop  -- new messages can be dropped once they are taken
        exit when not _pgqueue.has_new(p_consumer.stream_id, p_cursor, true);
        p_cursor := (_pgqueue.take(p_consumer, p_cursor, null, _pgqueue.limit_take())).o_cursor;
        exit when not (p_cursor.hints).was_cut or clock_timestamp() > v_since + _pgqueue.filter_time();
    end loop;
    v_backlog := (select coalesce(sum(message_count), 0) from _pgqueue.unfinished(p_consumer.consumer_id)
                  where state <> 'claimed' and (not p_consumer.filtered or state <> 'unfiltered'));
    if not p_consumer.filtered and (p_cursor.hints).was_cut then
        v_backlog := v_backlog
            + _pgqueue.messages_in(p_consumer, int8multirange(int8range(p_cursor.next_publication, null)), null,
                                   p_consumer.max_backlog);  -- more could not make further old messages excess
    end if;
    if v_backlog > p_consumer.max_backlog then
        select range_agg(case when before + message_count > v_backlog - p_consumer.max_backlog
                              then _pgqueue.below(seqs, _pgqueue.bound_of(
                                  seqs, (v_backlog - p_consumer.max_backlog - before)::bigint)) else seqs end)
        into v_set
        from (select seqs, message_count,
                     sum(message_count) over (order by arrival_no, first_seq) - message_count as before
              from _pgqueue.unfinished(p_consumer.consumer_id)
              where state not in ('claimed', 'unfiltered')) r
        where before < v_backlog - p_consumer.max_backlog;
        if v_set is not null then
            p_cursor := (_pgqueue.remove_unclaimed(p_consumer, p_cursor, v_set, 'dropped')).o_cursor;
        end if;
        v_backlog := null;
    end if;
    perform _pgqueue.record_backlog(p_consumer.consumer_id, v_backlog, v_last, v_since);
    return p_cursor;
end $$;
