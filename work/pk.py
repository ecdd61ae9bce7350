import psycopg, sys, subprocess, time, re
d, root = sys.argv[1], sys.argv[2]
U=f"user=postgres host=/tmp/srv/data/data port=5432 dbname={d}"
c=psycopg.connect(U,autocommit=True)
if c.execute("select 1 from pgqueue.streams where name='s'").fetchall(): c.execute("select pgqueue.drop_stream('s')")
c.execute("drop table if exists done"); c.execute("create table done (seq bigint)")
c.execute("select pgqueue.create_stream('s')"); c.execute("select pgqueue.create_consumer('s','c','earliest','key', p_settings => '{\"max_deliver_count\": 3, \"visibility_timeout\": \"0.3 s\"}')")
n=10000
c.execute("select count(*) from pgqueue.send_batch('s', array_fill('x'::text, array[%s::int]), (select array_agg('k' || i %% 900) from generate_series(1, %s::int) i))",[n,n])
(first,)=c.execute(f"select min(seq) from pgqueue.messages where stream='s'").fetchone() if False else (1,)
src=open("/tmp/ci/tests/sql/test_poison_kills.py").read()
sup=src.split('SUPERVISOR = """')[1].split('"""')[0].replace("\\\\","\\")
import os
c.execute(f"alter database {d} set track_functions = 'all'"); c.execute("select pg_stat_reset()")
p=subprocess.Popen([sys.executable,"-u","-c",sup,U,"singly",str(n*2//3),"0"],env={**os.environ,"PYTHONPATH":root})
t=time.time()
while p.poll() is None and time.time()-t<float(sys.argv[3]):
    time.sleep(3)
    print(round(time.time()-t), c.execute("select count(distinct seq) from done").fetchone(), c.execute("select state, count(*) , sum(message_count) from _pgqueue.unfinished((select consumer_id from pgqueue.consumers where stream_name='s')) group by 1").fetchall(), flush=True)
print("rc",p.poll())
p.kill()
for r in c.execute("select funcname, calls, round(self_time::numeric), round(total_time::numeric) from pg_stat_user_functions order by self_time desc limit 16").fetchall(): print(*r)
c.execute(f"alter database {d} reset track_functions")
