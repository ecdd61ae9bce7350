import psycopg, re, time
src=open('/work/wt/one/sql/queue/dealing.sql').read()
a=src.index("create or replace function _pgqueue.store_dealt"); b=src.index("end $$;",a)+8
f=src[a:b]
i=f.index("    with source as materialized"); j=f.index("    into v_res\n")
k=f.index("    from (select count(*) as n, sum(message_count)")
stmt=f[i:j]+f[j+len("    into v_res\n"):f.index(";",k)]
f2=f.replace("    v_res   record;\n","    v_res   record;\n    v_line text;\n",1)
f2=f2.replace(f[i:f.index(";",k)+1],"    for v_line in explain (analyze, costs off, timing on)\n"+stmt+"\n    loop raise notice '%', v_line; end loop;\n",1)
f2=f2[:f2.index("    o_hints := p_hints;\n    o_dealt := coalesce(v_res.messages, 0);")]+"    raise exception 'done';\nend $$;\n"
c=psycopg.connect("user=postgres host=/tmp/srv/data/data port=5432 dbname=one",autocommit=True,prepare_threshold=0)
def q(s,*a):
    cur=c.execute(s,a); return cur.fetchall() if cur.description else []
cfg=q("select proconfig from pg_proc where proname='store_dealt'")[0][0]; print(cfg)
c.execute(f2.encode())
for s in cfg or []:
    n,v=s.split('=',1); c.execute(f"alter function _pgqueue.store_dealt set {n} = {v}".encode())
c.add_notice_handler(lambda d: print(d.message_primary))
s=f"p_{time.time_ns()}"
q("select pgqueue.create_stream(%s)",s); q("select pgqueue.create_consumer(%s,'c','earliest',%s)",s,"key")
q(f"select count(pgqueue.send('{s}', repeat('x',200), p_key => 'k' || mod(i * 7919, 5000))) from generate_series(1,6000) i")
try: q("select count(*) from pgqueue.receive(%s,'c',100)",s)
except Exception as e: print(str(e)[:200])
q("select pgqueue.drop_stream(%s)",s)
