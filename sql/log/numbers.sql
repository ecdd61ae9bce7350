-- Numbers: rows store the numbers that sequences assign, so a sequence must be ahead of all rows. Logical replication
-- copies rows without sequences, and so may a restore of some tables, or of data alone. A number that is assigned again
-- causes an error at best. At worst, messages are silently lost: a publication with a number that all consumers have
-- passed is never delivered.
--
--   * number_holders() and numbers() return the highest number that rows store, for all sequences. recover() advances
--     the sequences that are behind, and numbers_behind() lists them, for doctor.
--   * The sequences of a stream start with negative numbers until they are set. So in a copy that has the tables and no
--     values of sequences, each number is negative, and publish() rejects it: this costs a send one comparison. It
--     compares with the last number that maintain() recorded (publications_from), so an older value of the sequence is
--     rejected too, even if no row has the number, because it was trimmed or rolled back. Of later numbers, the primary
--     key finds those that a publication has. Those of rollbacks are published, and the next claims of their consumers
--     that find nothing fail (has_new).
--   * Rare calls that rely on the last number check it themselves: create_stream, create_consumer, a consumer's read
--     beyond its cursor (has_new) or of all its rows (rebuild_hints), claims of readers, maintain(). The list omits
--     reserved_... and backlog_..., whose values are in no row, the secret of claims, which is not a number, and
--     maintain_turns, of which only the next value matters.

-- The columns that store numbers, except identities of tables, which numbers() finds in the catalogue.
--   numbers  the sequence; %s: the id of a stream
--   quick    whether the query reads a few rows of an index
--   query    returns the highest number, or null; %1$s: the id of the stream
create or replace function _pgqueue.number_holders() returns table (numbers text, quick boolean, query text)
language sql immutable as $$
    select h.numbers, h.quick,
           'select ' || h.query || case h.rows_of
               when 'stream' then ' where stream_id = %1$s'
               when 'consumers' then ' where consumer_id in (select consumer_id from pgqueue.consumers '
                                     'where stream_id = %1$s)'
               else '' end
    from (values
        ('seq_%s', true, null, '0'),
        -- (the owner may write a number that was not assigned: one that is far away does not count)
        ('seq_%s', false, null, 'max(seq) from pgqueue.messages_%1$s where seq < 1125899906842624'),
        ('seq_%s', true, 'stream', 'upper(seqs) - 1 from pgqueue.trims'),
        ('seq_%s', true, 'stream', 'max(hi) filter (where closed_at is not null) - 1 from pgqueue.segments'),
        ('seq_%s', false, 'stream', 'max(upper(seqs)) - 1 from pgqueue.publications'),
        ('seq_%s', false, 'stream', 'max(upper(seqs)) - 1 from pgqueue.reservations'),
        ('seq_%s', false, 'stream', 'max(upper(seqs)) - 1 from pgqueue.staged_chunks'),
        ('seq_%s', false, 'consumers', 'max(upper(seqs)) - 1 from pgqueue.dead_messages'),
        ('seq_%s', false, 'consumers', 'max(upper(seqs)) - 1 from pgqueue.consumer_messages'),
        ('seq_%s', false, 'consumers', 'max(upper(seqs)) - 1 from pgqueue.completed_messages'),
        ('seq_%s', false, 'consumers', 'max(upper(seqs)) - 1 from pgqueue.reader_claims'),
        ('seq_%s', false, 'consumers', 'max(upper(seqs)) - 1 from pgqueue.skips'),
        ('seq_%s', false, 'consumers', 'max(seq) from pgqueue.newest_of_keys'),
        ('seq_%s', false, 'consumers', 'max(seq) from pgqueue.key_backlog'),
        ('seq_%s', false, 'consumers', 'max(seq) from pgqueue.group_partitions'),
        ('seq_%s', false, 'stream', 'max(seq) from pgqueue.dedup_keys'),
        ('publication_%s', true, null, '0'),
        ('publication_%s', true, 'stream', 'max(publication_id) from pgqueue.publications'),
        ('publication_%s', true, 'stream', 'upper(publication_ids) - 1 from pgqueue.trims'),
        ('publication_%s', true, 'consumers', 'max(next_publication) - 1 from pgqueue.consumer_cursors'),
        ('publication_%s', true, 'stream', 'publications_from - 1 from pgqueue.streams'),
        ('publication_%s', true, 'stream', 'greatest(below, next_below) - 1 from pgqueue.resolved'),
        ('publication_%s', true, 'stream', 'trim_from - 1 from pgqueue.retention'),
        ('publication_%s', true, 'stream', 'max(greatest(closed_publication, last_publication)) from pgqueue.segments'),
        ('publication_%s', true, 'stream', 'max(last_publication) from pgqueue.incarnations'),
        ('publication_%s', false, 'consumers', 'max(upper(publication_ids)) - 1 from pgqueue.consumer_gaps'),
        ('publication_%s', false, 'consumers', 'max(publication_id) from pgqueue.taken_ahead'),
        ('publication_%s', false, 'consumers', 'max(publication_id) from pgqueue.key_backlog'),
        -- claims of readers; the ids of other claims are the last bits of a number, and random bits
        ('claim_numbers', false, null, 'greatest(max(claim_id) >> 24, max(head)) from pgqueue.reader_claims'),
        ('claim_numbers', false, null, 'max(greatest(acked_claim, last_claim, planned_to)) >> 24 from pgqueue.readers'),
        ('claim_numbers', false, null, 'max(greatest(bundle_no, predecessor, head)) from pgqueue.consumer_messages'),
        ('gap_numbers', false, null, 'max(gap_no) from pgqueue.consumer_gaps'),
        ('gap_numbers', false, null, 'max(g) from pgqueue.consumer_cursors cross join lateral unnest(gaps) g'),
        ('write_numbers', false, null, 'max(write_no) from pgqueue.staged_chunks'),
        -- ids of consumers in other tables, even of dropped ones
        ('consumers_consumer_id_seq', false, null, 'max(c) from pgqueue.publications cross join unnest(consumers) c'),
        ('consumers_consumer_id_seq', false, null, 'max(c) from pgqueue.staged_chunks cross join unnest(consumers) c'),
        ('streams_stream_id_seq', false, null, 'max(to_stream_id) from pgqueue.bindings')
    ) h (numbers, quick, rows_of, query)
    union all
    select * from _pgqueue.on_numbers()
$$;

-- The sequences, each with the number that it assigned last and the highest one that a row stores (null: no row does).
-- The number of an identity is in its table, and in each table that has a column of that name.
--   p_names  only these sequences, without the schema; null: all
--   p_quick  only columns whose highest number is found in a few rows of an index
create or replace function _pgqueue.numbers(p_names text[] default null, p_quick boolean default false)
returns table (sequence regclass, last_number bigint, highest bigint)
language plpgsql stable as $$
declare
    v_one record;
begin
    for v_one in
        with sequences as (
            select c.oid, regexp_replace(c.relname, '_[0-9]+$', '_%s') as numbers,
                   substring(c.relname from '_([0-9]+)$') as stream_id
            from pg_class c
            where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'S'
              and (p_names is null or c.relname = any (p_names))
        ), holder as (
            select s.oid, h.quick, format(h.query, s.stream_id) as query
            from sequences s
            join _pgqueue.number_holders() h using (numbers)
            union all
            select s.oid, t.oid = d.refobjid, format('select max(%I) from pgqueue.%I', i.attname, t.relname)
            from sequences s
            join pg_depend d on d.classid = 'pg_class'::regclass and d.objid = s.oid
                            and d.refclassid = 'pg_class'::regclass and d.deptype = 'i'
            join pg_attribute i on i.attrelid = d.refobjid and i.attnum = d.refobjsubid
            join pg_class t on t.relnamespace = 'pgqueue'::regnamespace and t.relkind = 'r' and not t.relispartition
                           and (t.oid = d.refobjid or not p_quick)
            join pg_attribute a on a.attrelid = t.oid and a.attname = i.attname
                               and a.atttypid in ('int'::regtype, 'bigint'::regtype) and a.attnum > 0
        )
        select s.oid::regclass as name, string_agg(format('select (%s)::bigint', h.query), ' union all ') as query
        from sequences s
        join holder h using (oid)
        where h.quick or not p_quick
        group by s.oid
        order by s.oid::regclass::text
    loop
        sequence := v_one.name;
        execute format('select last_value - (not is_called)::int, (select max(n) from (%s) h (n)) from %s',
                       v_one.query, v_one.name) into last_number, highest;
        return next;
    end loop;
end $$;

-- Raises PQ011: a sequence would assign numbers again.
--   p_what  what it numbers
create or replace function _pgqueue.refuse_behind(p_what text) returns void
language plpgsql as $$
begin
    raise exception 'the sequences of % are behind its rows: the database was restored or replicated without '
                    'their values', p_what
        using errcode = 'PQ011', hint = 'Stop producers and workers, and call recover(). Nothing was changed.';
end $$;

-- Raises PQ011 when one of these sequences is behind rows that are quick to find.
create or replace function _pgqueue.check_numbers(p_what text, p_names text[]) returns void
language plpgsql as $$
begin
    perform _pgqueue.refuse_behind(p_what)
    where exists (select from _pgqueue.numbers(p_names, true) where last_number < highest);
end $$;

-- The names of the sequences of a stream.
create or replace function _pgqueue.sequences_of(p_stream_id int) returns text[]
language sql immutable as $$ select array[format('seq_%s', p_stream_id), format('publication_%s', p_stream_id)] $$;

-- Advances the sequences that are behind their rows.
create or replace function _pgqueue.move_numbers() returns void
language sql as $$ select setval(sequence, highest) from _pgqueue.numbers() where last_number < highest $$;

-- The last publication id of a stream that was assigned; 0: none.
create or replace function _pgqueue.last_publication_id(p_stream_id int) returns bigint
language plpgsql stable as $$
begin
    return coalesce(pg_sequence_last_value(format('pgqueue.publication_%s', p_stream_id)::regclass), 0);
end $$;
