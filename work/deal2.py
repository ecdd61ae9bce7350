import psycopg,time,sys
c=psycopg.connect("user=postgres host=/tmp/srv/data/data port=5432 dbname=one",autocommit=True,prepare_threshold=0)
if len(sys.argv)>1: c.execute(sys.argv[1])
print(c.execute("select proconfig from pg_proc where proname='store_dealt'").fetchone())
S="b20"
if c.execute("select 1 from pgqueue.streams where name=%s",[S]).fetchall(): c.execute("select pgqueue.drop_stream(%s)",[S])
c.execute("select pgqueue.create_stream(%s)",[S]); c.execute("select pgqueue.create_consumer(%s,'c','earliest','key')",[S])
def go(n):
    for i in range(n):
        c.execute("select pgqueue.send(%s,'x','a'), pgqueue.send(%s,'x','b')",[S,S])
        for _ in range(2):
            r=c.execute("select claim_id from pgqueue.receive(%s,'c',1)",[S]).fetchall()
            if r: c.execute("select pgqueue.ack(%s)",[r[0][0]])
go(50)
c.execute("set track_functions='all'"); c.execute("select pg_stat_reset()")
go(300)
c.execute("select pg_stat_force_next_flush()"); c.execute("select pg_stat_clear_snapshot()")
for r in c.execute("select funcname, calls, round(self_time*1000/calls) us from pg_stat_user_functions where funcname in ('store_dealt','by_key','line_front','claim_bundles','next_new') order by self_time desc").fetchall(): print(*r)
