-- From version 1 (0.1.0). Keeps what consumers are owed, and settles claims that were made before.
do $$
declare
    v_name      text;
    v_stream_id int;
begin
    if not exists (select from pgqueue.installed where version = 1)
       or exists (select from pgqueue.installed where version = 2) then
        return;
    end if;
    -- the sequences of streams: a copy without their values gives negative numbers, see log/numbers.sql
    for v_name, v_stream_id in
        select format('pgqueue.%s_%s', n, stream_id), stream_id
        from pgqueue.streams cross join unnest('{seq,publication}'::text[]) n
    loop
        execute format('alter sequence %s minvalue -1000000000000000 start with -1000000000000000', v_name);
        -- never used: it goes on with 1, unless there are rows, as in a copy without the values of sequences
        execute format('select setval(%1$L, case when n then seqstart else 0 end, not n) '
                       'from %1$s cross join lateral (select exists (select from pgqueue.publications '
                       'where stream_id = %2$s) or exists (select from pgqueue.trims where stream_id = %2$s)) r (n) '
                       'cross join pg_sequence where seqrelid = %1$L::regclass and not is_called', v_name, v_stream_id);
    end loop;
    alter table pgqueue.streams add column publications_from bigint not null default 1;
    alter table pgqueue.servers add column database oid, add column files_since bigint;
    -- consumers that exist keep their settings; groups have none of these
    alter table pgqueue.consumers
        alter column max_deliver_count set default 25, alter column backoff set default 'exponential',
        alter column backoff_jitter set default 0.2;
    update pgqueue.consumers set max_deliver_count = default, backoff = default, backoff_jitter = default
    where partitions is not null;
    -- the setting ageing is gone: what a consumer with it owes is delivered by priority alone
    alter table pgqueue.consumers drop column quick, drop column ageing;
    alter table pgqueue.consumers
        add column quick boolean generated always as (
            not (partitions is not null or paused or scheduled or max_backlog is not null
                 or (ordering <> 'none' and (per_key_limit is not null or fair)) or per_key_interval is not null
                 or max_in_flight is not null or rate_limit is not null or filtered
                 or keep_history is not null or notify_done or per_key_capacity is not null or per_key_latest)) stored;
end $$;
