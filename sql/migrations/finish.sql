-- What migrations leave for when all functions are there: each does nothing where nothing is to do.

-- Streams whose messages are not checked yet. What they have already is not looked at: it may be longer than is allowed now, and
-- looking would take long.
do $$
begin
    perform pgqueue._check_messages(s, true)
    from pgqueue.streams s
    where not exists (select from pg_constraint where conrelid = to_regclass(format('pgqueue.messages_%s', s.stream_id)) and contype = 'c');
end $$;
