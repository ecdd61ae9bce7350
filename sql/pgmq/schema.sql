-- The schema pgmq, with the types of pgmq 1.13, and its tables. A queue q is the stream q, of kind json, with the
-- consumer pgmq. Names with a leading _ are internal functions.

do $$
declare
    v_schema  pg_namespace;
    v_foreign text;
begin
    if to_regprocedure('pgqueue.schema_version()') is null then
        raise exception 'the schema pgqueue is not installed in this database'
            using errcode = 'PQ011', hint = 'Install it first: pgqueue install.';
    elsif not exists (select from pg_namespace where nspname = 'pgqueue' and nspowner = current_user::regrole) then
        raise exception 'the schema pgqueue belongs to a role other than %', current_user
            using errcode = 'PQ011', hint = 'Install as its owner.';
    end if;
    -- existing grants remain: see access.sql
    perform set_config('pgqueue.objects_before',
                       (select coalesce(string_agg(distinct oid::text, ' '), '') from _pgqueue.grants()), true);
    select * into v_schema from pg_namespace where nspname = 'pgmq';
    if not found then
        create schema pgmq;  -- fails if another session has just created it
        return;
    end if;
    if obj_description(v_schema.oid, 'pg_namespace') like 'spark-pgqueue:%' is not true then
        raise exception 'this database has a schema pgmq that spark-pgqueue did not create: perhaps pgmq itself'
            using errcode = 'PQ006', hint = 'Move its queues (see sql/guide/moving.md), then drop or rename it. '
                                            'Nothing was changed.';
    end if;
    -- as in ../schema.sql: another owner could have prepared code that this installer would run
    select string_agg(distinct o.what, ', ') into v_foreign
    from (select 'the schema pgmq' as what, v_schema.nspowner as owner
          union all
          select 'pgmq.' || relname, relowner from pg_class
          where relnamespace = v_schema.oid and relkind not in ('i', 'I')
          union all
          select 'pgmq.' || proname, proowner from pg_proc where pronamespace = v_schema.oid
          union all
          select 'pgmq.' || typname, typowner from pg_type where typnamespace = v_schema.oid) o
    where o.owner <> current_user::regrole;
    if v_foreign is not null then
        raise exception '% belongs to a role other than %', v_foreign, current_user
            using errcode = 'PQ011', hint = 'Install as its owner, or let its owner drop it. Nothing was changed.';
    end if;
end $$;

comment on schema pgmq is 'spark-pgqueue: the functions of pgmq, on streams of the schema pgqueue';

do $$
begin
    if to_regtype('pgmq.message_record') is null then
        create type pgmq.message_record as (
            msg_id bigint, read_ct integer, enqueued_at timestamptz, last_read_at timestamptz, vt timestamptz,
            message jsonb, headers jsonb);
        create type pgmq.queue_record as (
            queue_name varchar, is_partitioned boolean, is_unlogged boolean, created_at timestamptz);
        create type pgmq.metrics_result as (
            queue_name text, queue_length bigint, newest_msg_age_sec int, oldest_msg_age_sec int,
            total_messages bigint, scrape_time timestamptz, queue_visible_length bigint,
            default_partition_length bigint);
    end if;
end $$;

-- The queues.
create table if not exists pgmq.meta (
    queue_name     varchar     not null unique,
    is_partitioned boolean     not null,
    is_unlogged    boolean     not null,
    created_at     timestamptz not null default now()
);

-- The archived messages of all queues; the view a_<queue> has those of one.
create table if not exists pgmq._archived (
    queue_name   varchar     not null references pgmq.meta (queue_name) on delete cascade,
    msg_id       bigint      not null,
    read_ct      integer     not null,
    enqueued_at  timestamptz not null,
    last_read_at timestamptz,
    archived_at  timestamptz not null default now(),
    vt           timestamptz not null,
    message      jsonb,
    headers      jsonb,
    primary key (queue_name, msg_id)
);

-- The queues of a routing key. In a pattern, # matches any characters, and * one or more without a dot.
create table if not exists pgmq.topic_bindings (
    pattern        text        not null,
    queue_name     text        not null references pgmq.meta (queue_name) on delete cascade,
    bound_at       timestamptz not null default now(),
    compiled_regex text        not null generated always as (
        '^' || replace(replace(regexp_replace(pattern, '([]+?{}()|^$\\.[])', '\\\1', 'g'), '*', '[^.]+'), '#', '.*')
        || '$') stored,
    unique (pattern, queue_name)
);

-- The queues whose sends notify, with the minimum interval between notifications.
create table if not exists pgmq.notify_insert_throttle (
    queue_name           varchar     not null unique references pgmq.meta (queue_name) on delete cascade,
    throttle_interval_ms integer     not null default 0,
    last_notified_at     timestamptz not null default to_timestamp(0)
);
