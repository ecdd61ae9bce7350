"""turn.py [rounds]: CPU of both sides: send, receive, ack in turn, in turns of 50; the median of the ratios."""
import psycopg, time, sys, statistics
def ns(pid): return int(open(f"/proc/{pid}/schedstat").read().split()[0])
U="user=postgres host=/tmp/srv/data/data port=5432 dbname="
sides={d:psycopg.connect(U+d,autocommit=True,prepare_threshold=0) for d in ("old","one")}
def q(c,s,*a):
    cur=c.execute(s,a); return cur.fetchall() if cur.description else []
R=int(sys.argv[1]) if len(sys.argv)>1 else 7
for o in ("none","key"):
    s=f"t_{time.time_ns()}"; rat=[]; b={d:[] for d in sides}
    for c in sides.values():
        q(c,"select pgqueue.create_stream(%s)",s); q(c,"select pgqueue.create_consumer(%s,'c','earliest',%s)",s,o)
    for rnd in range(R+1):
        cpu=dict.fromkeys(sides,0)
        for d,c in sides.items():
            pid=c.info.backend_pid
            for i in range(60):
                q(c,f"select pgqueue.send('{s}', repeat('x',200), p_key => %s::text)", None if o=="none" else f"k{i}")
                t=ns(pid)
                r=q(c,"select claim_id from pgqueue.receive(%s,'c',1)",s); q(c,"select pgqueue.ack(%s)",r[0][0])
                if i>=10: cpu[d]+=ns(pid)-t
        if rnd:
            rat.append(cpu["one"]/cpu["old"])
            for d in sides: b[d].append(cpu[d]/50/1000)
    rat.sort()
    print(f"in turn {o}: old {min(b['old']):.0f} one {min(b['one']):.0f} us (receive + ack) ratio {statistics.median(rat):.2f}",flush=True)
