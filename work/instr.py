"""instr.py DIR [filter] [warm] [calls]: instructions (callgrind) of receive + ack per message, for the tree DIR."""
import sys, time
D=sys.argv[1]; sys.path.insert(0,D)
import psycopg
from spark_pgqueue.postgres import schema
from tests.benchmarks import instructions as I
CASES=[("none",1,0),("none",10,0),("key",1,5000),("key",10,5000),("key",100,5000),("key",1,10),("key",10,10),("key",100,10),("stream",1,1)]
if len(sys.argv)>2 and sys.argv[2]: CASES=[x for x in CASES if any(f in str(x) for f in sys.argv[2].split("|"))]
W=int(sys.argv[3]) if len(sys.argv)>3 else 140
C=int(sys.argv[4]) if len(sys.argv)>4 else 512
import shutil, glob, re, tempfile
orig=tempfile.TemporaryDirectory
class Keep(orig):
    def cleanup(self):
        pass
with I.server() as (url, counted):
    with psycopg.connect(url,autocommit=True) as c: c.execute("create database counted")
    conn=psycopg.connect(url,dbname="counted",autocommit=True,prepare_threshold=0)
    schema.install(conn)
    for f,(usual,rare) in I.RARELY.items():
        (d,)=conn.execute(f"select pg_get_functiondef('_pgqueue.{f}'::regproc)").fetchone()
        if usual in d: conn.execute(d.replace(usual,rare))
        else: print("no",f)
    for o,size,keys in CASES:
        s=f"m_{time.time_ns()}"
        conn.execute("select pgqueue.create_stream(%s)",[s]); conn.execute("select pgqueue.create_consumer(%s,'c','earliest',%s)",[s,o])
        calls=C if size==1 else (C//2 if size==10 else C//8); warm=W if size==1 else W//2 if size==10 else W//8
        n=(calls+warm)*size
        k="'k' || mod(i * 7919, %s)"%keys if keys else "null::text"
        conn.execute(f"select count(pgqueue.send('{s}', repeat('x',200), p_key => {k})) from generate_series(1,{n}) i")
        conn.execute("vacuum analyze")
        w=psycopg.connect(url,dbname="counted",autocommit=True,prepare_threshold=0)
        def go(calls):
            got=0
            while got<calls*size:
                r=w.execute("select claim_id, seq from pgqueue.receive(%s,'c',%s)",[s,size]).fetchall()
                assert r, "empty"
                w.execute("select pgqueue.ack(%s)",[r[0][0]]); got+=len(r)
        go(warm)
        x=counted(w.info.backend_pid, lambda: go(calls))/(calls*size)
        print(f"{o:7} keys {keys:5} by {size:4}: {x:12,.0f}",flush=True)
        for f in glob.glob("/tmp/pgqueue-counts-*/out.%s.*" % w.info.backend_pid): shutil.copy(f, f"/tmp/cg.{D.strip(chr(47)).replace(chr(47),chr(95))}.{o}.{keys}.{size}")
        w.close()
        conn.execute("select pgqueue.drop_stream(%s)",[s])
    conn.close()
