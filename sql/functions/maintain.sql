-- Housekeeping. Nothing waits for it: run it now and then, from cron or by hand.

-- Deletes what failed writers left: staged blocks of batches that were published without them, and staged blocks older than
-- p_staged_age, with their messages; all but the last ten batches of each sink; and what was noted of batch writes without a
-- txnAppId, whose names are used once. It releases no claim and deletes no published message.
--   p_staged_age  longer than any batch may take from its first write to its commit
-- Returns what was deleted and how much. Errors: PQ003. Locks: the staged blocks that it deletes.
create or replace function pgqueue.maintain(p_staged_age interval default '1 day') returns table (what text, deleted bigint)
language plpgsql
as $$
declare
    v_block    pgqueue.staged_writes;
    v_range    int8range;
    v_count        bigint;
    v_blocks   bigint := 0;
    v_messages bigint := 0;
begin
    perform pgqueue._check_timeout('p_staged_age', p_staged_age);
    for v_block in
        select w.* from pgqueue.staged_writes w
        where w.staged_at < clock_timestamp() - p_staged_age or pgqueue.is_published(w.sink, w.stream_id, w.batch)
        order by w.staged_id
        for update skip locked  -- locked before its messages go: a commit that takes it is either done or finds nothing
    loop
        for v_range in select unnest(v_block.seqs) loop
            execute format('delete from pgqueue.messages_%s where seq >= $1 and seq < $2', v_block.stream_id) using lower(v_range), upper(v_range);
            get diagnostics v_count = row_count;
            v_messages := v_messages + v_count;
        end loop;
        delete from pgqueue.staged_writes where staged_id = v_block.staged_id;
        v_blocks := v_blocks + 1;
    end loop;
    return query values ('staged blocks', v_blocks), ('unpublished messages', v_messages);

    delete from pgqueue.sink_batches b
    where b.batch < (select max(m.batch) from pgqueue.sink_batches m where m.sink = b.sink and m.stream_id = b.stream_id) - 10
       or (b.sink like 'write:%' and b.published_at < clock_timestamp() - p_staged_age);
    get diagnostics v_count = row_count;
    return query values ('old sink batches', v_count);
end $$;
