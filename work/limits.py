import psycopg,sys,time
db=sys.argv[1]
c=psycopg.connect(f"user=postgres host=/tmp/srv/data/data port=5432 dbname={db}",autocommit=True)
for o in ('none','key'):
    S="lim_"+o
    if c.execute("select 1 from pgqueue.streams where name=%s",[S]).fetchall(): c.execute("select pgqueue.drop_stream(%s)",[S])
    c.execute("select pgqueue.create_stream(%s)",[S]); c.execute("select pgqueue.create_consumer(%s,'c','earliest',%s,p_settings=>'{\"per_key_limit\": 1}')",[S,o])
    for _ in range(10): c.execute("select pgqueue.send_batch(%s,array_fill('x'::text,array[10000]),p_keys=>array_fill('A'::text,array[10000]))",[S])
    c.execute("select pgqueue.send(%s,'x','B')",[S])
    t=time.time(); n=0
    while n<200:
        n+=1
        r=c.execute("select claim_id,key from pgqueue.receive(%s,'c',10)",[S]).fetchall()
        if not r: print('nothing',n); continue
        if any(x[1]=='B' for x in r): break
        c.execute("select pgqueue.ack(%s)",[r[0][0]])
    print(db,o,"B after",n,round(time.time()-t,2),"s"); c.execute("select pgqueue.drop_stream(%s)",[S])
