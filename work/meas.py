import psycopg, time, sys, statistics
def ns(pid): return int(open(f"/proc/{pid}/schedstat").read().split()[0])
U="user=postgres host=/tmp/srv/data/data port=5432 dbname="
sides={d:psycopg.connect(U+d,autocommit=True,prepare_threshold=0) for d in ("old","one")}
def q(c,s,*a):
    cur=c.execute(s,a); return cur.fetchall() if cur.description else []
N=int(sys.argv[1]) if len(sys.argv)>1 else 6000
cases=[("none",1,0),("key",10,5000),("key",1,5000),("key",10,10),("key",1,10),("stream",1,1)]
if len(sys.argv)>2: cases=[x for x in cases if sys.argv[2] in str(x)]
for o,size,keys in cases:
    res={d:[] for d in sides}; lat={d:[] for d in sides}
    for rnd in range(3):
        for d,c in sides.items():
            s=f"m_{o}_{size}_{keys}_{rnd}_{time.time_ns()%100000}"
            q(c,"select pgqueue.create_stream(%s)",s); q(c,"select pgqueue.create_consumer(%s,'c','earliest',%s)",s,o)
            n=min(N, size*2000)
            k="'k' || mod(i * 7919, %s)"%keys if keys else "null::text"
            q(c,f"select count(pgqueue.send('{s}', repeat('x',200), p_key => {k.replace('%%','%')})) from generate_series(1,{n}) i")
            pid=c.info.backend_pid; t=ns(pid); got=0
            while got<n:
                r=q(c,"select claim_id, seq from pgqueue.receive(%s,'c',%s)",s,size)
                if not r: print("empty",d,o,size,got); break
                q(c,"select pgqueue.ack(%s)",r[0][0]); got+=len(r)
            res[d].append((ns(pid)-t)/1000/max(got,1))
            q(c,"select pgqueue.drop_stream(%s)",s)
    a,b=min(res["old"]),min(res["one"])
    print(f"{o:7} keys {keys:5} by {size:4}: old {a:7.1f} us  one {b:7.1f} us  ratio {b/a:.2f}",flush=True)
