"""meas2.py [rounds] [filter]: CPU of both sides, in turns of 25 claims; the median of the rounds' ratios."""
import psycopg, time, sys, statistics
def ns(pid): return int(open(f"/proc/{pid}/schedstat").read().split()[0])
U="user=postgres host=/tmp/srv/data/data port=5432 dbname="
sides={d:psycopg.connect(U+d,autocommit=True,prepare_threshold=0) for d in ("old","one")}
def q(c,s,*a):
    cur=c.execute(s,a); return cur.fetchall() if cur.description else []
R=int(sys.argv[1]) if len(sys.argv)>1 else 7
cases=[("none",1,0),("none",10,0),("key",1,5000),("key",10,5000),("key",100,5000),("key",1,10),("key",10,10),("key",100,10),("stream",1,1)]
if len(sys.argv)>2: cases=[x for x in cases if sys.argv[2] in str(x)]
for o,size,keys in cases:
    rat=[]; best={d:[] for d in sides}
    for rnd in range(R):
        s=f"m_{time.time_ns()}"; n=min(400*size,6000) if size>1 else 500
        for d,c in sides.items():
            q(c,"select pgqueue.create_stream(%s)",s); q(c,"select pgqueue.create_consumer(%s,'c','earliest',%s)",s,o)
            k="'k' || mod(i * 7919, %s)"%keys if keys else "null::text"
            q(c,f"select count(pgqueue.send('{s}', repeat('x',200), p_key => {k.replace('%%','%')})) from generate_series(1,{n}) i")
        cpu=dict.fromkeys(sides,0); got=dict.fromkeys(sides,0)
        while min(got.values())<n:
            for d,c in (list(sides.items()) if rnd%2 else list(sides.items())[::-1]):
                pid=c.info.backend_pid; t=ns(pid)
                for _ in range(25):
                    if got[d]>=n: break
                    r=q(c,"select claim_id, seq from pgqueue.receive(%s,'c',%s)",s,size)
                    if not r: print("empty"); break
                    q(c,"select pgqueue.ack(%s)",r[0][0]); got[d]+=len(r)
                cpu[d]+=ns(pid)-t
        for d in sides: best[d].append(cpu[d]/1000/got[d])
        rat.append(cpu["one"]/cpu["old"])
        for c in sides.values(): q(c,"select pgqueue.drop_stream(%s)",s)
    rat.sort()
    print(f"{o:7} keys {keys:5} by {size:4}: old {min(best['old']):7.1f} us  one {min(best['one']):7.1f} us  ratio {statistics.median(rat):.2f} ({rat[len(rat)//5]:.2f} to {rat[-1-len(rat)//5]:.2f}) least {min(best['one'])/min(best['old']):.2f}",flush=True)
