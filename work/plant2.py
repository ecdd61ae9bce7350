"""plants faults in a clone, runs tests"""
import subprocess,sys,os,time
R="/tmp/fault"
subprocess.run(f"rm -rf {R}; git clone -q /tmp/ci {R}",shell=True,check=True)
D="sql/queue/dealing.sql"; A="sql/claim/ahead.sql"; P="sql/queue/passing.sql"; K="sql/claim/by_key.sql"
T1="tests/sql/test_dealing.py tests/sql/test_ordering.py tests/sql/test_key_limits.py tests/sql/test_model.py tests/sql/test_plans.py"
T2="tests/sql/test_ahead.py tests/sql/test_model.py tests/sql/test_concurrency.py"
F=[
("aside: nothing is held",D,"select max(bundle_no) as held from","select null::bigint as held from",T1),
("aside: heads are left out",D,"where e.key is not null\n       or (select","where e.key is null\n       and (select",T1),
("aside: only heads",D,"    where e.key is not null\n       or (select true","    where e.key is not null\n       or (select null::boolean",T1),
("own beside what is held",D,"and a.held is null then 'own'","then 'own'",T1),
("a key twice in a deal",D,"when e.held or e.i > t.i\n","when e.held\n",T1),
("behind nothing",D,"then coalesce(lag(bundle_no) over (partition by own order by bin), tail) end as behind","then null::bigint end as behind",T1),
("chain does not hang on what is dealt",D,"then coalesce(lag(bundle_no) over (partition by own order by bin), tail) end as behind","then lag(bundle_no) over (partition by own order by bin) end as behind",T1),
("waits for no held claim",D,"coalesce(u.tail, _pgqueue.place_of_held() + a.held) as open","u.tail as open",T1),
("each is the first",D,"and (a.first_seq is null or ((a.is_head or v_none)","and (true or ((a.is_head or v_none)",T1),
("nobody is demoted",D,"where ctid = any (array(select tid from stays where first and tid is not null)) and place <> -2","where false",T1),
("no tokens",D,"or (first and open is null and until is not null)","or false",T1),
("twice: the last",D,"select key, min(i) as i from unnest(p_keyed.keys)","select key, max(i) as i from unnest(p_keyed.keys)",T1),
("all waits, too",D,"array_agg(n - take order by i),","array_agg(n order by i),",T1),
("the rest is all",D,"case take when 0 then seqs","case when true then seqs",T1),
("packs over the size",D,"else least(n, size) end::int as most from judged","else 0 end::int as most from judged",T1),
("never dense",P,"if cardinality(v_taken) = v_end - v_next then","if true then",T2),
("takes less urgent beside",A,"v_left < 0 or v_part.priority <> v_next[1].priority or","v_left < 0 or",T2),
("takes what is not plain",A,"or not _pgqueue.is_plain(p_consumer, v_part) then\n            return v_claim;\n        end if;\n        exit","then\n            return v_claim;\n        end if;\n        exit",T2),
("takes parts",A,"exists (select from unnest(v_next) where part > 0)","false",T2),
("nothing is left, always 0",A,"when cardinality(v_ids) in (0, cardinality(v_next)) then 0 end","when true then 0 end",T2),
("too large",A,"if v_left < 0 or","if",T2),
("deals behind what is dealt",K,"and not (v_bundles = '{}' and p_consumer.ordering = 'stream' and exists (","and not (false and exists (",T1),
("stream: expired, one at a time",K,"v_again := v_only is not null and","v_again := false and",T1),
("beside: never nothing","sql/claim/free.sql","        when _pgqueue.is_blocked(p_consumer, v_cursor)\n             or (p_consumer","        when false\n             or (p_consumer",T1),
]
only=sys.argv[1:]
for i,(name,f,a,b,tests) in enumerate(F):
    if only and str(i) not in only: continue
    subprocess.run(f"git -C {R} checkout -q .",shell=True,check=True)
    p=f"{R}/{f}"; t=open(p).read()
    if t.count(a)!=1: print(i,"!!",name,t.count(a),flush=True); continue
    open(p,"w").write(t.replace(a,b)); s=time.time()
    r=subprocess.run(f"cd {R} && PYTHONPATH={R} timeout 240 /tmp/ci/.venv/bin/python -m pytest -q -x -p no:cacheprovider --tb=no -n 3 --timeout 90 {tests}",shell=True,capture_output=True,text=True)
    l=[x for x in r.stdout.split("\n") if x.startswith(("FAILED","ERROR"))]
    print(i,"found" if l or r.returncode not in(0,) else "LIVES",name,f"{time.time()-s:.0f} s",(l[0][:110] if l else r.stdout[-120:].strip() if r.returncode else ""),flush=True)
