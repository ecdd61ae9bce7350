-- The ledger of the crossing: see crossing_ledger.py.

create schema ledger;
set search_path = ledger;
create sequence no;  -- the order of deliveries and settlements: one that follows from another has a higher number

create table sent (token text primary key, stream_id int, seq bigint, producer int, n bigint, key text, num int,
    consumers int[], dedup_key text, late boolean default false, xid xid8 default pg_current_xact_id());
create table duplicates (token text, stream_id int, dedup_key text);
create table made (consumer_id int primary key, stream_id int, name text, ordering text, start text, topic text,
    num_below int, partitions int);
create table moved (no bigint default nextval('no'), consumer_id int, how text, before pg_snapshot,
    after pg_snapshot, published int8multirange);
create table delivered (no bigint default nextval('no'), consumer_id int, claim_id bigint, seq bigint, token text,
    place int);
create table acked (no bigint default nextval('no'), consumer_id int, claim_id bigint, seq bigint, token text,
    xid xid8 default pg_current_xact_id());
create table gone (consumer_id int, seq bigint, token text, why text);
create table relimited (consumer_id int);  -- another per_key_limit; what was assigned before stays
create table redriven (consumer_id int, seq bigint);
create table latest (consumer_id int primary key, always boolean);  -- had per_key_latest at some time, or at all times

create function otherwise(p_what text) returns void language plpgsql as $$
begin
    raise exception 'crossing: %', p_what using errcode = 'CX001';
end $$;

-- Whether a message is stored. (The statement is planned each time: a plan that Postgres keeps may lack a segment, see
-- log/segments.sql.)
create function stores(p_stream_id int, p_seq bigint, p_token text) returns boolean language plpgsql as $$
declare
    v_stored boolean;
begin
    execute 'select exists (select from pgqueue.messages where stream_id = $1 and seq = $2 and data = $3)'
    into v_stored using p_stream_id, p_seq, p_token;
    return v_stored;
end $$;

create function send(p_stream text, p_token text, p_producer int, p_n bigint, p_key text, p_num int, p_options jsonb)
returns bigint language plpgsql as $$
declare
    v_names  text[] := array(select jsonb_array_elements_text(p_options -> 'consumers'));
    v_before int[];
    v_after  int[];
    v_stream int;
    v_seq    bigint;
begin
    v_before := array(select (pgqueue.open_consumer(p_stream, name)).consumer_id from unnest(v_names) name);
    v_seq := pgqueue.send(p_stream, p_token, p_key, jsonb_build_object('n', p_num),
        coalesce((p_options ->> 'priority')::int, 0),
        clock_timestamp() + (p_options ->> 'delay')::interval,
        case when v_names <> '{}' then v_names end, null, p_options ->> 'dedup_key',
        clock_timestamp() + (p_options ->> 'expires')::interval);
    v_stream := (select stream_id from pgqueue.open_stream(p_stream));
    v_after := array(select (pgqueue.open_consumer(p_stream, name)).consumer_id from unnest(v_names) name);
    if v_before <> v_after then
        perform ledger.otherwise('a consumer was made anew meanwhile');
    elsif ledger.stores(v_stream, v_seq, p_token) then
        insert into ledger.sent (token, stream_id, seq, producer, n, key, num, consumers, dedup_key)
        values (p_token, v_stream, v_seq, p_producer, p_n, p_key, p_num,
                case when v_names <> '{}' then v_after end, p_options ->> 'dedup_key');
        return v_seq;
    else
        insert into ledger.duplicates values (p_token, v_stream, p_options ->> 'dedup_key');
        return null;
    end if;
end $$;

-- What a task of Spark's sink staged, and the sink publishes.
create function stage(p_sink text, p_batch bigint, p_stream text, p_tokens text[], p_keys text[], p_producer int,
                      p_n bigint)
returns bigint language plpgsql as $$
declare
    v_stream int := (select stream_id from pgqueue.open_stream(p_stream));
    v_seqs   int8multirange := pgqueue.reserve(v_stream, cardinality(p_tokens));
begin
    insert into pgqueue.messages (seq, stream_id, key, data, headers)
    select seq, v_stream, p_keys[i], p_tokens[i], '{"n": 0}'
    from (select seq, row_number() over (order by seq) as i
          from unnest(v_seqs) g, generate_series(lower(g), upper(g) - 1) seq) s order by seq;
    return pgqueue.stage(p_sink, p_batch, v_stream, v_seqs);
end $$;

create function publish_staged(p_sink text, p_batch bigint, p_stream text, p_chunk bigint, p_tokens text[],
                               p_keys text[], p_producer int, p_n bigint)
returns boolean language plpgsql as $$
declare
    v_stream int := (select stream_id from pgqueue.open_stream(p_stream));
begin
    if not pgqueue.publish_staged(p_sink, p_batch, v_stream, array[p_chunk], cardinality(p_tokens)) then
        return false;
    end if;
    execute 'insert into ledger.sent (token, stream_id, seq, producer, n, key, num) '
            'select data, $1, seq, $2, $3 + array_position($4, data), key, 0 '
            'from pgqueue.messages where stream_id = $1 and data = any ($4)'  -- planned each time, as above
    using v_stream, p_producer, p_n, p_tokens;
    return true;
end $$;

create function move(p_consumer_id int, p_stream_id int, p_how text, p_before pg_snapshot)
returns void language plpgsql as $$
begin
    insert into ledger.moved (consumer_id, how, before, after, published)
    values (p_consumer_id, p_how, p_before, pg_current_snapshot(),
            (select range_agg(seqs) from pgqueue.publications where stream_id = p_stream_id));
end $$;

create function make(p_stream text, p_name text, p_start text, p_ordering text, p_topic text, p_below int,
                     p_partitions int, p_settings jsonb)
returns int language plpgsql as $$
declare
    v_stream int := (select stream_id from pgqueue.open_stream(p_stream));
    v_before pg_snapshot := pg_current_snapshot();
    v_id     int;
begin
    if p_partitions is not null then
        v_id := pgqueue.create_group(p_stream, p_name, p_partitions, p_start);
    else
        v_id := pgqueue.create_consumer(p_stream, p_name, p_start, p_ordering, false, p_topic,
                                        case when p_below < 10 then format('$.headers.n < %s', p_below)::jsonpath end,
                                        p_settings);
    end if;
    insert into ledger.made values (v_id, v_stream, p_name, p_ordering, p_start, p_topic, p_below, p_partitions);
    insert into ledger.latest select v_id, true where p_settings @> '{"per_key_latest": true}';
    perform ledger.move(v_id, v_stream, 'made ' || p_start, v_before);
    return v_id;
end $$;

create function alter(p_stream text, p_name text, p_settings jsonb) returns void language plpgsql as $$
declare
    v_id int;
begin
    perform pgqueue.alter_consumer(p_stream, p_name, p_settings);
    v_id := (select consumer_id from pgqueue.open_consumer(p_stream, p_name));
    if p_settings ? 'per_key_limit' then
        insert into ledger.relimited values (v_id);
    end if;
    if p_settings ? 'per_key_latest' then
        insert into ledger.latest values (v_id, false) on conflict (consumer_id) do update set always = false;
    end if;
end $$;

-- seek, or replay of all.
create function move_to(p_stream text, p_name text, p_how text, p_to text) returns void language plpgsql as $$
declare
    v_before   pg_snapshot := pg_current_snapshot();
    v_consumer record;
begin
    perform case p_how when 'seek' then pgqueue.seek(p_stream, p_name, p_to)
                       else pgqueue.replay(p_stream, p_name, p_to) end;
    select * into v_consumer from pgqueue.open_consumer(p_stream, p_name);
    perform ledger.move(v_consumer.consumer_id, v_consumer.stream_id, p_how || ' ' || p_to, v_before);
end $$;

-- Acknowledges all that a claim holds, which the caller believes to be these; or some of it.
create function ack(p_consumer_id int, p_claim bigint, p_seqs bigint[], p_tokens text[], p_whole boolean)
returns bigint language plpgsql as $$
declare
    v_count bigint := pgqueue.ack(p_claim, case when not p_whole then p_seqs end, '{"ok": true}');
begin
    if v_count not in (0, cardinality(p_seqs)) then
        perform ledger.otherwise(format('%s of %s acknowledged', v_count, cardinality(p_seqs)));
    elsif v_count > 0 then
        insert into ledger.acked (consumer_id, claim_id, seq, token)
        select p_consumer_id, p_claim, s, t from unnest(p_seqs, p_tokens) u (s, t);
    end if;
    return v_count;
end $$;

-- Receives, and acknowledges the claim before.
create function receive(p_stream text, p_name text, p_max int, p_where jsonpath, p_ack_of int, p_ack bigint,
                        p_seqs bigint[], p_tokens text[])
returns table (consumer_id int, claim_id bigint, seq bigint, token text) language plpgsql as $$
declare
    v_id    int := (select c.consumer_id from pgqueue.open_consumer(p_stream, p_name) c);
    v_count bigint;
begin
    if p_ack is not null then
        v_count := pgqueue.extend(p_ack);  -- it has the claim's lock from here on
        if v_count not in (0, cardinality(p_seqs)) then
            perform ledger.otherwise('the claim has fewer');
        elsif v_count > 0 then
            insert into ledger.acked (consumer_id, claim_id, seq, token)
            select p_ack_of, p_ack, s, t from unnest(p_seqs, p_tokens) u (s, t);
        end if;
    end if;
    return query
        with r as (select x.*, row_number() over () as place
                   from pgqueue.receive(p_stream, p_name, p_max, p_ack => p_ack) x where p_where is null
                   union all
                   select x.*, row_number() over ()
                   from pgqueue.receive_where(p_stream, p_name, p_where, p_max, p_ack => p_ack) x
                   where p_where is not null),
             noted as (insert into ledger.delivered (consumer_id, claim_id, seq, token, place)
                       select v_id, r.claim_id, r.seq, r.data, r.place from r)
        select v_id, r.claim_id, r.seq, r.data from r order by r.place;
    if v_id <> (select c.consumer_id from pgqueue.open_consumer(p_stream, p_name) c) then
        perform ledger.otherwise('the consumer was made anew meanwhile');
    end if;
end $$;

-- A checkpoint moves on: what its last batch had is acknowledged.
create function reader_claim(p_reader uuid, p_consumer_id int, p_claim bigint, p_messages bigint, p_max bigint,
                             p_seqs bigint[], p_tokens text[])
returns table (claim_id bigint, messages bigint, lost bigint) language plpgsql as $$
begin
    return query select r.claim_id, r.messages, r.lost
                 from pgqueue.reader_claim(p_reader, p_consumer_id, p_claim, p_messages, p_max) r;
    insert into ledger.acked (consumer_id, claim_id, seq, token)
    select p_consumer_id, p_claim, s, t from unnest(p_seqs, p_tokens) u (s, t)
    where not exists (select from ledger.acked a
                      where (a.consumer_id, a.claim_id, a.seq) = (p_consumer_id, p_claim, s));
end $$;

create function commit_offset(p_consumer_id int, p_lease bigint, p_offset bigint[], p_seqs bigint[], p_tokens text[])
returns void language plpgsql as $$
begin
    perform pgqueue.commit_offset(p_lease, p_offset);
    insert into ledger.acked (consumer_id, claim_id, seq, token)
    select p_consumer_id, p_lease, s, t from unnest(p_seqs, p_tokens) u (s, t);
end $$;

-- An operator's call about messages that it names: cancel, purge_dead or redrive.
create function operate(p_how text, p_stream text, p_name text, p_seqs bigint[], p_tokens text[])
returns bigint language plpgsql as $$
declare
    v_id    int := (select consumer_id from pgqueue.open_consumer(p_stream, p_name));
    v_count bigint;
begin
    v_count := case p_how when 'cancel' then pgqueue.cancel(p_stream, p_name, p_seqs)
                          when 'purge_dead' then pgqueue.purge_dead(p_stream, p_name, p_seqs)
                          else pgqueue.redrive(p_stream, p_name, p_seqs) end;
    if p_how = 'redrive' then
        insert into ledger.redriven select v_id, s from unnest(p_seqs) s;
    elsif v_count not in (0, cardinality(p_seqs)) then
        perform ledger.otherwise('some of them only');
    elsif v_count > 0 then
        insert into ledger.gone select v_id, s, t, p_how from unnest(p_seqs, p_tokens) u (s, t);
    end if;
    if v_id <> (select consumer_id from pgqueue.open_consumer(p_stream, p_name)) then
        perform ledger.otherwise('the consumer was made anew meanwhile');
    end if;
    return v_count;
end $$;
create index on acked (consumer_id, claim_id, seq);
reset search_path;
