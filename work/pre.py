import psycopg, re, time, sys
o,size,keys,n,want=sys.argv[1],int(sys.argv[2]),int(sys.argv[3]),int(sys.argv[4]),int(sys.argv[5])
src=open(sys.argv[6] if len(sys.argv)>6 else '/tmp/ci/sql/queue/dealing.sql').read()
a=src.index("create or replace function _pgqueue.store_dealt"); b=src.index("end $$;",a)+8
f=src[a:b]
i=f.index("    with source as materialized"); k=f.index("    select l.*, exists (select from put"); e=f.index(";",k)
w=f[i:k]
# top-level CTE ends: lines starting with "    ), name as"
names=re.findall(r"^    (?:with |\), )(\w+) as", w, re.M)
pos=[m.start() for m in re.finditer(r"^    \), (\w+) as", w, re.M)]
variants=[]
for idx,nm in enumerate(names):
    end=pos[idx] if idx<len(pos) else w.rindex("    )")
    body=w[:end]+"    )"
    # force materialized
    body=re.sub(r"^(    (?:with |\), ))(\w+) as (?:materialized )?\(", r"\1\2 as materialized (", body, flags=re.M) if nm not in () else body
    variants.append((nm, body+f" select count(*) from {nm} into v_n"))
code="    if v_hit then\n for v_rep in 1..3 loop\n"
for nm,st in variants:
    if nm in("demoted",) : continue
    code+=f"v_t := clock_timestamp();\n begin {st};\n v_all := v_all || format('{nm} %s: %s ms', v_n, round(extract(epoch from clock_timestamp()-v_t)*1000,2)) || E'\\n'; raise exception 'x' using errcode='PQ088'; exception when sqlstate 'PQ088' then null; end;\n"
code+=" end loop; raise exception '%', v_all; end if;\n"
f2=f.replace("    v_res   record;\n","    v_res   record;\n  v_n bigint; v_rep int;  v_all text := '';\n v_t timestamptz := clock_timestamp(); v_hit boolean := current_setting('x.hit', true) = 'yes';\n",1)
f2=f2.replace(f[i:e],code+f[i:e],1)
c=psycopg.connect("user=postgres host=/tmp/srv/data/data port=5432 dbname=one",autocommit=True,prepare_threshold=0)
def q(s,*a):
    cur=c.execute(s,a); return cur.fetchall() if cur.description else []
cfg=q("select proconfig from pg_proc where proname='store_dealt'")[0][0]
def put(x):
    c.execute(x.encode())
    for s in cfg or []:
        nn,v=s.split('=',1); c.execute(f"alter function _pgqueue.store_dealt set {nn} = {v}".encode())
put(f2)
s="figures"
if q("select 1 from pgqueue.consumers where name='c'"): q("select pgqueue.drop_consumer(%s,'c')",s)
q("select pgqueue.create_consumer(%s,'c','latest',%s)",s,o)
q("select count(*) from pgqueue.send_batch(%s, array(select repeat('x',200) from generate_series(1,%s)), array(select 'k'||mod(i*7919,%s) from generate_series(1,%s) i))",s,n*size,max(keys,1),n*size)
try:
  for i in range(n):
    if i==want: q("set x.hit='yes'"); q("set plan_cache_mode=force_generic_plan")
    r=q("select claim_id, seq from pgqueue.receive(%s,'c',%s)",s,size); q("select pgqueue.ack(%s)",r[0][0])
except Exception as ex:
    lines=str(ex).split("\n"); print("\n".join(l for l in lines[-40:] if " ms" in l))
put(f)
