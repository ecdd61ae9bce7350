-- Sending, and the notifications of it.

-- When a message is due; null: at once.
create or replace function pgmq._due(delay timestamptz) returns timestamptz
language sql volatile as $$ select case when delay > clock_timestamp() then delay end $$;

create or replace function pgmq._due(delay integer) returns timestamptz
language sql volatile as $$ select clock_timestamp() + make_interval(secs => coalesce(delay, 0)) $$;

-- Raises an error for a queue that does not exist; notifies sessions that listen to the queue, if enable_notify_insert
-- was called.
create or replace function pgmq._sending(queue_name text) returns void
language plpgsql as $$
declare
    v_row tid;
begin
    perform pgmq._consumer(queue_name);
    select ctid into v_row from pgmq.notify_insert_throttle n
    where lower(n.queue_name) = lower(_sending.queue_name)
      and last_notified_at + throttle_interval_ms * interval '1 millisecond' <= clock_timestamp();
    if found then
        -- Beside an open transaction that has sent, it does not wait. It notifies too, because the other one may roll
        -- back, or commit long before this message.
        update pgmq.notify_insert_throttle set last_notified_at = clock_timestamp()
        where ctid = (select ctid from pgmq.notify_insert_throttle where ctid = v_row
                      for update skip locked);  -- lock: throttle
        -- a name, which Postgres truncates to 63 bytes, as in a listen
        perform pg_notify(('pgmq.q_' || lower(queue_name) || '.INSERT')::name::text, '');
    end if;
end $$;

-- The key of a message: its group, so that consumers can use it as a key; null if it is too long.
create or replace function pgmq._key(headers jsonb) returns text
language sql immutable as $$
    select case when octet_length(headers ->> 'x-pgmq-group') <= 1024 then headers ->> 'x-pgmq-group' end
$$;

create or replace function pgmq.send(queue_name text, msg jsonb, headers jsonb, delay timestamptz) returns setof bigint
language plpgsql as $$
begin
    perform pgmq._sending(queue_name);
    return next pgqueue.send(lower(queue_name), msg::text, pgmq._key(headers), headers,
                             p_deliver_at => pgmq._due(delay));
end $$;

-- Sends messages together. Errors: without messages, or with another number of headers.
create or replace function pgmq.send_batch(queue_name text, msgs jsonb[], headers jsonb[], delay timestamptz)
returns setof bigint language plpgsql as $$
begin
    if coalesce(cardinality(msgs), 0) = 0 then
        raise exception 'msgs cannot be NULL or empty' using errcode = 'P0001';
    elsif cardinality(headers) <> cardinality(msgs) then
        raise exception 'headers array length (%) must match msgs array length (%)', cardinality(headers),
            cardinality(msgs) using errcode = 'P0001';
    end if;
    perform pgmq._sending(queue_name);
    return query
        select * from pgqueue.send_batch(
            lower(queue_name), array(select m::text from unnest(msgs) with ordinality u (m, n) order by n),
            case when headers is not null
                 then array(select pgmq._key(h) from unnest(headers) with ordinality u (h, n) order by n) end,
            headers, p_deliver_at => pgmq._due(delay));
end $$;

-- Notifies the channel pgmq.q_<queue>.INSERT of sends to a queue with these functions, at most once per interval.
-- Transactions that are open at the same time may each notify.
create or replace function pgmq.enable_notify_insert(queue_name text, throttle_interval_ms integer default 250)
returns void language plpgsql as $$
begin
    perform pgmq._check_queue(queue_name, 'it', throttle_interval_ms);
    -- one statement: programs that start at the same time all succeed
    insert into pgmq.notify_insert_throttle as n (queue_name, throttle_interval_ms)
    select m.queue_name, enable_notify_insert.throttle_interval_ms from pgmq.meta m
    where lower(m.queue_name) = lower(enable_notify_insert.queue_name)
    on conflict on constraint notify_insert_throttle_queue_name_key
        do update set throttle_interval_ms = excluded.throttle_interval_ms, last_notified_at = to_timestamp(0);
end $$;

create or replace function pgmq.disable_notify_insert(queue_name text) returns void
language plpgsql as $$
begin
    delete from pgmq.notify_insert_throttle n where lower(n.queue_name) = lower(disable_notify_insert.queue_name);
end $$;

create or replace function pgmq.update_notify_insert(queue_name text, throttle_interval_ms integer) returns void
language plpgsql as $$
begin
    perform pgmq._check_queue(queue_name, 'the queue', throttle_interval_ms);
    update pgmq.notify_insert_throttle n
    set throttle_interval_ms = update_notify_insert.throttle_interval_ms, last_notified_at = to_timestamp(0)
    where lower(n.queue_name) = lower(update_notify_insert.queue_name);
    if not found then
        raise exception 'Queue "%" does not have notify_insert enabled. Enable it first using '
                        'pgmq.enable_notify_insert()', queue_name using errcode = 'P0001';
    end if;
end $$;

create or replace function pgmq.list_notify_insert_throttles()
returns table (queue_name text, throttle_interval_ms integer, last_notified_at timestamptz)
language sql stable as $$
    select queue_name, throttle_interval_ms, last_notified_at from pgmq.notify_insert_throttle order by queue_name
$$;
