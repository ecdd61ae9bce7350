-- Returning messages of a claim that goes by key, so that the order of each key stays as it was.

-- Puts messages of a claim by key back: of each key the first message that failed, and all that follow it in the claim.
-- They go back to where their claim had them from. Messages that the claim had from the line go into the line. Messages
-- of a piece are set aside, to wait for the messages of their key that the claim still has.
--   p_set      the messages that failed
--   p_failure  the consequences for them, see failure()
-- Returns the places of the messages that are back in the line.
-- (More than 60 lines: one statement judges the messages of all keys.)
create or replace function _pgqueue.return_by_key(p_consumer pgqueue.consumers, p_claim pgqueue.claims,
                                                  p_set int8multirange, p_failure pgqueue.failure)
returns pgqueue.line_place[]
language plpgsql
as $$
declare
    v_keyed  pgqueue.keyed_messages := _pgqueue.by_key(p_consumer, array(
        select m from pgqueue.consumer_messages m
        where claim_id = p_claim.claim_id and state = 'claimed' and (lane = 1 or seqs && p_set)));
    v_places pgqueue.line_place[];
    v_gone   int8multirange;
begin
    with run as materialized (
        select k.key, k.seqs, r.lane, r.arrival_no, r.priority, r.deliver_count, r.note
        from unnest(v_keyed.run_nos, v_keyed.keys, v_keyed.seqs) k (run_no, key, seqs)
        cross join lateral (select (v_keyed.runs[k.run_no]).*) r
    ), element as (
        select r.key, r.lane, r.arrival_no, r.priority, r.deliver_count, r.note, s as seq, p_set @> s as failed,
               p_set @> s and _pgqueue.is_hopeless(
                   p_consumer, _pgqueue.counted_deliveries(r.deliver_count, r.note), p_failure) as dead
        from run r cross join lateral unnest(r.seqs) g cross join lateral generate_series(lower(g), upper(g) - 1) s
        where r.key in (select key from run where seqs && p_set) or (r.key is null and r.seqs && p_set)
    ), judged as (
        select *, case when key is null then failed
                       else bool_or(failed and not dead) over (partition by key order by arrival_no, seq) end
                  and not dead as back
        from element
    ), gone as materialized (
        select key, lane, arrival_no, priority, note, seq, failed, dead,
               deliver_count - (not (failed and p_failure.counted))::int as deliver_count
        from judged where back or dead
    ), dead_lettered as (
        insert into pgqueue.dead_messages (stream_id, consumer_id, seqs, message_count, priority, deliver_count, reason,
                                           claim_id, note, owner)
        select p_consumer.stream_id, p_consumer.consumer_id, range_agg(int8range(seq, seq, '[]')), count(*), priority,
               deliver_count,
               'max deliveries', p_claim.claim_id, _pgqueue.noted(note, p_failure.note), p_claim.owner
        from gone where dead group by priority, deliver_count, note
    ), back as (
        insert into pgqueue.consumer_messages (consumer_id, state, lane, priority, deliver_count, arrival_no, line_no,
                                               first_seq, message_count, seqs, key, not_visible_until, note)
        select p_consumer.consumer_id, case when i.waits then 'waiting' else 'ready' end,
               case when i.waits then 0 else 1 end,
               i.priority, i.deliver_count, i.arrival_no, i.arrival_no, c.first_seq, c.message_count, c.seqs,
               case when i.waits then i.key end,
               case when i.failed then _pgqueue.delayed_until(
                   p_consumer, _pgqueue.counted_deliveries(i.deliver_count, i.note), p_failure) end,
               case when i.failed then _pgqueue.noted(i.note, p_failure.note) else i.note end
        from (select key, lane = 0 and key is not null as waits, arrival_no, priority, deliver_count, failed, note,
                     island,
                     range_agg(int8range(seq, seq, '[]')) as seqs
              from (select *, row_number() over (partition by key order by arrival_no, seq)
                              - row_number() over (partition by key, arrival_no, priority, deliver_count, failed, note
                                                   order by seq) as island
                    from gone where not dead) e
              group by key, lane, arrival_no, priority, deliver_count, failed, note, island) i
        cross join lateral _pgqueue.split_set(i.seqs) c
        returning state, lane, line_no, first_seq
    )
    select array(select (lane, line_no, first_seq)::pgqueue.line_place from back where state = 'ready'),
           (select range_agg(int8range(seq, seq, '[]')) from gone)
    into v_places, v_gone;

    perform _pgqueue.take_out(p_claim.claim_id, v_gone) where v_gone is not null;
    if p_consumer.notify_done then
        perform pg_notify(_pgqueue.done_channel(p_consumer.consumer_id), '');
    end if;
    return v_places;
end $$;
