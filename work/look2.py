import psycopg, time
c=psycopg.connect("dbname=one user=postgres host=/tmp/srv/data/data port=5432",autocommit=True)
q=lambda s,*a:c.execute(s,a).fetchall()
for s in q("select stream_name, consumer_id, name from pgqueue.consumers where stream_name like 's!_%%' escape '!' order by 2 desc limit 1"):
    n=0; t=time.time()
    while time.time()-t<20:
        r=q("select claim_id, seq from pgqueue.receive(%s,%s,20)",s[0],s[2])
        if r: q("select pgqueue.ack(%s)",r[0][0]); n+=len(r)
        else:
            q("select pgqueue.retry(%s,%s)",s[0],s[2])
            if not q("select 1 from pgqueue.consumer_messages where consumer_id=%s limit 1",s[1]): break
            time.sleep(.1)
    print(s,'got',n,time.time()-t,q("select count(*) from pgqueue.consumer_messages where consumer_id=%s",s[1]))
