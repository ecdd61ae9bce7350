-- From version 1 (0.1.0). Keeps what consumers are owed, and settles claims that were made before.
do $$
declare
    v_name      text;
    v_stream_id int;
begin
    if (select max(version) from pgqueue.installed) >= 2 is not false then
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
    -- Consumers and streams that exist keep their settings: what differs from the defaults of version 2 is given.
    -- Groups have none. What others have of the setting ageing goes: they deliver by priority alone.
    alter table pgqueue.consumers
        drop column by_key, drop column limits_keys, drop column throttled, drop column special, drop column archives,
        drop column quick, drop column judged, drop column ageing,
        alter column max_deliver_count drop default, alter column visibility_timeout drop default,
        alter column backoff drop default, alter column backoff_cap drop default,
        alter column backoff_jitter drop default, alter column notify_done drop default,
        alter column on_full drop default, alter column per_key_burst drop default,
        alter column per_key_latest drop default, alter column fair drop default,
        add column given text[] not null default '{}',
        add column way text not null generated always as (
            case when partitions is not null or paused or scheduled or filtered or keep_history is not null
                      or notify_done or max_backlog is not null or per_key_capacity is not null or per_key_latest
                      or per_key_interval is not null or (ordering <> 'none' and (per_key_limit is not null or fair))
                      or max_in_flight is not null or rate_limit is not null
                 then 'careful' else 'simple' end
            || case when ordering <> 'none' or per_key_limit is not null or per_key_interval is not null or fair
                    then ' keyed' else '' end) stored;
    update pgqueue.consumers set max_deliver_count = 25, backoff = 'exponential', backoff_jitter = 0.2
    where partitions is not null;
    update pgqueue.consumers c
    set given = array(
        select n.key
        from jsonb_each(to_jsonb(jsonb_populate_record(c,
            '{"max_deliver_count": 25, "visibility_timeout": "30 s", "backoff": "exponential", "backoff_base": null,
              "backoff_cap": "1 hour", "backoff_jitter": 0.2, "keep_history": null, "notify_done": false,
              "max_backlog": null, "on_full": "reject", "per_key_limit": null, "per_key_capacity": null,
              "per_key_interval": null, "per_key_burst": 1, "per_key_latest": false, "fair": false,
              "max_in_flight": null, "rate_limit": null, "rate_interval": null}'))) n
        where n.value <> to_jsonb(c) -> n.key order by n.key);
    alter table pgqueue.streams
        alter column notify drop default, alter column max_bytes drop default,
        alter column max_header_bytes drop default, add column given text[] not null default '{}';
    update pgqueue.streams s
    set given = array(
        select n.key
        from jsonb_each(to_jsonb(jsonb_populate_record(s,
            '{"notify": true, "max_bytes": 16777216, "max_header_bytes": 65536, "dedup_window": null,
              "schema": null}'))) n
        where n.value <> to_jsonb(s) -> n.key order by n.key);
end $$;
