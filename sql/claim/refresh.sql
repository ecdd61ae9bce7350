-- What a claim does before it claims anything: the work that is due, and new publications; and the ids of claims.

-- When it makes sense to claim again: when the next delayed message or the next schedule is due. For a claim that got
-- nothing also: when the next lease ends; when the consumer's limits leave room; or now, if the claim stopped because
-- it had looked at as many messages as one claim may: the next claim looks at the following ones. Null: when something
-- is published.
create or replace function _pgqueue.next_due(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                             p_got_nothing boolean)
returns timestamptz
language plpgsql
as $$
declare
    v_until timestamptz;
begin
    if _pgqueue.is_throttled(p_consumer) and p_got_nothing and not p_consumer.paused then
        v_until := _pgqueue.throttled_until(p_consumer, p_cursor);
        if v_until is not null then
            return v_until;
        end if;
    end if;
    return case when not p_consumer.paused then least(
        (select not_visible_until from pgqueue.consumer_messages
         where consumer_id = p_consumer.consumer_id and state = 'delayed' and not_visible_until >= p_cursor.due_from
         order by not_visible_until limit 1),
        p_cursor.tokens_from,
        -- a consumer that goes by key has messages in its line: the first is not visible yet, or no claim has looked at
        -- it
        (select coalesce(m.not_visible_until, clock_timestamp())
         from unnest(p_cursor.scan_from) f cross join lateral _pgqueue.next_ready(p_consumer.consumer_id, f) m
         where p_got_nothing and _pgqueue.is_keyed(p_consumer.way) and f.lane = 1 and m.run_ctid is not null
           and not exists (select from pgqueue.pieces
                           where consumer_id = p_consumer.consumer_id and place >= p_cursor.pieces_from
                             and keys is null)),
        case when p_got_nothing
            and ((p_cursor.take_was_cut
                  and (p_consumer.per_key_latest
                       or (_pgqueue.is_keyed(p_consumer.way) and p_consumer.ordering <> 'stream')))
                 or p_cursor.filter_from is not null)
             then clock_timestamp() end,
        case when p_consumer.scheduled then _pgqueue.on_due(p_consumer.stream_id) end,
        case when p_got_nothing then _pgqueue.next_expiry(p_cursor) end) end;
end $$;

-- A new id for a claim of a worker, or for a lease of a group's partition. Whoever has the id may settle the claim, so
-- 40 bits of it are a token that nobody guesses (base/slots.sql). The time is in the token, so an id that a crash gave
-- back is not given out again (synchronous_commit = off forgets the last numbers of a sequence). The last bit is 0: the
-- id is none of a slot. The other bits are a number that repeats after 1,048,576 claims. So claims of the same time
-- have different ids, which are near each other in the indexes.
create or replace function _pgqueue.new_claim_id() returns bigint
language sql volatile
as $$
    select _pgqueue.slot_claim(nextval('pgqueue.claim_numbers'), _pgqueue.new_token() - 1)
$$;

-- A new id for a claim of a checkpoint reader. These ids are even, too, and rise: an offset stands for all claims of
-- its reader up to one. The 23 other bits are for numbers that a crash gave back, as above. They give no right: all
-- calls about such a claim name the reader, too.
create or replace function _pgqueue.new_reader_claim_id() returns bigint
language sql volatile
as $$ select (nextval('pgqueue.claim_numbers') << 24) | ((_pgqueue.unguessable() & 8388607) << 1) $$;

-- Does the work that is due for a consumer before anything is claimed: releases expired leases, ends delays that are
-- over, and takes new publications, all bounded. Needs the consumer's lock.
--   p_held   messages that the claim has already: then it is not in need, and releases no other claim
--   p_short  true: the ready messages did not suffice (second pass). False: leases are looked at only once a second;
--            and no publication is taken if the last take was cut, because ready messages come before what it left
--   p_want   take until about this many messages became ready, if there are so many. With per_key_latest all are taken
--   p_upto   no publication after this one; null: all
-- Returns the cursor as it is then; the caller stores it.
create or replace function _pgqueue.refresh(p_consumer pgqueue.consumers, p_cursor pgqueue.consumer_cursors,
                                            p_held bigint, p_short boolean,
                                            p_want bigint, p_upto bigint) returns pgqueue.consumer_cursors
language plpgsql
as $$
declare
    v_cursor pgqueue.consumer_cursors := p_cursor;
    v_before pgqueue.consumer_cursors;
    v_take   record;
    v_wanted bigint := p_want;
begin
    if p_held = 0 and (p_short or not _pgqueue.need_not_look(v_cursor.lease_probe)) then
        v_cursor := _pgqueue.probe_leases(p_consumer, v_cursor);
    end if;
    if not p_short or _pgqueue.is_keyed(p_consumer.way) then
        v_cursor := _pgqueue.end_delays(p_consumer, v_cursor);
        v_cursor := _pgqueue.return_tokens(p_consumer, v_cursor);
    end if;
    -- (the second pass need not look far ahead, because the first did; but the first did not if the last take was cut)
    if (p_short or not v_cursor.take_was_cut or p_consumer.per_key_latest)
       and _pgqueue.has_new(p_consumer.stream_id, v_cursor, not p_short or v_cursor.take_was_cut) then
        for i in 1.._pgqueue.limit_takes() loop
            v_before := v_cursor;
            v_take := _pgqueue.take(p_consumer, v_cursor, p_upto, _pgqueue.limit_take());
            v_cursor := v_take.o_cursor;
            v_wanted := v_wanted - v_take.o_messages;
            exit when not v_cursor.take_was_cut or (v_wanted <= 0 and not p_consumer.per_key_latest)
                or (v_cursor.next_publication = v_before.next_publication and v_cursor.gaps = v_before.gaps
                    and v_before.filter_from is null)
                or (_pgqueue.judges(p_consumer) and i >= _pgqueue.limit_filters());
        end loop;
    end if;
    return v_cursor;
end $$;
