-- The batches of a sink: each is applied once, by the role that owns the sink.

-- The numbers that tasks reserved for their messages, and that are not published yet: one row per chunk, until all of
-- it is published, or deleted by maintain(). A sink publishes or deletes only such messages.
-- on clear_stream
create table if not exists pgqueue.reservations (
    reservation_id bigint         generated always as identity primary key,
    stream_id      int            not null,
    xid            xid8           not null,  -- the transaction that reserved them: only it can stage them
    seqs           int8multirange not null,
    reserved_at    timestamptz    not null default clock_timestamp()
);

-- The messages that were written and are not published yet.
-- on clear_stream
create table if not exists pgqueue.staged_chunks (
    staged_id     bigint         generated always as identity primary key,
    stream_id     int            not null,
    sink          text           not null,
    batch         bigint         not null,
    priority      int            not null,
    deliver_at    timestamptz,
    seqs          int8multirange not null,
    message_count bigint         not null,
    staged_at     timestamptz    not null default clock_timestamp(),
    staged_by     text           not null default session_user,
    reservation_id bigint        not null,
    -- one per number of seqs, in their order, null for a message without a key; null: no message has a key
    dedup_keys    text[],
    consumers     int[],                     -- null: all
    expires_at    timestamptz,
    routed        boolean        not null default false,  -- its batch may have several streams
    digest        numeric,                   -- of a query: a sum over its messages, independent of their order
    write_no      bigint                     -- of begin_write(); null: not given
);
create sequence if not exists pgqueue.write_numbers;

-- The batches that were published.
-- on clear_stream
create table if not exists pgqueue.sink_batches (
    sink          text        not null,
    stream_id     int         not null,      -- 0: several, by a column
    consumer_id   int         not null,      -- 0: published; else applied actions (spark/actions.sql), ...
    revived       boolean     not null,      -- ... which settled messages of this consumer, or revived them
    batch         bigint      not null,
    message_count bigint      not null,
    digest        numeric,                   -- of these messages; null: not known
    published_at  timestamptz not null default clock_timestamp(),
    done_by       text        not null default session_user,  -- the owner of the sink
    target        text        not null default '',  -- the table that its rows were written to, as SQL; '': messages
    query_id      text,  -- of a batch write: the query that made it in foreachBatch; null: not known
    primary key (sink, stream_id, consumer_id, revived, batch, target)
);

-- The streams to which queries write. Unlike the batches of a stream, these rows remain when it is dropped, so that a
-- query detects another stream with the same name.
create table if not exists pgqueue.sink_streams (
    sink      text not null,
    name      text not null,
    stream_id int  not null,
    noted_at  timestamptz not null default clock_timestamp(),
    primary key (sink, name)
);

-- Whether a sink is a query, which publishes a batch once; a batch write publishes once to each stream.
create or replace function _pgqueue.is_query(p_sink text) returns boolean
language sql immutable as $$ select p_sink not like 'txn:%' and p_sink not like 'write:%' $$;

-- Raises 42501 unless the caller may use a sink: else a role could publish batches in the name of another role's query,
-- whose own batches of those numbers would then count as repetitions, and be dropped. A sink belongs to the role
-- (session_user) of its last batch. Others that may use it: members of that role; members of a role without login that
-- both are in (so a role can have a successor); and the owner of the schema. If the role was dropped, the sink belongs
-- to the next role that uses it. Publishing, writing tables and each kind of action (spark/actions.sql) have separate
-- owners.
create or replace function _pgqueue.check_sink(p_sink text, p_published boolean, p_revived boolean,
                                               p_in_table boolean) returns void
language plpgsql stable as $$
declare
    v_owner text := (select done_by from pgqueue.sink_batches
                     where sink = p_sink and (consumer_id = 0) = p_published and revived = p_revived
                       and (target <> '') = p_in_table
                     order by published_at desc limit 1);
begin
    if v_owner <> session_user and exists (select from pg_roles where rolname = v_owner)
       and not pg_has_role(session_user, v_owner, 'member') and not pg_has_role(session_user, current_user, 'member')
       and not exists (select from pg_roles r
                       where not r.rolcanlogin and r.rolname <> all (_pgqueue.group_roles())
                         and r.rolname !~ '^pg_'
                         and pg_has_role(session_user, r.oid, 'member') and pg_has_role(v_owner, r.oid, 'member')
                         -- a superuser is a member of all
                         and not (select o.rolsuper from pg_roles o where o.rolname = v_owner))
    then
        raise exception 'sink % belongs to role %, but this session has role %', p_sink, v_owner, session_user
            using errcode = 'insufficient_privilege',
                  hint = format('Use another name (txnAppId) or a new checkpoint, or ask an administrator to make the '
                                'role a member of that one: grant %I to %I', v_owner, session_user);
    end if;
end $$;

-- As is_published, without the check of the caller. A query's batch without messages is not done: it may be repeated
-- with some (is_repeat()), whose chunks must not be deleted meanwhile.
create or replace function _pgqueue.is_done(p_sink text, p_stream_id int, p_batch bigint, p_target text default '')
returns boolean language sql stable as $$
    select exists (select from pgqueue.sink_batches
                   where sink = p_sink and batch >= p_batch and consumer_id = 0 and (target <> '') = (p_target <> '')
                     and (batch > p_batch or message_count > 0 or not _pgqueue.is_query(p_sink))
                     and ((stream_id = coalesce(p_stream_id, 0) and target = p_target) or _pgqueue.is_query(p_sink)))
$$;

-- Whether a batch write, or a later one, was made, and is repeated.
--   p_new  the part of it, as begin_batch would store it
-- Errors: PQ010 if another query made it. A query with a new checkpoint counts its batches from 0 again: to take these
-- for repetitions would lose them.
create or replace function _pgqueue.is_write_repeated(p_new pgqueue.sink_batches) returns boolean
language plpgsql stable as $$
declare
    v_last pgqueue.sink_batches;
begin
    select * into v_last from pgqueue.sink_batches
    where (sink, stream_id, target, consumer_id, revived)
          = (p_new.sink, p_new.stream_id, p_new.target, p_new.consumer_id, p_new.revived)
      and batch >= p_new.batch
    order by batch limit 1;
    if v_last.query_id <> p_new.query_id then
        raise exception 'version % of % was published by query %, and this is query %', v_last.batch, p_new.sink,
                        v_last.query_id, p_new.query_id
            using errcode = 'PQ010',
                  hint = 'A query with a new checkpoint counts its batches from 0 again, and needs another txnAppId. '
                         'Nothing was published.';
    end if;
    return v_last.sink is not null;
end $$;

-- The query whose batch write this transaction makes; null: not known.
create or replace function _pgqueue.writing_query() returns text
language sql stable as $$ select nullif(current_setting('pgqueue.writing_query', true), '') $$;

-- Names the query whose batch write the current transaction makes in foreachBatch. Then the calls that write it raise
-- PQ010 if another query has made this write.
create or replace function pgqueue.begin_write_of(p_query_id text) returns void
language sql as $$ select set_config('pgqueue.writing_query', coalesce(p_query_id, ''), true) $$;

-- Returns whether a batch of a sink, or a later one, was published.
-- A query's batch counts once it has messages: until then a repetition may have some.
--   p_stream_id  to this stream; null: to several
--   p_target     written to this table, with the name of open_table, and not to a stream
--   p_query_id   the query whose batch write it is; null: not known
-- Errors: 42501 for the sink of another role; PQ010 if another query has made this batch write.
create or replace function pgqueue.is_published(p_sink text, p_stream_id int, p_batch bigint, p_target text default '',
                                                p_query_id text default null)
returns boolean language plpgsql stable as $$
begin
    perform _pgqueue.check_sink(p_sink, true, false, p_target <> '');
    if not _pgqueue.is_query(p_sink) then
        return _pgqueue.is_write_repeated(row(p_sink, coalesce(p_stream_id, 0), 0, false, p_batch, null, null, null,
                                              null, p_target, p_query_id));
    end if;
    return _pgqueue.is_done(p_sink, p_stream_id, p_batch, p_target);
end $$;

-- The target of a batch, for error messages.
create or replace function _pgqueue.target_name(p_batch pgqueue.sink_batches) returns text
language sql stable as $$
    select case when p_batch.target <> '' then 'table ' || p_batch.target
                when p_batch.stream_id = 0 then 'the streams of column stream'
                else 'stream ' || (select _pgqueue.error_name(_pgqueue.stream_of(s.stream_id)) from pgqueue.streams s
                                   where s.stream_id = p_batch.stream_id) end
$$;

-- Raises PQ010 if batches of a query are lost that it published to streams before this one: it publishes every batch,
-- also one without messages, but a restored database lacks the last ones. Without recover() since then, none are lost.
-- Version 0.1 left out batches without messages: so a batch after one that it published is not checked.
create or replace function _pgqueue.check_follows(p_new pgqueue.sink_batches) returns void
language plpgsql stable as $$
declare
    v_last pgqueue.sink_batches;
begin
    select * into v_last from pgqueue.sink_batches
    where sink = p_new.sink and consumer_id = 0 and target = '' order by batch desc limit 1;
    if p_new.consumer_id = 0 and p_new.target = '' and p_new.batch > v_last.batch + 1
       and exists (select from pgqueue.servers where noted_at > v_last.published_at
                   and server_no > (select min(server_no) from pgqueue.servers))
       and v_last.published_at > (select min(installed_at) from pgqueue.installed where version >= 3) then
        raise exception 'batch % of query % does not follow its batch %: the database lacks those in between',
                        p_new.batch, p_new.sink, v_last.batch
            using errcode = 'PQ010',
                  hint = 'It was restored to an earlier state, or a standby that lacked the last commits was promoted. '
                         'Start with a new checkpoint: all that it reads again is published again. If it reads a '
                         'consumer, replay() delivers again what that has acknowledged since.';
    end if;
end $$;

-- Whether a part of a sink's batch was applied before, and is repeated. A batch write with a txnAppId may repeat any
-- batch. Spark repeats only the last batch of a query, with the same rows to the same streams: any other repetition is
-- from a checkpoint that was restored or copied. A batch without messages is always a repetition, or new.
--   p_new  the part, as begin_batch would store it
-- Errors: PQ010 for any other repetition of a query, and as check_follows().
create or replace function _pgqueue.is_repeat(p_new pgqueue.sink_batches) returns boolean
language plpgsql as $$
declare
    v_same boolean;
    v_last pgqueue.sink_batches;
begin
    if not _pgqueue.is_query(p_new.sink) then
        return _pgqueue.is_write_repeated(p_new);
    end if;
    select b.* into v_last from pgqueue.sink_batches b
    where b.sink = p_new.sink and (b.consumer_id = 0) = (p_new.consumer_id = 0) and b.revived = p_new.revived
      and (b.target <> '') = (p_new.target <> '')
    order by b.batch desc, b.stream_id = p_new.stream_id and b.consumer_id = p_new.consumer_id desc limit 1;
    -- a batch without messages has no stream of its own
    v_same := v_last.message_count = 0 or (v_last.stream_id = p_new.stream_id and v_last.target = p_new.target);
    if v_last.sink is null or v_last.batch < p_new.batch
       -- actions on another consumer
       or (v_last.batch = p_new.batch and v_last.consumer_id <> p_new.consumer_id) then
        perform _pgqueue.check_follows(p_new);
        return false;
    elsif p_new.message_count = 0 then
        return true;
    elsif v_last.batch = p_new.batch and v_last.message_count = 0 then  -- nothing of it was published
        delete from pgqueue.sink_batches
        where (sink, stream_id, consumer_id, revived, batch, target)
              = (v_last.sink, v_last.stream_id, v_last.consumer_id, v_last.revived, v_last.batch, v_last.target);
        return false;
    elsif v_same and v_last.batch = p_new.batch and v_last.message_count = p_new.message_count
          and (v_last.digest = p_new.digest) is not false then
        return true;
    end if;
    raise exception 'batch % of query % %', p_new.batch, p_new.sink,
        case when v_last.batch > p_new.batch then format('comes after its batch %s was published', v_last.batch)
             when not v_same then 'was published before'
             when v_last.message_count = p_new.message_count
                 then 'was published with other messages than it has now'
             else format('was published with %s, and has %s now', _pgqueue.counted(
                         v_last.message_count, case p_new.target when '' then 'message' else 'row' end),
                         p_new.message_count) end
        || case when v_same then ''
                else format(': that was to %s, and this is to %s', _pgqueue.target_name(v_last),
                            _pgqueue.target_name(p_new)) end
        using errcode = 'PQ010', hint = case
            when not v_same
                then 'A copied checkpoint has the same query id: make the copy with pgqueue checkpoint PATH --fork '
                     'NEWPATH, which assigns another one. If you changed the stream of the query, start it once with '
                     'the old one, which finishes this batch.'
            when v_last.batch > p_new.batch
                then 'Its checkpoint was restored to an earlier state, or is a copy. Use the latest one; or start '
                     'with a new checkpoint: all that it reads again is published again.'
            else 'Its checkpoint was restored to an earlier state; or the query is not deterministic, '
                 'or was changed. Start with a new checkpoint: all that it reads again is published again.'
                 || case when v_last.message_count = p_new.message_count
                         then ' If its rows have a random part, and this is the same batch, start it with option '
                              'compareRepeats = count.' else '' end end;
end $$;

-- Begins a part of a sink's batch, once; for errors see is_repeat(). Returns false if it was applied before. Locks: the
-- part, against another session that begins it.
create or replace function _pgqueue.begin_batch(p_new pgqueue.sink_batches) returns boolean
language plpgsql as $$
begin
    perform _pgqueue.check_sink(p_new.sink, p_new.consumer_id = 0, p_new.revived, p_new.target <> '');
    if _pgqueue.is_repeat(p_new) then
        return false;
    end if;
    perform _pgqueue.commit_durably();
    -- if the row exists, another session has committed the part in the meantime
    return case when _pgqueue.await(
        format('batch %s of sink %s', p_new.batch, p_new.sink),
        'insert into pgqueue.sink_batches '
        '(sink, stream_id, consumer_id, revived, batch, message_count, digest, target, query_id) '
        'select n.sink, n.stream_id, n.consumer_id, n.revived, n.batch, n.message_count, n.digest, n.target, '
        'n.query_id '
        'from jsonb_populate_record(null::pgqueue.sink_batches, $2) n '
        'on conflict do nothing returning 1',  -- lock: batch
        null, to_jsonb(p_new)) = '1' then true else _pgqueue.begin_batch(p_new) end;
end $$;
