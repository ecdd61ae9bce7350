-- What was trimmed of a stream.

-- Notes publications and messages that were trimmed.
create or replace function _pgqueue.note_trim(p_stream_id int, p_publications int8multirange, p_seqs int8multirange,
                                              p_count bigint) returns void
language sql
as $$
    insert into pgqueue.trims as t (stream_id, publication_ids, seqs, message_count, trimmed_at)
    values (p_stream_id, p_publications, p_seqs, p_count, clock_timestamp())
    on conflict (stream_id) do update
    set publication_ids = t.publication_ids + excluded.publication_ids, seqs = t.seqs + excluded.seqs,
        message_count = t.message_count + excluded.message_count, trimmed_at = excluded.trimmed_at
$$;

-- The publication ids and the messages that were trimmed from a stream; both sets are empty when nothing was. A
-- publication that is neither visible nor in this set was rolled back, or is not committed yet.
create or replace function _pgqueue.trimmed(p_stream_id int, out o_publications int8multirange,
                                            out o_seqs int8multirange)
language plpgsql stable
as $$
begin
    select publication_ids, seqs into o_publications, o_seqs from pgqueue.trims where stream_id = p_stream_id;
    o_publications := coalesce(o_publications, '{}');
    o_seqs := coalesce(o_seqs, '{}');
end $$;
