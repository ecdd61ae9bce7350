-- Looking at schedules.

-- One row per schedule.
do $view$ begin perform _pgqueue.make_view('stream_schedules', $query$
    select s.name as stream, h.name as schedule, h.cron, h.every, h.time_zone,
           case when not h.paused then h.next_at end as next_at, h.paused,
           h.planned_at as last_planned_at, h.sent_at as last_sent_at, h.seq as last_seq, h.last_error,
           h.key, h.data, h.data_bytes, h.headers, h.priority, h.consumers, h.start_at, h.created_at
    from pgqueue.schedules h join pgqueue.streams s using (stream_id)
$query$); end $view$;
