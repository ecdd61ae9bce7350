"""meas3.py [rounds] [filter]: as meas2.py, with new sessions in each round."""
import psycopg, time, sys, statistics
def ns(pid): return int(open(f"/proc/{pid}/schedstat").read().split()[0])
U="user=postgres host=/tmp/srv/data/data port=5432 dbname="
def q(c,s,*a):
    cur=c.execute(s,a); return cur.fetchall() if cur.description else []
R=int(sys.argv[1]) if len(sys.argv)>1 else 7
cases=[("none",1,0),("none",10,0),("none",100,0),("key",1,5000),("key",10,5000),("key",100,5000),("key",1,10),("key",10,10),("key",100,10),("stream",1,1)]
if len(sys.argv)>2: cases=[x for x in cases if sys.argv[2] in str(x)]
rat={x:[] for x in cases}; best={x:{"old":[],"one":[]} for x in cases}
s="figures"
for rnd in range(R):
    sides={d:psycopg.connect(U+d,autocommit=True,prepare_threshold=0) for d in (("old","one") if rnd%2 else ("one","old"))}
    for x in cases:
        o,size,keys=x
        warm=30; n=(300+warm) if size==1 else (150+warm)*size if size==10 else 60*size
        for d,c in sides.items():
            if q(c,"select 1 from pgqueue.streams where name=%s",s): q(c,"select pgqueue.drop_stream(%s)",s)
            q(c,"select pgqueue.create_stream(%s)",s); q(c,"select pgqueue.create_consumer(%s,'c','earliest',%s)",s,o)
            q(c,"select count(*) from pgqueue.send_batch(%s, array(select repeat('x',200) from generate_series(1,%s)), array(select 'k'||mod(i*7919,%s) from generate_series(1,%s) i))",s,n,max(keys,1),n)
        cpu=dict.fromkeys(sides,0); got=dict.fromkeys(sides,0); meas=dict.fromkeys(sides,0)
        while min(got.values())<n:
            for d,c in sides.items():
                pid=c.info.backend_pid; t=ns(pid); k=0; g0=got[d]
                for _ in range(30):
                    if got[d]>=n: break
                    r=q(c,"select claim_id, seq from pgqueue.receive(%s,'c',%s)",s,size)
                    if not r: print("empty",x,d); break
                    q(c,"select pgqueue.ack(%s)",r[0][0]); got[d]+=len(r)
                if g0>0: cpu[d]+=ns(pid)-t; meas[d]+=got[d]-g0
        for d in sides: best[x][d].append(cpu[d]/1000/meas[d])
        rat[x].append((cpu["one"]/meas["one"])/(cpu["old"]/meas["old"]))
    for c in sides.values(): c.close()
for x in cases:
    r=sorted(rat[x]); m=len(r); k=max(0,int(m/2-.98*m**.5)); b=best[x]
    print(f"{x[0]:7} keys {x[2]:5} by {x[1]:4}: old {statistics.median(b['old']):7.1f} us  one {statistics.median(b['one']):7.1f} us  ratio {statistics.median(r):.2f} ({r[k]:.2f} to {r[m-1-k]:.2f}) least {min(b['one'])/min(b['old']):.2f}",flush=True)
