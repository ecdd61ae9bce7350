"""m4.py [rounds] [filter]: as meas3, stream ids 1; medians of receive and ack apart"""
import psycopg, time, sys, statistics
def ns(pid): return int(open(f"/proc/{pid}/schedstat").read().split()[0])
U="user=postgres host=/tmp/srv/data/data port=5432 dbname="
def q(c,s,*a):
    cur=c.execute(s,a); return cur.fetchall() if cur.description else []
R=int(sys.argv[1]) if len(sys.argv)>1 else 7
cases=[("none",1,0),("none",10,0),("none",100,0),("none",10000,0),("key",1,5000),("key",10,5000),("key",100,5000),("key",1,10),("key",10,10),("key",100,10),("stream",1,1)]
if len(sys.argv)>2 and sys.argv[2]: cases=[x for x in cases if sys.argv[2] in str(x)]
DB=sys.argv[3].split(",") if len(sys.argv)>3 else ["old","one"]
A,B=DB
rat={x:[] for x in cases}; rec={x:{A:[],B:[]} for x in cases}; ack={x:{A:[],B:[]} for x in cases}
s="figures"
for rnd in range(R):
    sides={d:psycopg.connect(U+d,autocommit=True,prepare_threshold=0) for d in ((A,B) if rnd%2 else (B,A))}
    for x in cases:
        o,size,keys=x
        warm=30; n=(1500+warm) if size==1 else (1200+warm)*size if size==10 else 500*size if size==100 else 6*size
        for d,c in sides.items():
            if not q(c,"select 1 from pgqueue.streams where name=%s",s): q(c,"select pgqueue.create_stream(%s)",s)
            elif q(c,"select 1 from pgqueue.consumers where name='c'"): q(c,"select pgqueue.drop_consumer(%s,'c')",s)
            q(c,"select pgqueue.create_consumer(%s,'c','latest',%s)",s,o)
            q(c,"select count(*) from pgqueue.send_batch(%s, array(select repeat('x',200) from generate_series(1,%s)), array(select 'k'||mod(i*7919,%s) from generate_series(1,%s) i))",s,n,max(keys,1),n)
        cpu=dict.fromkeys(sides,0); cpa=dict.fromkeys(sides,0); got=dict.fromkeys(sides,0); meas=dict.fromkeys(sides,0)
        while min(got.values())<n:
            for d,c in sides.items():
                pid=c.info.backend_pid; k=0; g0=got[d]; ta=tr=0
                for _ in range(30 if size<10000 else 1):
                    if got[d]>=n: break
                    t=ns(pid)
                    r=q(c,"select claim_id, seq from pgqueue.receive(%s,'c',%s)",s,size)
                    t2=ns(pid)
                    if not r: print("empty",x,d); break
                    q(c,"select pgqueue.ack(%s)",r[0][0]); got[d]+=len(r)
                    ta+=ns(pid)-t2; tr+=t2-t
                if g0>0: cpu[d]+=tr; cpa[d]+=ta; meas[d]+=got[d]-g0
        for d in sides: rec[x][d].append(cpu[d]/1000/meas[d]); ack[x][d].append(cpa[d]/1000/meas[d])
        rat[x].append(((cpu[B]+cpa[B])/meas[B])/((cpu[A]+cpa[A])/meas[A]))
    for c in sides.values(): c.close()
m_=statistics.median
for x in cases:
    r=sorted(rat[x]); m=len(r); k=max(0,int(m/2-.98*m**.5))
    print(f"{x[0]:7} keys {x[2]:5} by {x[1]:5}: {A} {m_(rec[x][A]):7.2f}+{m_(ack[x][A]):6.2f} us  {B} {m_(rec[x][B]):7.2f}+{m_(ack[x][B]):6.2f} us  ratio {m_(r):.2f} ({r[k]:.2f} to {r[m-1-k]:.2f})",flush=True)
