-- The batches of a sink: each is done once, by the role that the sink belongs to.

-- The numbers that tasks took to write messages with, and that are not published yet: one row per chunk, until all of
-- it is published, or deleted by maintain(). A sink publishes or deletes only such messages.
-- on clear_stream
create table if not exists pgqueue.reservations (
    reservation_id bigint         generated always as identity primary key,
    stream_id      int            not null,
    xid            xid8           not null,  -- the transaction that took them: nobody else stages them
    seqs           int8multirange not null,
    reserved_at    timestamptz    not null default clock_timestamp()
);

-- The messages that were written and are not published yet; and the batches that were published.
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
    -- one per number of seqs in their order, null for a message without; null: no message has one
    dedup_keys    text[],
    consumers     int[],                     -- null: all
    expires_at    timestamptz,
    routed        boolean        not null default false,  -- its batch may have other streams too
    digest        numeric,                   -- of a query: a sum over its messages, whatever their order
    write_no      bigint                     -- of begin_write(); null: not given
);
create sequence if not exists pgqueue.write_numbers;

-- on clear_stream
create table if not exists pgqueue.sink_batches (
    sink          text        not null,
    stream_id     int         not null,      -- 0: several, by a column
    consumer_id   int         not null,      -- 0: what was published; else what actions did (spark/actions.sql): ...
    revived       boolean     not null,      -- ... they settled messages of this consumer, or revived them
    batch         bigint      not null,
    message_count bigint      not null,
    digest        numeric,                   -- of these messages; null: not known
    published_at  timestamptz not null default clock_timestamp(),
    done_by       text        not null default session_user,  -- a sink belongs to one role
    target        text        not null default '',  -- the table that its rows were written to, as SQL; '': messages
    primary key (sink, stream_id, consumer_id, revived, batch, target)
);

-- The streams to which queries write. Published batches are forgotten with a stream. This is not, so that a query
-- notices when another stream has the name of its own.
create table if not exists pgqueue.sink_streams (
    sink      text not null,
    name      text not null,
    stream_id int  not null,
    noted_at  timestamptz not null default clock_timestamp(),
    primary key (sink, name)
);

-- Whether a sink is a query, which publishes a batch once in all; a batch write publishes once to each stream.
create or replace function _pgqueue.is_query(p_sink text) returns boolean
language sql immutable as $$ select p_sink not like 'txn:%' and p_sink not like 'write:%' $$;

-- Raises 42501 unless a sink is the caller's: else a role could publish batches in the name of another role's query,
-- whose own batches of those numbers would then count as repetitions, and be dropped. A sink belongs to the role
-- (session_user) that did its last batch. Members of that role may use it too; members of another role that both are
-- in, which cannot log in (so a role may have its successor); and the owner of the schema. Where the role is gone, the
-- sink belongs to the next role that uses it. Publishing, writing tables and each kind of action (spark/actions.sql)
-- have a role of their own.
create or replace function _pgqueue.check_sink(p_sink text, p_published boolean, p_revived boolean,
                                               p_in_table boolean default false) returns void
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
        raise exception 'sink % is used by role %, and this session is of role %', p_sink, v_owner, session_user
            using errcode = 'insufficient_privilege',
                  hint = format('Take another name (txnAppId), or a new checkpoint; or let an administrator make the '
                                'role a member of that one: grant %I to %I', v_owner, session_user);
    end if;
end $$;

-- Whether a batch of a sink, or a later one, was published. For arguments see is_published.
create or replace function _pgqueue.is_done(p_sink text, p_stream_id int, p_batch bigint, p_target text default '')
returns boolean language sql stable as $$
    select exists (select from pgqueue.sink_batches
                   where sink = p_sink and batch >= p_batch and consumer_id = 0 and (target <> '') = (p_target <> '')
                     and ((stream_id = coalesce(p_stream_id, 0) and target = p_target) or _pgqueue.is_query(p_sink)))
$$;

-- Whether a batch of a sink, or a later one, was published.
--   p_stream_id  to this stream; null: to several
--   p_target     written to this table, as open_table names it, and not to a stream
-- Errors: 42501 for the sink of another role.
create or replace function pgqueue.is_published(p_sink text, p_stream_id int, p_batch bigint, p_target text default '')
returns boolean language plpgsql stable as $$
begin
    perform _pgqueue.check_sink(p_sink, true, false, p_target <> '');
    return _pgqueue.is_done(p_sink, p_stream_id, p_batch, p_target);
end $$;

-- Where a batch was published to, for people.
create or replace function _pgqueue.target_name(p_batch pgqueue.sink_batches) returns text
language sql stable as $$
    select case when p_batch.target <> '' then 'table ' || p_batch.target
                when p_batch.stream_id = 0 then 'the streams of column stream'
                else 'stream ' || (select _pgqueue.error_name(_pgqueue.stream_of(s.stream_id)) from pgqueue.streams s
                                   where s.stream_id = p_batch.stream_id) end
$$;

-- Whether a part of a sink's batch was done before, and is run again. A batch write with a txnAppId may repeat any
-- batch. Of a query Spark runs only the last batch again, with the same rows to the same streams: any other repetition
-- is another history of the query, from a checkpoint that was restored or copied.
--   p_new  the part, as begin_batch would note it
-- Errors: PQ010 for another history.
create or replace function _pgqueue.is_repeat(p_new pgqueue.sink_batches) returns boolean
language plpgsql as $$
declare
    v_same boolean;
    v_last pgqueue.sink_batches;
begin
    if not _pgqueue.is_query(p_new.sink) then
        return exists (select from pgqueue.sink_batches
                       where (sink, stream_id, target, consumer_id, revived)
                             = (p_new.sink, p_new.stream_id, p_new.target, p_new.consumer_id, p_new.revived)
                         and batch >= p_new.batch);
    end if;
    select b.* into v_last from pgqueue.sink_batches b
    where b.sink = p_new.sink and (b.consumer_id = 0) = (p_new.consumer_id = 0) and b.revived = p_new.revived
      and (b.target <> '') = (p_new.target <> '')
    order by b.batch desc, b.stream_id = p_new.stream_id and b.consumer_id = p_new.consumer_id desc limit 1;
    v_same := v_last.stream_id = p_new.stream_id and v_last.target = p_new.target;
    if v_last.sink is null or v_last.batch < p_new.batch
       -- its actions on another consumer
       or (v_last.batch = p_new.batch and v_last.consumer_id <> p_new.consumer_id) then
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
             else format('was published with %s %s, and has %s now', v_last.message_count,
                         case p_new.target when '' then 'messages' else 'rows' end, p_new.message_count) end
        || case when v_same then ''
                else format(': that was to %s, and this is to %s', _pgqueue.target_name(v_last),
                            _pgqueue.target_name(p_new)) end
        using errcode = 'PQ010', hint = case
            when not v_same
                then 'A copy of a checkpoint has its query id: make the copy with pgqueue checkpoint PATH --fork '
                     'NEWPATH, which gives it another. If you pointed the query to another stream, start it once with '
                     'the old one, which finishes this batch.'
            when v_last.batch > p_new.batch
                then 'Its checkpoint was restored to an earlier state, or is a copy. Use the latest one; or start '
                     'with a new checkpoint, and know that what it reads again is published again.'
            else 'Its checkpoint was restored to an earlier state; or the query gives other rows each time it is run, '
                 'or was changed. Start with a new checkpoint, and know that what it reads again is published again.'
                 || case when v_last.message_count = p_new.message_count
                         then ' If its rows have a random part, and this is the same batch, start it with option '
                              'compareRepeats = count.' else '' end end;
end $$;

-- Begins a part of a sink's batch that is done once; for errors see is_repeat(). Returns false when it was done before.
-- Locks: the part, against another session that begins it.
create or replace function _pgqueue.begin_batch(p_new pgqueue.sink_batches) returns boolean
language plpgsql as $$
begin
    perform _pgqueue.check_sink(p_new.sink, p_new.consumer_id = 0, p_new.revived, p_new.target <> '');
    if _pgqueue.is_repeat(p_new) then
        return false;
    end if;
    perform _pgqueue.commit_durably();
    -- where the insert finds a row, another session has committed the part meanwhile
    return case when _pgqueue.await(
        format('batch %s of sink %s', p_new.batch, p_new.sink),
        'with begun as (insert into pgqueue.sink_batches '
        '(sink, stream_id, consumer_id, revived, batch, message_count, digest, target) '
        'select n.sink, n.stream_id, n.consumer_id, n.revived, n.batch, n.message_count, n.digest, n.target '
        'from jsonb_populate_record(null::pgqueue.sink_batches, $2) n '
        'on conflict do nothing returning 1) select count(*) from begun',  -- lock: batch
        null, to_jsonb(p_new)) = '1' then true else _pgqueue.begin_batch(p_new) end;
end $$;
