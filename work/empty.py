import psycopg,sys
def ns(pid): return int(open(f"/proc/{pid}/schedstat").read().split()[0])
U="user=postgres host=/tmp/srv/data/data port=5432 dbname="
cs={}
for d in ("old","one"):
    c=psycopg.connect(U+d,autocommit=True,prepare_threshold=0); cs[d]=c
    if not c.execute("select 1 from pgqueue.streams where name='emp'").fetchall():
        c.execute("select pgqueue.create_stream('emp')"); c.execute("select pgqueue.create_consumer('emp','c','latest','none')"); c.execute("select pgqueue.create_consumer('emp','k','latest','key')")
    for i in range(3):
        c.execute("select pgqueue.send('emp','x')")
        for k in "ck":
            r=c.execute("select claim_id from pgqueue.receive('emp',%s,1)",[k]).fetchall(); c.execute("select pgqueue.ack(%s)",[r[0][0]])
for k in "ck":
  for rep in range(2):
    for d,c in cs.items():
        for i in range(50): c.execute("select claim_id, seq from pgqueue.receive('emp',%s,1)",[k])
        t=ns(c.info.backend_pid)
        for i in range(500): c.execute("select claim_id, seq from pgqueue.receive('emp',%s,1)",[k])
        print(k,d,(ns(c.info.backend_pid)-t)/500/1000)
c=cs["one"]; c.execute("set track_functions='all'"); c.execute("select pg_stat_reset()")
for i in range(500): c.execute("select claim_id, seq from pgqueue.receive('emp','c',1)")
c.execute("select pg_stat_force_next_flush()")
for r in c.execute("select schemaname||'.'||funcname, calls, total_time*1000/500, self_time*1000/500 from pg_stat_user_functions where calls>0 order by self_time desc limit 12").fetchall(): print("%-40s %6d total %7.1f self %7.1f"%r)
