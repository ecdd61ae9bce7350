"""crew5.py rounds [filter]: as ONEFORM's crew.py: workers spin on empty for 2 s"""
import psycopg, sys, time, statistics, multiprocessing as mp
U="user=postgres host=/tmp/srv/data/data port=5432 dbname="
def ns(pid): return int(open(f"/proc/{pid}/schedstat").read().split()[0])
s="crew"
cases=[("none",1,0,20000),("none",10,0,60000),("key",1,5000,20000),("key",10,5000,60000),("key",100,5000,200000),("key",1,10,20000),("key",10,10,60000),("key",100,10,200000),("stream",1,1,20000)]
R=int(sys.argv[1]); 
if len(sys.argv)>2: cases=[x for x in cases if sys.argv[2] in str(x)]
DB=sys.argv[3].split(",") if len(sys.argv)>3 else ["old","one"]
SEC=1.5
def worker(d,size,bar,out):
    c=psycopg.connect(U+d,autocommit=True,prepare_threshold=0); pid=c.info.backend_pid
    def once():
        r=c.execute("select claim_id, seq from pgqueue.receive(%s,'c',%s)",(s,size)).fetchall()
        if r: c.execute("select pgqueue.ack(%s)",(r[0][0],))
        return len(r)
    for _ in range(10): once()
    bar.wait(); b=ns(pid); t=time.time(); n=e=0
    while time.time()-t<SEC:
        k=once(); n+=k; e+=k==0
    out.put((ns(pid)-b,n,e,time.time()-t))
A,B=DB
rat={x:[] for x in cases}; v={x:{d:[] for d in DB} for x in cases}; rate={x:{d:[] for d in DB} for x in cases}; emp={x:{d:[] for d in DB} for x in cases}
for rnd in range(R):
    for x in cases:
        o,size,keys,n=x; res={}
        for d in ((A,B) if rnd%2 else (B,A)):
            c=psycopg.connect(U+d,autocommit=True)
            def q(sql,*a):
                cur=c.execute(sql,a); return cur.fetchall() if cur.description else []
            if not q("select 1 from pgqueue.streams where name=%s",s): q("select pgqueue.create_stream(%s)",s)
            elif q("select 1 from pgqueue.consumers where name='c' and stream_name=%s",s): q("select pgqueue.drop_consumer(%s,'c')",s)
            q("select pgqueue.create_consumer(%s,'c','latest',%s)",s,o)
            q("select count(*) from pgqueue.send_batch(%s, array(select repeat('x',200) from generate_series(1,%s)), array(select 'k'||mod(i*7919,%s) from generate_series(1,%s) i))",s,n,max(keys,1),n)
            bar=mp.Barrier(4); out=mp.Queue(); ps=[mp.Process(target=worker,args=(d,size,bar,out)) for _ in range(4)]
            [p.start() for p in ps]; got=[out.get() for _ in ps]; [p.join() for p in ps]
            tot=sum(g[1] for g in got); res[d]=sum(g[0] for g in got)/1000/tot; v[x][d].append(res[d]); rate[x][d].append(tot/max(g[3] for g in got)); emp[x][d].append(sum(g[2] for g in got)); c.close()
        rat[x].append(res[B]/res[A])
m=statistics.median
for x in cases:
    r=sorted(rat[x]); print(f"{x[0]:7} keys {x[2]:5} by {x[1]:4}: "+"  ".join(f"{d} {m(v[x][d]):7.1f} us {m(rate[x][d]):7.0f}/s {m(emp[x][d]):5.0f} empty" for d in DB)+f"  ratio {m(r):.2f} ({r[0]:.2f} to {r[-1]:.2f})",flush=True)
