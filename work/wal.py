"""wal.py: WAL bytes and dead rows a message, both"""
import psycopg,sys
U="user=postgres host=/tmp/srv/data/data port=5432 dbname="
cases=[("none",1,0),("none",10,0),("none",100,0),("key",1,5000),("key",10,5000),("key",100,5000),("key",1,10),("key",10,10),("key",100,10),("stream",1,1),("stream",100,1)]
for o,size,keys in cases:
    out=[]
    for d in ("old","one"):
        c=psycopg.connect(U+d,autocommit=True,prepare_threshold=0)
        def q(s,*a):
            cur=c.execute(s,a); return cur.fetchall() if cur.description else []
        s="wal"
        if not q("select 1 from pgqueue.streams where name=%s",s): q("select pgqueue.create_stream(%s)",s)
        elif q("select 1 from pgqueue.consumers where name='c' and stream_name=%s",s): q("select pgqueue.drop_consumer(%s,'c')",s)
        q("select pgqueue.create_consumer(%s,'c','latest',%s)",s,o)
        calls={1:1024,10:400,100:200}[size]; n=calls*size
        q("select count(*) from pgqueue.send_batch(%s, array(select repeat('x',200) from generate_series(1,%s)), array(select 'k'||mod(i*7919,%s) from generate_series(1,%s) i))",s,n+20*size,max(keys,1),n+20*size)
        def go(k):
            got=0
            for _ in range(k):
                r=q("select claim_id, seq from pgqueue.receive(%s,'c',%s)",s,size)
                if not r: break
                q("select pgqueue.ack(%s)",r[0][0]); got+=len(r)
            return got
        go(10); q("vacuum"); q("checkpoint"); go(10)
        def st():
            q("select pg_stat_force_next_flush()")
            w=int(q("select wal_bytes - wal_fpi*8192 from pg_stat_get_backend_wal(pg_backend_pid())")[0][0])
            dd=q("select coalesce(sum(n_tup_upd + n_tup_del), 0)::bigint from pg_stat_user_tables where schemaname='pgqueue'")[0][0]
            return w,dd
        w0,d0=st(); g=go(calls); w1,d1=st()
        out.append(f"{d}: {(w1-w0)/g:7.1f} B {(d1-d0)/g:5.2f} dead")
    print(f"{o:7} keys {keys:5} by {size:4}: "+"   ".join(out),flush=True)
