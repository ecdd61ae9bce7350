import psycopg, sys, time
o,size,keys,n,d=sys.argv[1],int(sys.argv[2]),int(sys.argv[3]),int(sys.argv[4]),sys.argv[5]
c=psycopg.connect("user=postgres host=/tmp/srv/data/data port=5432 dbname="+d,autocommit=True,prepare_threshold=0)
def q(s,*a):
    cur=c.execute(s,a); return cur.fetchall() if cur.description else []
q("set track_functions='all'")
s=f"p_{time.time_ns()}"
q("select pgqueue.create_stream(%s)",s); q("select pgqueue.create_consumer(%s,'c','earliest',%s)",s,o)
q(f"select count(pgqueue.send('{s}', repeat('x',200), p_key => 'k' || mod(i * 7919, {keys}))) from generate_series(1,{n}) i")
q("select pg_stat_reset()")
got=0
while got<n:
    r=q("select claim_id, seq from pgqueue.receive(%s,'c',%s)",s,size)
    q("select pgqueue.ack(%s)",r[0][0]); got+=len(r)
q("select pg_stat_force_next_flush()"); q("select 1")
for r in q("select funcname, calls, round(self_time::numeric,1), round(total_time::numeric,1) from pg_stat_user_functions order by self_time desc limit 22"): print(*r)
q("select pgqueue.drop_stream(%s)",s)
