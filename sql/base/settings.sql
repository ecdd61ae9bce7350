-- The settings of consumers and streams, which can be changed while these are in use.

-- All settings. Each is a column of pgqueue.consumers or pgqueue.streams with the same name. The column given has the
-- names of those that were set: they keep their value. All others have the default of this list, also after a later
-- version changes it: version.sql writes it into their columns, so that claims read the columns alone. (The defaults of
-- fair, per_key_limit, per_key_interval and per_key_latest must not change: these need a paused consumer.)
--
-- To add a setting, see sql/changing.md.
--   type       integer, number, interval, boolean or schema; text: one of the choices
--   low, high  the smallest and largest value. For an interval, 0 as low allows 0, and '1 us' means longer than 0
--   no_value   the word for no value, if the default is a value; it is stored as null
create or replace function _pgqueue.settings()
returns table (of_what text, name text, type text, default_value text, low text, high text, choices text[],
               no_value text)
language sql immutable as $$
    values ('consumer', 'visibility_timeout', 'interval', '30 s', '1 us', _pgqueue.max_interval()::text, null::text[],
            null),
           ('consumer', 'max_deliver_count',  'integer',  '25', '1', '2147483647', null, 'never'),
           ('consumer', 'backoff',            'text',     'exponential', null, null,
            '{constant, linear, exponential}', null),
           ('consumer', 'backoff_base',       'interval', null, '0', _pgqueue.max_interval()::text, null, null),
           ('consumer', 'backoff_cap',        'interval', '1 hour', '0', _pgqueue.max_interval()::text, null, null),
           ('consumer', 'backoff_jitter',     'number',   '0.2', '0', '1', null, null),
           ('consumer', 'max_backlog',        'integer',  null, '1', '2147483647', null, null),
           ('consumer', 'on_full',            'text',     'reject', null, null, '{reject, drop_oldest}', null),
           ('consumer', 'max_in_flight',      'integer',  null, '1', '2147483647', null, null),
           ('consumer', 'rate_limit',         'integer',  null, '1', '2147483647', null, null),
           ('consumer', 'rate_interval',      'interval', null, '1 ms', _pgqueue.max_interval()::text, null, null),
           ('consumer', 'fair',               'boolean',  'false', null, null, null, null),
           ('consumer', 'per_key_limit',      'integer',  null, '1', '2147483647', null, null),
           ('consumer', 'per_key_capacity',   'integer',  null, '1', '2147483647', null, null),
           ('consumer', 'per_key_interval',   'interval', null, '1 us', _pgqueue.max_interval()::text, null, null),
           ('consumer', 'per_key_burst',      'integer',  '1', '1', '2147483647', null, null),
           ('consumer', 'per_key_latest',     'boolean',  'false', null, null, null, null),
           ('consumer', 'keep_history',       'interval', null, '1 us', _pgqueue.max_interval()::text, null, null),
           ('consumer', 'notify_done',        'boolean',  'false', null, null, null, null),
           ('stream',   'notify',             'boolean',  'true', null, null, null, null),
           ('stream',   'max_bytes',          'integer',  '16777216', '1', _pgqueue.max_max_bytes()::text, null, null),
           ('stream',   'max_header_bytes',   'integer',  '65536', '2', _pgqueue.max_max_header_bytes()::text, null,
            null),
           ('stream',   'dedup_window',       'interval', null, '1 us', _pgqueue.max_interval()::text, null, null),
           ('stream',   'schema',             'schema',   null, null, null, null, null)
$$;

-- Raises PQ003 for settings of a consumer that conflict. Each conflict is a branch of the case.
create or replace function _pgqueue.check_conflicts(p_consumer pgqueue.consumers) returns void
language plpgsql stable as $$
declare
    v_conflict text := case
        when p_consumer.partitions is not null and p_consumer.given <> '{}'
            then 'a group does not support these settings, because its messages are not claimed'
        when p_consumer.ordering = 'stream' and _pgqueue.limits_keys(p_consumer)
            then 'ordering=stream does not use keys: fair, per_key_limit and per_key_interval have no effect'
        when p_consumer.per_key_capacity is not null and p_consumer.on_full = 'drop_oldest'
            then 'per_key_capacity rejects messages, and on_full=drop_oldest accepts all: set only one of them'
        when p_consumer.per_key_capacity is not null and p_consumer.per_key_latest
            then 'per_key_capacity rejects messages of a key, and per_key_latest replaces earlier ones: set only one '
                 'of them'
        when p_consumer.per_key_burst > 1 and p_consumer.per_key_interval is null
            then 'per_key_burst requires per_key_interval'
        when (p_consumer.rate_limit is null) <> (p_consumer.rate_interval is null)
            then 'rate_limit messages are delivered within each rate_interval: set both, or neither'
        when p_consumer.backoff_base > p_consumer.backoff_cap then 'backoff_base must be at most backoff_cap'
        end;
begin
    if v_conflict is not null then
        raise exception 'p_settings: %', v_conflict
            using errcode = 'PQ003', column = 'p_settings', hint = 'Nothing was changed.';
    end if;
end $$;

-- The allowed values of a setting, in words.
create or replace function _pgqueue.allowed_values(p_type text, p_low text, p_high text, p_choices text[],
                                                   p_no_value text) returns text
language sql stable as $$
    select concat_ws(', or ', case p_type
        when 'boolean' then 'true or false'
        when 'schema' then 'columns in Spark''s DDL'
        when 'text' then _pgqueue.any_of(p_choices)
        when 'interval' then format('an interval %s up to %s',
                                    case when p_low::interval > '0' then 'longer than 0 and' else 'from 0' end, p_high)
        when 'integer' then case when p_high = '2147483647' then 'at least ' || p_low
                                 else format('%s to %s', p_low, p_high) end
        else format('a number from %s to %s', p_low, p_high) end, p_no_value)
$$;

-- Raises PQ003 unless a value is allowed for a setting. Null means the default, and is always allowed.
create or replace function _pgqueue.check_setting(p_of_what text, p_name text, p_value jsonb) returns void
language plpgsql stable as $$
declare
    v_setting record;
    v_text    text := p_value #>> '{}';
    -- Postgres reads a number without a unit as seconds, and the user may mean another unit
    v_bare    boolean := v_text ~ E'^[-+.\\d\\s]*$';
    v_allowed boolean := false;
begin
    select * into v_setting from _pgqueue.settings() s where s.of_what = p_of_what and s.name = p_name;
    begin
        if v_text is null or v_text = v_setting.no_value then
            return;
        elsif jsonb_typeof(p_value) not in ('object', 'array') then
            v_allowed := case v_setting.type
                when 'boolean'  then v_text::boolean is not null
                when 'integer'  then v_text::int between v_setting.low::int and v_setting.high::int
                when 'number'   then v_text::float8 between v_setting.low::float8 and v_setting.high::float8
                when 'interval' then not v_bare
                    and v_text::interval between v_setting.low::interval and v_setting.high::interval
                when 'text'     then v_text = any (v_setting.choices)
                else _pgqueue.on_setting(v_setting.type, v_text) end;
        end if;
    exception when data_exception then
        null;
    end;
    if not v_allowed then
        raise exception 'p_settings: % must be null (default: %) or %, %',
                        p_name, coalesce(v_setting.default_value, 'none'),
                        _pgqueue.allowed_values(v_setting.type, v_setting.low, v_setting.high, v_setting.choices,
                                         v_setting.no_value),
                        'not ' || left(p_value::text, 100)
                        || case when v_setting.type = 'interval' and v_bare
                             then ', which has no unit: write 500 ms, 30 s or 5 minutes' else '' end
            using errcode = 'PQ003', column = 'p_settings';
    end if;
end $$;

-- Raises PQ003 unless all settings exist, and each value is allowed.
create or replace function _pgqueue.check_settings(p_of_what text, p_settings jsonb) returns void
language plpgsql stable as $$
declare
    v_names   text[] := array(select name from _pgqueue.settings() where of_what = p_of_what order by name);
    v_unknown text;
begin
    if p_settings is null or jsonb_typeof(p_settings) <> 'object' then
        raise exception 'p_settings must be a JSON object with a value for each setting, such as {"%": null}, not %',
                        v_names[1], coalesce(left(p_settings::text, 100), 'null')
            using errcode = 'PQ003', column = 'p_settings';
    end if;
    v_unknown := (select min(k) from jsonb_object_keys(p_settings) k where k <> all (v_names));
    if v_unknown is not null then
        raise exception 'p_settings: a % has no setting %', p_of_what, quote_literal(left(v_unknown, 100))
            using errcode = 'PQ003', column = 'p_settings', hint = _pgqueue.suggestion(v_unknown, v_names);
    end if;
    perform _pgqueue.check_setting(p_of_what, key, value) from jsonb_each(p_settings);
end $$;

-- Settings as they are stored: null becomes the default, and the word for no value becomes null.
create or replace function _pgqueue.stored_settings(p_of_what text, p_settings jsonb) returns jsonb
language sql stable as $$
    select coalesce(jsonb_object_agg(e.key, case when e.value = 'null' then to_jsonb(s.default_value)
                                                 when e.value <> to_jsonb(s.no_value) is not false
                                                 then e.value end), '{}')
    from jsonb_each(p_settings) e join _pgqueue.settings() s on s.of_what = p_of_what and s.name = e.key
$$;

-- The defaults of all settings, as they are stored.
create or replace function _pgqueue.defaults(p_of_what text) returns jsonb
language sql stable as $$
    select jsonb_object_agg(name, default_value) from _pgqueue.settings() where of_what = p_of_what
$$;

-- The settings of a row that have an older default, each with null, which sets the default.
--   p_row            of pgqueue.consumers or pgqueue.streams
--   p_with_defaults  the row with the default of each setting
create or replace function _pgqueue.changed_defaults(p_row jsonb, p_with_defaults jsonb) returns jsonb
language sql immutable as $$
    select coalesce(jsonb_object_agg(d.key, null), '{}')
    from jsonb_each(p_with_defaults) d
    where d.value <> p_row -> d.key and not p_row -> 'given' ? d.key
$$;

-- The new value of the column given, after some settings were set, or reset to their default by null.
create or replace function _pgqueue.given_names(p_given text[], p_settings jsonb) returns text[]
language sql immutable as $$
    select array(select g from unnest(p_given) g where not p_settings ? g
                 union select key from jsonb_each(p_settings) where value <> 'null' order by 1)
$$;

-- The hint for a word that is none of some words: the most similar one, if any, and all of them. A name that other
-- queues use for a setting comes first; else the word that has the most pairs of letters in common with p_word.
create or replace function _pgqueue.suggestion(p_word text, p_words text[]) returns text
language sql immutable as $$
    with given as materialized (  -- (a long word would be read again for each pair)
        select lower(left(p_word, 100)) as word, length(p_word) as length
    )
    select concat_ws(' ', 'Did you mean ' || coalesce(
        (select a.name
         from (values ('{max_attempts,attempts,max_retries,max_retry,retries,max_tries,retry_limit,retry_count,'
                       'max_receive_count,max_delivery_count,max_deliveries,max_deliver,delivery_limit,max_read_ct}',
                       'max_deliver_count'),
                      ('{vt,visibility,lease,lease_time,lease_timeout,lease_duration,lock_duration,ack_deadline,'
                       'ack_wait,ack_timeout,timeout,invisibility_timeout}', 'visibility_timeout'),
                      ('{retry_delay,retry_backoff,retry_interval,delay}', 'backoff_base'),
                      ('{max_retry_delay,max_backoff,retry_delay_max}', 'backoff_cap'),
                      ('{max_length,max_queue_length,x_max_length}', 'max_backlog'),
                      ('{max_ack_pending,global_concurrency,prefetch,prefetch_count,concurrency}', 'max_in_flight'),
                      ('{max_message_bytes,maximum_message_size,max_msg_size}', 'max_bytes'),
                      ('{deduplication_interval,duplicate_window}', 'dedup_window')) a (words, name)
         where a.name = any (p_words)
           -- maxReceiveCount, max-receive-count and max_receive_count are equal
           and regexp_replace((select word from given), '[^a-z0-9]', '', 'g')
               = any (replace(a.words, '_', '')::text[])),
        (select w
         from unnest(p_words) w cross join given g
         cross join lateral (select count(*) as common
                             from (select substr('^' || g.word, i, 2)
                                   from generate_series(1, length(g.word)) i
                                   intersect
                                   select substr('^' || left(w, 100), i, 2)
                                   from generate_series(1, length(left(w, 100))) i) pair) c
         where 5 * common >= length(w) + g.length
         order by common::float8 / (length(w) + g.length) desc, w limit 1)) || '?',
        format('Available: %s.', coalesce(nullif(array_to_string(p_words, ', '), ''), 'none')))
$$;

-- The settings of a consumer or stream: those that were set, and all others, which have their defaults.
--   p_row  its row of pgqueue.consumers or pgqueue.streams
create or replace function _pgqueue.settings_of(p_of_what text, p_row jsonb, out o_given jsonb, out o_defaults jsonb)
language sql stable as $$
    select coalesce(jsonb_object_agg(s.name, v.value) filter (where p_row -> 'given' ? s.name), '{}'),
           coalesce(jsonb_object_agg(s.name, v.value) filter (where not p_row -> 'given' ? s.name), '{}')
    from _pgqueue.settings() s
    cross join lateral (select coalesce(nullif(p_row -> s.name, 'null'), to_jsonb(s.no_value)) as value) v
    where s.of_what = p_of_what
$$;
