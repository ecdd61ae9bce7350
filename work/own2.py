import psycopg, time
c=psycopg.connect(f"user=postgres host=/tmp/srv/data/data port=5432 dbname=one",autocommit=True)
s=f"o{time.time_ns()}"
c.execute("set track_functions='all'")
c.execute("select pgqueue.create_stream(%s)",[s]); c.execute("select pgqueue.create_consumer(%s,'c','earliest','key')",[s])
c.execute(f"select count(pgqueue.send('{s}', 'x', 'k' || i, p_deliver_at => now() + make_interval(hours => 1, secs => i * 0.001))) from generate_series(1, 12500) i")
c.execute("select pg_stat_reset()")
c.execute("select * from pgqueue.receive(%s,'c',100)",[s]).fetchall()
c.execute("select pg_stat_force_next_flush()"); c.execute("select 1")
for r in c.execute("select funcname, calls, round(self_time::numeric), round(total_time::numeric) from pg_stat_user_functions order by self_time desc limit 12").fetchall(): print(*r)
c.execute("select pgqueue.drop_stream(%s)",[s])
