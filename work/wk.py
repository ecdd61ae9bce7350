import psycopg, sys, time, threading
from datetime import timedelta
d=sys.argv[1]; n=int(sys.argv[2]); sys.path.insert(0, sys.argv[3])
from spark_pgqueue import Consumer
U=f"user=postgres host=/tmp/srv/data/data port=5432 dbname={d}"
c=psycopg.connect(U,autocommit=True)
s="wk"
if c.execute("select 1 from pgqueue.streams where name=%s",[s]).fetchall(): c.execute("select pgqueue.drop_stream(%s)",[s])
c.execute("select pgqueue.create_stream(%s)",[s]); c.execute("select pgqueue.create_consumer(%s,'c','earliest','key')",[s])
c.execute("select count(*) from pgqueue.send_batch(%s, array_fill('x'::text, array[%s::int]), (select array_agg('k' || i %% 900) from generate_series(1, %s::int) i))",[s,n,n])
c.execute(f"alter database {d} set track_functions = 'all'")
c.execute("select pg_stat_reset()")
done=[0]; t=time.time(); stop=threading.Event()
def singly(m):
    done[0]+=1
    if done[0]>=n: stop.set()
w=Consumer(U,s,"c")
th=threading.Thread(target=lambda: w.run(singly, concurrency=4, wait=timedelta(seconds=1)),daemon=True); th.start()
stop.wait(40); took=time.time()-t; w.stop() if hasattr(w,"stop") else None; time.sleep(1)
print(d, done[0], "messages in", round(took,1))
for r in c.execute("select funcname, calls, round(self_time::numeric), round(total_time::numeric) from pg_stat_user_functions order by self_time desc limit 14").fetchall(): print(*r)
c.execute(f"alter database {d} reset track_functions")
