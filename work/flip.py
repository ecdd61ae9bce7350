import psycopg, time, sys
def ns(pid): return int(open(f"/proc/{pid}/schedstat").read().split()[0])
for d in sys.argv[1:]:
  for how in ("none","one row","half"):
    c=psycopg.connect(f"user=postgres host=/tmp/srv/data/data port=5432 dbname={d}",autocommit=True)
    s=f"o{time.time_ns()}"
    (i,)=c.execute("select pgqueue.create_stream(%s)",[s]).fetchone(); c.execute("select pgqueue.create_consumer(%s,'c','earliest','key')",[s])
    if how!="none":
        c.execute(f"select count(pgqueue.send('{s}', 'x', 'z' || i)) from generate_series(1, {1 if how=='one row' else 3000}) i")
        c.execute("analyze")
        while True:
            r=c.execute("select claim_id from pgqueue.receive(%s,'c',1000)",[s]).fetchall()
            if not r: break
            c.execute("select pgqueue.ack(%s)",[r[0][0]])
    c.execute(f"select count(pgqueue.send('{s}', 'x', 'k' || i, p_deliver_at => now() + make_interval(hours => 1, secs => i * 0.001))) from generate_series(1, 12500) i")
    b=ns(c.info.backend_pid); c.execute("select * from pgqueue.receive(%s,'c',100)",[s]).fetchall(); print(d, how, round((ns(c.info.backend_pid)-b)/1e9,2),flush=True)
    c.execute("select pgqueue.drop_stream(%s)",[s])
