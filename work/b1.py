import sys; sys.path.insert(0,'/work/wt/one/work')
import psycopg
from buf import buf, snap
u="dbname=one user=postgres host=/tmp/srv/data/data port=5432"
c=psycopg.connect(u,autocommit=True)
S="b1"
if c.execute("select 1 from pgqueue.streams where name=%s",[S]).fetchall(): c.execute("select pgqueue.drop_stream(%s)",[S])
c.execute("select pgqueue.create_stream(%s)",[S])
mode=sys.argv[1]
if mode=='tok':
    c.execute("select pgqueue.create_consumer(%s,'c','earliest','key',p_settings=>'{\"per_key_interval\": \"1 us\"}')",[S])
else:
    c.execute("select pgqueue.create_consumer(%s,'c','earliest','key')",[S])
if mode=='slots':
    c.execute("set application_name = '%s'"%('x'*60))
    c.execute("select count(pgqueue.send(%s,'x',i::text)) from generate_series(1,3200) i",[S])
else:
    c.execute("select pgqueue.send(%s,'x','held meanwhile')",[S])
    c.execute("select pgqueue.send_batch(%s,array_fill('x'::text,array[3000]),p_keys=>array_fill('hot'::text,array[3000]))",[S])
o=psycopg.connect(u); o.execute("set transaction isolation level repeatable read"); o.execute("select 1")
if mode=="wait": c.execute("select * from pgqueue.claim(%s,'c',1)",[S])
c.execute("create or replace function pg_temp.work(n int) returns void language plpgsql as $$ begin for i in 1..n loop perform pgqueue.ack(claim_id) from pgqueue.claim('b1','c',1); end loop; end $$")
buf(c,"select pg_temp.work(100)")
for _ in range(8 if mode!='slots' else 5): c.execute("select pg_temp.work(%s)",[100 if mode!='slots' else 500])
print('---')
buf(c,"select pg_temp.work(100)",show=sys.argv[2] if len(sys.argv)>2 else None)
o.rollback(); c.execute("select pgqueue.drop_stream(%s)",[S])
