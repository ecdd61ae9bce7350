"""crew4.py [rounds] [filter]: four workers: CPU a message of all backends, and messages a second; sides in turn"""
import psycopg, sys, time, statistics, multiprocessing as mp
U="user=postgres host=/tmp/srv/data/data port=5432 dbname="
def ns(pid): return int(open(f"/proc/{pid}/schedstat").read().split()[0])
s="crew"
cases=[("none",1,0,6000),("none",10,0,30000),("key",1,5000,6000),("key",10,5000,30000),("key",100,5000,100000),("key",1,10,6000),("key",10,10,20000),("key",100,10,60000),("stream",1,1,3000)]
R=int(sys.argv[1]); 
if len(sys.argv)>2: cases=[x for x in cases if sys.argv[2] in str(x)]
def worker(d,size,go,out):
    c=psycopg.connect(U+d,autocommit=True,prepare_threshold=0); pid=c.info.backend_pid
    c.execute("select 1"); go.wait(); t=ns(pid); n=0; empty=0; t0=time.time()
    while empty<20:
        r=c.execute("select claim_id, seq from pgqueue.receive(%s,'c',%s)",(s,size)).fetchall()
        if not r: empty+=1; time.sleep(.002); continue
        empty=0; c.execute("select pgqueue.ack(%s)",(r[0][0],)); n+=len(r); last=time.time(); tl=ns(pid)
    out.put((n,(tl-t) if n else 0, last if n else 0))
rat={x:[] for x in cases}; v={x:{"old":[],"one":[]} for x in cases}; rate={x:{"old":[],"one":[]} for x in cases}
for rnd in range(R):
    for x in cases:
        o,size,keys,n=x; res={}
        for d in (("old","one") if rnd%2 else ("one","old")):
            c=psycopg.connect(U+d,autocommit=True)
            def q(sql,*a):
                cur=c.execute(sql,a); return cur.fetchall() if cur.description else []
            if not q("select 1 from pgqueue.streams where name=%s",s): q("select pgqueue.create_stream(%s)",s)
            elif q("select 1 from pgqueue.consumers where name='c' and stream_name=%s",s): q("select pgqueue.drop_consumer(%s,'c')",s)
            q("select pgqueue.create_consumer(%s,'c','latest',%s)",s,o)
            q("select count(*) from pgqueue.send_batch(%s, array(select repeat('x',200) from generate_series(1,%s)), array(select 'k'||mod(i*7919,%s) from generate_series(1,%s) i))",s,n,max(keys,1),n)
            go=mp.Event(); out=mp.Queue(); ps=[mp.Process(target=worker,args=(d,size,go,out)) for _ in range(4)]
            [p.start() for p in ps]; time.sleep(.3); t0=time.time(); go.set()
            got=[out.get() for _ in ps]; [p.join() for p in ps]
            total=sum(g[0] for g in got); assert total==n,(total,n,x,d)
            res[d]=sum(g[1] for g in got)/1000/n; rate[x][d].append(n/(max(g[2] for g in got)-t0)); v[x][d].append(res[d]); c.close()
        rat[x].append(res["one"]/res["old"])
m=statistics.median
for x in cases:
    r=sorted(rat[x]); print(f"{x[0]:7} keys {x[2]:5} by {x[1]:4}: old {m(v[x]['old']):7.1f} us {m(rate[x]['old']):7.0f}/s  one {m(v[x]['one']):7.1f} us {m(rate[x]['one']):7.0f}/s  ratio {m(r):.2f} ({r[0]:.2f} to {r[-1]:.2f})",flush=True)
