"""rate4.py DB [seconds] [workers]: four polling workers at 300 a second: CPU by backend, functions, delays."""
import psycopg, sys, time, multiprocessing as mp, json
DB=sys.argv[1]; SEC=float(sys.argv[2]) if len(sys.argv)>2 else 6; W=int(sys.argv[3]) if len(sys.argv)>3 else 4
U="user=postgres host=/tmp/srv/data/data port=5432 dbname="+DB
def ns(pid): return int(open(f"/proc/{pid}/schedstat").read().split()[0])
def worker(s, out, end):
    c=psycopg.connect(U,autocommit=True,prepare_threshold=0); pid=c.info.backend_pid
    c.execute("set track_functions='all'")
    got=[]; polls=0; b=ns(pid); me=time.process_time()
    while time.time()<end:
        r=c.execute("select claim_id, data from pgqueue.receive(%s,'c',1)",[s]).fetchall(); polls+=1
        if r:
            got.append(time.time()-float(r[0][1])); c.execute("select pgqueue.ack(%s)",[r[0][0]])
        else: time.sleep(.001)
    cpu=ns(pid)-b; me=time.process_time()-me
    c.execute("select pg_stat_force_next_flush()"); c.execute("select 1"); c.close()
    out.put((cpu/1e9, polls, got, me))
if __name__=="__main__":
    c=psycopg.connect(U,autocommit=True)
    s=f"r_{time.time_ns()}"
    c.execute("select pgqueue.create_stream(%s)",[s]); c.execute("select pgqueue.create_consumer(%s,'c')",[s])
    c.execute("select pg_stat_reset()")
    out=mp.Queue(); end=time.time()+SEC+1
    ps=[mp.Process(target=worker,args=(s,out,end)) for _ in range(W)]
    [p.start() for p in ps]; time.sleep(.5)
    pid=c.info.backend_pid; b=ns(pid); n=0; t0=time.time()
    while time.time()<end-.5:
        c.execute("select pgqueue.send(%s,%s)",[s,repr(time.time())]); n+=1
        time.sleep(max(0,t0+n/300-time.time()))
    pc=(ns(pid)-b)/1e9
    rs=[out.get() for _ in ps]; [p.join() for p in ps]
    d=sorted(x for r in rs for x in r[2][50:])
    print(f"{n} sent, producer backend {pc/SEC:.2f} cpu/s; workers' backends {sum(r[0] for r in rs)/SEC:.2f} cpu/s, clients {sum(r[3] for r in rs)/SEC:.2f}; polls/s {sum(r[1] for r in rs)/SEC:.0f}; p50 {d[len(d)//2]*1e3:.1f} p99 {d[int(len(d)*.99)]*1e3:.1f} p99.9 {d[int(len(d)*.999)]*1e3:.1f} ms")
    for r in c.execute("select funcname, calls, round(self_time::numeric), round(total_time::numeric) from pg_stat_user_functions order by self_time desc limit 60").fetchall(): print(*r)
    c.execute("select pgqueue.drop_stream(%s)",[s])
