"""Plants a fault in the SQL of /tmp/fault, runs tests."""
import subprocess, sys, shutil, os
FAULTS={
 "each: no lock": ("sql/queue/passing.sql","continue when not _pgqueue.try_lock_publication(p_consumer.consumer_id, v_next[1].publication_id)\n            or exists","continue when exists"),
 "each: no recheck": ("sql/queue/passing.sql","""            or exists (select from pgqueue.taken_ahead
                       where consumer_id = p_consumer.consumer_id and publication_id = v_next[1].publication_id);""",""";"""),
 "each: none": ("sql/queue/passing.sql","if p_upto is null and p_consumer.way = 'simple' then","if false then"),
 "each: not noted": ("sql/queue/passing.sql","""        insert into pgqueue.taken_ahead (consumer_id, publication_id, message_count)
        values (p_consumer.consumer_id, v_next[1].publication_id, 0);
""",""),
 "walks over dead": ("sql/claim/ahead.sql","where consumer_id = p_consumer.consumer_id and publication_id >= p_cursor.next_publication\n        order by","where consumer_id = p_consumer.consumer_id\n        order by"),
 "no recheck of the cursor": ("sql/claim/ahead.sql","""          and p.publication_id >= (select next_publication from pgqueue.consumer_cursors
                                   where consumer_id = p_consumer.consumer_id order by version desc limit 1)
""",""),
 "no recheck of taken_ahead": ("sql/claim/ahead.sql","""          and not exists (select from pgqueue.taken_ahead a
                          where a.consumer_id = p_consumer.consumer_id and a.publication_id = p.publication_id)
          -- (it""","""          -- (it"""),
 "no recheck of the way": ("sql/claim/ahead.sql","""and c.way = p_consumer.way)""",")"),
 "no lock of a publication": ("sql/queue/passing.sql","select pg_try_advisory_xact_lock(_pgqueue.lock_class_publication(),","select true or pg_try_advisory_xact_lock(_pgqueue.lock_class_publication(),"),
 "no shared lock": ("sql/claim/ahead.sql","pg_try_advisory_xact_lock_shared(_pgqueue.lock_class_new(), p_consumer.consumer_id)","(true or pg_try_advisory_xact_lock_shared(_pgqueue.lock_class_new(), p_consumer.consumer_id))"),
 "catch_up without the lock": ("sql/queue/passing.sql","elsif _pgqueue.lock_new_soon(p_consumer.consumer_id) then","elsif true then"),
 "moves without the lock": ("sql/base/locks.sql","if not _pgqueue.try_lock_new(p_consumer_id) then","if false then"),
 "hints not lowered": ("sql/queue/passing.sql","p_cursor.hints := _pgqueue.stands(p_cursor.hints, v_bundle.lane, v_bundle.place, v_bundle.first_seq, false);","null;"),
 "taken not counted": ("sql/queue/passing.sql","p_cursor.taken := p_cursor.taken + v_passed.message_count;",""),
 "no gap": ("sql/queue/passing.sql","if v_passed.count < p_cursor.next_publication - v_next then","if false then"),
 "prefix is all": ("sql/queue/passing.sql","where p_all or before = v_next - 1;","where true;"),
 "claim_ahead does not catch up": ("sql/claim/free.sql","v_ready := _pgqueue.catch_up(p_consumer, v_stored, null);","v_ready := (select r from (select v_stored as p_cursor, null::bigint as p_upto) r);"),
 "only ids next to the cursor": ("sql/claim/ahead.sql","int8range(greatest(v_next, p_end - v_most), p_end + v_most)","int8range(v_next, v_next)"),
 "only the last ids": ("sql/claim/ahead.sql","int8multirange(int8range(v_next, v_next + v_most),","int8multirange(int8range(v_next, v_next),"),
 "not plain is taken": ("sql/claim/ahead.sql","exit when not v_next.plain or","exit when"),
 "new_ids counts them": ("sql/queue/states.sql","""where consumer_id = p_cursor.consumer_id and publication_id >= p_cursor.next_publication), '{}')""","""where false), '{}')"""),
 "merge lowers first_seq": ("sql/claim/making.sql","and not _pgqueue.is_keyed(p_consumer.way) and lower(v_all) >= v_head.first_seq","and not _pgqueue.is_keyed(p_consumer.way)"),
}
names=sys.argv[2:] or list(FAULTS)
for n in names:
    f,a,b=FAULTS[n]
    subprocess.run("rm -rf /tmp/fault; git clone -q /work/wt/one /tmp/fault -b tails; rm -rf /tmp/fault/work /tmp/fault/WORK_41.md",shell=True,check=True)
    s=open("/tmp/fault/"+f).read(); assert s.count(a)==1,(n,s.count(a)); open("/tmp/fault/"+f,"w").write(s.replace(a,b))
    r=subprocess.run(f"cd /tmp/fault; PYTHONPATH=$PWD timeout 280 /tmp/ci/.venv/bin/python -m pytest -q -x -p no:cacheprovider --tb=no -n {sys.argv[1]} --timeout 120 tests/sql/test_ahead.py",shell=True,capture_output=True,text=True)
    l=[x for x in r.stdout.splitlines() if x.startswith("FAILED") or "passed" in x or "failed" in x or "error" in x.lower()]
    print(n,"->"," | ".join(x[:150] for x in l[:3]),flush=True)
