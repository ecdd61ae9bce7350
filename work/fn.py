import psycopg, sys
U="user=postgres host=/tmp/srv/data/data port=5432 dbname="
d,o,size,keys,n=sys.argv[1],sys.argv[2],int(sys.argv[3]),int(sys.argv[4]),int(sys.argv[5])
c=psycopg.connect(U+d,autocommit=True,prepare_threshold=0)
def q(s,*a):
    cur=c.execute(s,a); return cur.fetchall() if cur.description else []
s="figures"
if not q("select 1 from pgqueue.streams where name=%s",s): q("select pgqueue.create_stream(%s)",s)
elif q("select 1 from pgqueue.consumers where name='c'"): q("select pgqueue.drop_consumer(%s,'c')",s)
q("select pgqueue.create_consumer(%s,'c','latest',%s)",s,o)
q("select count(*) from pgqueue.send_batch(%s, array(select repeat('x',200) from generate_series(1,%s)), array(select 'k'||mod(i*7919,%s) from generate_series(1,%s) i))",s,n*size,max(keys,1),n*size)
def go(k):
    for _ in range(k):
        r=q("select claim_id, seq from pgqueue.receive(%s,'c',%s)",s,size)
        if not r: return
        q("select pgqueue.ack(%s)",r[0][0])
go(100); q("set track_functions='all'"); q("select pg_stat_reset()"); go(n); q("select pg_stat_force_next_flush()")
for r in q("select schemaname||'.'||funcname, calls, total_time*1000/%s, self_time*1000/%s from pg_stat_user_functions where calls>0 order by self_time desc limit 30",n,n): print("%-40s %6d total %7.1f self %7.1f"%r)
