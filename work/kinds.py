"""kinds.py rounds: receive + ack of 1 and 10, consumers with settings; beside a snapshot; beside 10,000 open, delayed, waiting; 200,000"""
import psycopg, time, sys, statistics
from psycopg.types.json import Jsonb
def ns(pid): return int(open(f"/proc/{pid}/schedstat").read().split()[0])
U="user=postgres host=/tmp/srv/data/data port=5432 dbname="
def q(c,s,*a):
    cur=c.execute(s,a); return cur.fetchall() if cur.description else []
KINDS={"per_key_limit":("none",{"per_key_limit":2}),"key+limit":("key",{"per_key_limit":2}),"interval":("none",{"per_key_interval":"1 ms","per_key_burst":5}),"capacity":("none",{"per_key_capacity":100000}),"history":("none",{"keep_history":"1 hour"}),"latest":("none",{"per_key_latest":True}),"fair":("none",{"fair":True})}
R=int(sys.argv[1]); m=statistics.median
def make(c,s,o,settings,n,keys):
    if not q(c,"select 1 from pgqueue.streams where name=%s",s): q(c,"select pgqueue.create_stream(%s)",s)
    elif q(c,"select 1 from pgqueue.consumers where name='c' and stream_name=%s",s): q(c,"select pgqueue.drop_consumer(%s,'c')",s)
    q(c,"select pgqueue.create_consumer(%s,'c','latest',%s,p_settings=>%s)",s,o,Jsonb(settings))
    q(c,"select count(*) from pgqueue.send_batch(%s, array(select repeat('x',200) from generate_series(1,%s)), array(select 'k'||mod(i*7919,%s) from generate_series(1,%s) i))",s,n,keys,n)
def drain(c,s,size,calls):
    pid=c.info.backend_pid; t=ns(pid); g=0
    for _ in range(calls):
        r=q(c,"select claim_id from pgqueue.receive(%s,'c',%s)",s,size)
        if not r: time.sleep(.002); continue
        q(c,"select pgqueue.ack(%s)",r[0][0]); g+=len(r)
    return (ns(pid)-t)/1000/max(g,1)
s="kinds"
for name,(o,st) in KINDS.items():
    for size in (1,10):
        rat=[]; v={"old":[],"one":[]}
        for rnd in range(R):
            res={}
            for d in (("old","one") if rnd%2 else ("one","old")):
                c=psycopg.connect(U+d,autocommit=True,prepare_threshold=0)
                make(c,s,o,st,(200 if size==1 else 120)*size+50*size,5000); drain(c,s,size,30); res[d]=drain(c,s,size,200 if size==1 else 120); v[d].append(res[d]); c.close()
            rat.append(res["one"]/res["old"])
        rat.sort(); print(f"{name:14} by {size:3}: old {m(v['old']):7.1f} one {m(v['one']):7.1f} ratio {m(rat):.2f} ({rat[0]:.2f} to {rat[-1]:.2f})",flush=True)
for name in ("open","open key","delayed","delayed key","snapshot","snapshot key"):
    rat=[]; v={"old":[],"one":[]}; o="key" if "key" in name else "none"
    for rnd in range(max(3,R//2)):
        res={}
        for d in (("old","one") if rnd%2 else ("one","old")):
            c=psycopg.connect(U+d,autocommit=True,prepare_threshold=0); other=None
            make(c,s,o,{},1,1000000)
            if name.startswith("open"):
                q(c,"select count(*) from pgqueue.send_batch(%s, array(select repeat('x',200) from generate_series(1,3000)), array(select 'o'||i from generate_series(1,3000) i))",s)
                [q(c,"select claim_id from pgqueue.receive(%s,'c',1)",s) for _ in range(3000)]; time.sleep(1.1)
            elif name.startswith("delayed"):
                q(c,"select count(*) from pgqueue.send_batch(%s, array(select 'x'::text from generate_series(1,10000)), array(select 'd'||i from generate_series(1,10000) i), p_deliver_at => clock_timestamp() + interval '1 hour')",s)
            else:
                other=psycopg.connect(U+d); other.execute("set transaction isolation level repeatable read"); other.execute("select count(*) from pgqueue.streams")
            q(c,"select count(*) from pgqueue.send_batch(%s, array(select repeat('x',200) from generate_series(1,2500)), array(select 'k'||i from generate_series(1,2500) i))",s)
            drain(c,s,1,2000 if other else 50); res[d]=drain(c,s,1,300); v[d].append(res[d]); c.close()
            if other: other.close()
        rat.append(res["one"]/res["old"])
    rat.sort(); print(f"beside {name:13}: old {m(v['old']):7.1f} one {m(v['one']):7.1f} ratio {m(rat):.2f} ({rat[0]:.2f} to {rat[-1]:.2f})",flush=True)
for o in ("none","key"):
    rat=[]; v={"old":[],"one":[]}
    for rnd in range(4):
        res={}
        for d in (("old","one") if rnd%2 else ("one","old")):
            c=psycopg.connect(U+d,autocommit=True,prepare_threshold=0)
            make(c,s,o,{},1000,100)
            for _ in range(19): q(c,"select count(*) from pgqueue.send_batch(%s, array(select 'x'::text from generate_series(1,10000)), array(select 'k'||mod(i,100) from generate_series(1,10000) i))",s)
            pid=c.info.backend_pid; t=ns(pid); r=q(c,"select claim_id, message_count from pgqueue.claim(%s,'c',200000)",s); q(c,"select pgqueue.ack(%s)",r[0][0]); res[d]=(ns(pid)-t)/1000; v[d].append(res[d]); c.close()
        rat.append(res["one"]/res["old"])
    rat.sort(); print(f"200,000 {o:5}: old {m(v['old']):7.0f} one {m(v['one']):7.0f} us ratio {m(rat):.2f} ({rat[0]:.2f} to {rat[-1]:.2f})",flush=True)
