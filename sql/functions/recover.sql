-- After a restore, or the promotion of a standby that lacked commits: what was committed after that state is lost here, and the numbers that it had
-- are given out again, to other messages. All that the database itself keeps is of one state, and right. What others keep is not: the
-- offsets of those who read without claiming, and the checkpoints of Spark queries.
--
--   * An offset has the incarnation of its stream, a random number. recover() gives each stream a new one, and notes which was the last publication
--     of the old one. An offset of the old one is as good as ever if it has read nothing beyond that; else it is refused (PQ005).
--   * A checkpoint has the id of a claim, half of it random, of a reader that nobody else is. While it is ahead of what the database knows of that
--     reader, or names a claim that is not known, it is refused too (_check_reader in spark/source.sql): nothing has to be done for it.
--
-- Who forgets to call recover() is told by doctor (is_restored): the server, or its timeline, is another one than was noted.

-- The server and its timeline, which a standby's promotion and a restore change; nulls where nobody may ask.
create or replace function pgqueue._server(out system_identifier bigint, out timeline int)
language plpgsql stable
as $$
begin
    select s.system_identifier into system_identifier from pg_control_system() s;
    if pg_is_in_recovery() then
        select c.timeline_id into timeline from pg_control_checkpoint() c;
    else
        timeline := ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int;
    end if;
exception when insufficient_privilege or feature_not_supported then
    null;
end $$;

-- Whether this database is on another server, or another timeline of it, than when it was installed or recover() was called last. Locks nothing.
create or replace function pgqueue.is_restored() returns boolean
language plpgsql stable
as $$
declare
    v_noted pgqueue.servers;
    v_now   record := pgqueue._server();
begin
    select * into v_noted from pgqueue.servers order by server_no desc limit 1;
    return coalesce(v_noted.system_identifier <> v_now.system_identifier or v_noted.timeline <> v_now.timeline, false);
end $$;

-- Begins a new incarnation of each stream. To be called once after a restore or a promotion, before producers come back: what they publish before
-- counts as restored, and an offset that has read other publications with its numbers would skip it. Without need, it harms nobody.
-- Returns a row per stream: the last publication that counts as restored. Errors: PQ007; PQ011 on a standby; 55P03 when somebody publishes.
-- Locks: none that others wait for.
create or replace function pgqueue.recover() returns table (stream text, last_publication bigint)
language plpgsql
as $$
declare
    v_stream pgqueue.streams;
begin
    if pg_is_in_recovery() then
        raise exception 'this server is a standby' using errcode = 'PQ011', hint = 'Call recover() once it is promoted.';
    end if;
    perform pgqueue._check_isolation();  -- an old snapshot lacks publications that an offset has read
    select s.* into v_stream from pgqueue.streams s cross join lateral unnest(pgqueue._publishers(s.stream_id)) w where w not like '-1/%' limit 1;
    if found then  -- what is prepared was there before
        raise exception 'producers publish to stream % already', quote_literal(v_stream.name)
            using errcode = 'lock_not_available', hint = 'Stop producers, call recover(), and let them come back. Nothing was changed.';
    end if;
    for v_stream in select * from pgqueue.streams s order by s.stream_id for update loop
        stream := v_stream.name;
        last_publication := greatest(pgqueue.last_publication(v_stream.stream_id), upper((pgqueue._trimmed(v_stream.stream_id)).o_publications) - 1);
        insert into pgqueue.incarnations (incarnation, stream_id, last_publication)
        values (v_stream.incarnation, v_stream.stream_id, recover.last_publication);
        update pgqueue.streams s set incarnation = gen_random_uuid() where s.stream_id = v_stream.stream_id;
        return next;
    end loop;
    insert into pgqueue.servers (system_identifier, timeline) select s.system_identifier, s.timeline from pgqueue._server() s;
end $$;

-- The server is noted once, when it is installed: later, recover() does.
insert into pgqueue.servers (system_identifier, timeline)
select s.system_identifier, s.timeline from pgqueue._server() s where not exists (select from pgqueue.servers);
