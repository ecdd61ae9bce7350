import psycopg, sys
U="user=postgres host=/tmp/srv/data/data port=5432 dbname="
for d in sys.argv[1].split(","):
    c=psycopg.connect(U+d,autocommit=True,prepare_threshold=0)
    def q(s,*a):
        cur=c.execute(s,a); return cur.fetchall() if cur.description else []
    s="turn"; o=sys.argv[2]
    if not q("select 1 from pgqueue.streams where name=%s",s): q("select pgqueue.create_stream(%s)",s)
    elif q("select 1 from pgqueue.consumers where name='c' and stream_name=%s",s): q("select pgqueue.drop_consumer(%s,'c')",s)
    q("select pgqueue.create_consumer(%s,'c','latest',%s)",s,o)
    def go(k):
        for i in range(k):
            q(f"select pgqueue.send('{s}', repeat('x',200), p_key => %s::text)", None if o=="none" else f"k{i}")
            q("set track_functions='all'")
            r=q("select claim_id from pgqueue.receive(%s,'c',1)",s); q("select pgqueue.ack(%s)",r[0][0])
            q("set track_functions='none'")
    go(60); q("select pg_stat_reset()"); n=600; go(n); q("select pg_stat_force_next_flush()")
    print("==",d)
    for r in q("select schemaname||'.'||funcname, calls, total_time*1000/%s, self_time*1000/%s from pg_stat_user_functions where calls>0 order by self_time desc limit 26",n,n): print("%-40s %6d total %7.1f self %7.1f"%r)
