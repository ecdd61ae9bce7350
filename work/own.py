import psycopg, time
def ns(pid): return int(open(f"/proc/{pid}/schedstat").read().split()[0])
for d in ("old","one"):
    c=psycopg.connect(f"user=postgres host=/tmp/srv/data/data port=5432 dbname={d}",autocommit=True)
    s=f"o{time.time_ns()}"
    c.execute("select pgqueue.create_stream(%s)",[s]); c.execute("select pgqueue.create_consumer(%s,'c','earliest','key')",[s])
    c.execute(f"select count(pgqueue.send('{s}', 'x', 'k' || i, p_deliver_at => now() + make_interval(hours => 1, secs => i * 0.001))) from generate_series(1, 12500) i")
    for _ in range(2):
        b=ns(c.info.backend_pid); c.execute("select * from pgqueue.receive(%s,'c',100)",[s]).fetchall(); print(d, (ns(c.info.backend_pid)-b)/1e9)
    c.execute("select pgqueue.drop_stream(%s)",[s])
