-- Topics: a message with a routing key is sent to each queue with a matching pattern.

-- Raises the error of pgmq for an invalid routing key or pattern.
--   allowed, in_words  the allowed characters: for a regular expression, and for the error
create or replace function pgmq._check_topic(argument text, given text, allowed text, in_words text) returns void
language plpgsql immutable as $$
declare
    v_wrong text := case
        when given !~ ('^[.' || allowed || ']+$')
        then 'contains invalid characters. Only ' || in_words || ' are allowed'
        when given ~ '^[.]' then 'cannot start with a dot'
        when given ~ '[.]$' then 'cannot end with a dot'
        when given ~ '[.][.]' then 'cannot contain consecutive dots'
        when given ~ '[*][*]' then 'cannot contain consecutive stars (**). Use # for multi-segment matching'
        when given ~ '##' then 'cannot contain consecutive hashes (##). A single # already matches zero or more '
                               'segments'
        when given ~ '[*#][*#]' then 'cannot contain adjacent wildcards (*# or #*). Separate wildcards with dots' end;
begin
    if given = '' or given is null then
        raise exception '% cannot be NULL or empty', argument using errcode = 'P0001';
    elsif length(given) > 255 then
        raise exception '% length cannot exceed 255 characters, got % characters', argument, length(given)
            using errcode = 'P0001';
    elsif v_wrong is not null then
        raise exception '% %. Got: %', argument, v_wrong, given using errcode = 'P0001';
    end if;
end $$;

create or replace function pgmq.validate_routing_key(routing_key text) returns boolean
language plpgsql immutable as $$
begin
    perform pgmq._check_topic('routing_key', routing_key, 'a-zA-Z0-9_-',
                              'alphanumeric, dots, hyphens, and underscores');
    return true;
end $$;

create or replace function pgmq.validate_topic_pattern(pattern text) returns boolean
language plpgsql immutable as $$
begin
    perform pgmq._check_topic('pattern', pattern, 'a-zA-Z0-9_*#-',
                              'alphanumeric, dots, hyphens, underscores, *, and #');
    return true;
end $$;

create or replace function pgmq.bind_topic(pattern text, queue_name text) returns void
language plpgsql as $$
begin
    perform pgmq.validate_topic_pattern(pattern);
    perform pgmq._check_queue(queue_name, 'the queue');
    insert into pgmq.topic_bindings (pattern, queue_name)
    select bind_topic.pattern, m.queue_name from pgmq.meta m
    where lower(m.queue_name) = lower(bind_topic.queue_name)
    on conflict do nothing;
end $$;

create or replace function pgmq.unbind_topic(pattern text, queue_name text) returns boolean
language plpgsql as $$
begin
    if coalesce(pattern, '') = '' or coalesce(queue_name, '') = '' then
        raise exception '% cannot be NULL or empty', case when pattern <> '' then 'queue_name' else 'pattern' end
            using errcode = 'P0001';
    end if;
    delete from pgmq.topic_bindings b
    where b.pattern = unbind_topic.pattern and lower(b.queue_name) = lower(unbind_topic.queue_name);
    return found;
end $$;

create or replace function pgmq.list_topic_bindings()
returns table (pattern text, queue_name text, bound_at timestamptz, compiled_regex text)
language sql stable as $$ select pattern, queue_name, bound_at, compiled_regex from pgmq.topic_bindings
      order by bound_at desc, pattern, queue_name $$;

create or replace function pgmq.list_topic_bindings(queue_name text)
returns table (pattern text, queue_name text, bound_at timestamptz, compiled_regex text)
language sql stable as $$ select b.* from pgmq.list_topic_bindings() b where lower(b.queue_name) = lower($1) $$;

create or replace function pgmq.test_routing(routing_key text)
returns table (pattern text, queue_name text, compiled_regex text)
language plpgsql stable as $$
begin
    perform pgmq.validate_routing_key(routing_key);
    return query select b.pattern, b.queue_name, b.compiled_regex from pgmq.topic_bindings b
                 where routing_key ~ b.compiled_regex order by b.pattern, b.queue_name;
end $$;

-- (queue_name is null for a role that may only send, because it cannot list queues.)
create or replace function pgmq.send_batch_topic(routing_key text, msgs jsonb[], headers jsonb[], delay timestamptz)
returns table (queue_name text, msg_id bigint)
language plpgsql as $$
declare
    v_queue    text;
    v_may_look boolean := _pgqueue.may_see_names();
begin
    for v_queue in select distinct t.queue_name from pgmq.test_routing(routing_key) t order by 1 loop
        queue_name := case when v_may_look then v_queue end;
        for msg_id in select * from pgmq.send_batch(v_queue, msgs, headers, delay) loop
            return next;
        end loop;
    end loop;
end $$;

create or replace function pgmq.send_topic(routing_key text, msg jsonb, headers jsonb, delay integer) returns integer
language plpgsql as $$
begin
    perform pgmq.validate_routing_key(routing_key);
    if msg is null then
        raise exception 'msg cannot be NULL' using errcode = 'P0001';
    elsif delay < 0 then
        raise exception 'delay cannot be negative, got: %', delay using errcode = 'P0001';
    end if;
    return (select count(*) from pgmq.send_batch_topic(
        routing_key, array[msg], case when headers is not null then array[headers] end, pgmq._due(delay)));
end $$;

create or replace function pgmq.send_topic(routing_key text, msg jsonb) returns integer
language plpgsql as $$ begin return pgmq.send_topic(routing_key, msg, null, 0); end $$;

create or replace function pgmq.send_topic(routing_key text, msg jsonb, delay integer) returns integer
language plpgsql as $$ begin return pgmq.send_topic(routing_key, msg, null, delay); end $$;

-- The forms of send, send_batch and send_batch_topic with fewer arguments, and with a delay in seconds.
do $do$
declare
    v_create text;
begin
    for v_create in
        select format('create or replace function pgmq.%1$s(%2$s text, %3$s %4$s%5$s) returns %6$s language plpgsql '
                      'as $f$ begin return query select * from pgmq.%1$s(%2$s, %3$s, %7$s, %8$s); end $f$', f.name,
                      f.target, f.payload, f.type, format(a.given, f.type), f.result, a.headers, a.delay)
        from (values ('send', 'queue_name', 'msg', 'jsonb', 'setof bigint'),
                     ('send_batch', 'queue_name', 'msgs', 'jsonb[]', 'setof bigint'),
                     ('send_batch_topic', 'routing_key', 'msgs', 'jsonb[]', 'table (queue_name text, msg_id bigint)'))
             f (name, target, payload, type, result)
        cross join (values ('', 'null', 'null::timestamptz'), (', headers %s', 'headers', 'null::timestamptz'),
                           (', delay integer', 'null', 'pgmq._due(delay)'), (', delay timestamptz', 'null', 'delay'),
                           (', headers %s, delay integer', 'headers', 'pgmq._due(delay)')) a (given, headers, delay)
    loop
        execute v_create;
    end loop;
end $do$;
