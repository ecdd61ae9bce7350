-- The trimmed publications and messages of a stream.

-- What was trimmed: this distinguishes a trimmed publication from one that was rolled back, or lost.
-- on drop_stream
create table if not exists pgqueue.trims (
    stream_id       int            primary key,
    publication_ids int8multirange not null,
    seqs            int8multirange not null,
    message_count   bigint         not null,
    trimmed_at      timestamptz    not null,
    archive_ids     int8multirange not null default '{}',  -- of publication_ids, those in the archive, or dead
    -- of publication_ids, those for named consumers only, or dead; only the last limit_hidden() ranges
    hidden_ids      int8multirange not null default '{}'
);

-- Records publications and messages that were trimmed.
--   p_archived  of the publications, those that are in the archive
--   p_hidden    of the publications, those that readers without a consumer do not read
create or replace function _pgqueue.record_trim(p_stream_id int, p_publications int8multirange, p_seqs int8multirange,
                                                p_count bigint, p_archived int8multirange default '{}',
                                                p_hidden int8multirange default '{}') returns void
language sql as $$
    insert into pgqueue.trims as t (stream_id, publication_ids, seqs, message_count, trimmed_at, archive_ids,
                                    hidden_ids)
    values (p_stream_id, p_publications, p_seqs, p_count, clock_timestamp(), p_archived,
            _pgqueue.last_ranges(p_hidden, _pgqueue.limit_hidden()))
    on conflict (stream_id) do update
    set publication_ids = t.publication_ids + excluded.publication_ids, seqs = t.seqs + excluded.seqs,
        message_count = t.message_count + excluded.message_count, trimmed_at = excluded.trimmed_at,
        archive_ids = t.archive_ids + (excluded.archive_ids - t.publication_ids),  -- a lost one stays lost
        hidden_ids = _pgqueue.last_ranges(t.hidden_ids + (excluded.hidden_ids - t.publication_ids),
                                          _pgqueue.limit_hidden())
$$;

-- The publication ids and the messages that were trimmed from a stream, and the ids of the publications in the archive;
-- empty sets: nothing was trimmed. A publication that is neither visible nor trimmed was rolled back, or is not
-- committed yet.
--   p_archive  whether the caller also reads the archive: then publications in it do not count as trimmed
create or replace function _pgqueue.trimmed(p_stream_id int, p_archive boolean default false,
                                            out o_publications int8multirange, out o_seqs int8multirange,
                                            out o_archive int8multirange)
language plpgsql stable as $$
begin
    select coalesce(publication_ids - case when p_archive then archive_ids else '{}' end, '{}'), coalesce(seqs, '{}'),
           coalesce(archive_ids, '{}')
    into o_publications, o_seqs, o_archive
    from (select) one left join pgqueue.trims on stream_id = p_stream_id;
end $$;

-- Trimmed publications of a stream that readers without a consumer do not miss: they never read them. Of many ranges,
-- only the last ones are known.
create or replace function _pgqueue.trimmed_hidden(p_stream_id int) returns int8multirange
language sql stable as $$
    select coalesce((select hidden_ids from pgqueue.trims where stream_id = p_stream_id), '{}')
$$;

-- The last publication of a stream that is visible, in Postgres or in the archive, or was trimmed; 0: none.
create or replace function pgqueue.last_publication(p_stream_id int) returns bigint
language sql stable as $$
    select greatest((select publication_id from pgqueue.publications where stream_id = p_stream_id
                     order by publication_id desc limit 1),
                    upper((_pgqueue.trimmed(p_stream_id)).o_publications) - 1, 0)
$$;
