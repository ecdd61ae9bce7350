import psycopg,sys
c=psycopg.connect("user=postgres host=/tmp/srv/data/data port=5432 dbname=one",autocommit=True)
cid=c.execute("select consumer_id from pgqueue.consumers where stream_name=%s",[sys.argv[1]]).fetchone()[0]
for key,place,no in c.execute("select key,place-(1::bigint<<61),bundle_no from pgqueue.consumer_messages where consumer_id=%s and lane=1000003 and place>=1::bigint<<61",[cid]).fetchall():
    print(key,place,no)
    for r in c.execute("select at::time,what,no,x from public.dbg where consumer_id=%s and key=%s order by at desc limit 20",[cid,key]).fetchall()[::-1]: print("   ",*r)
    print("   no:"); 
    for r in c.execute("select at::time,what,no,key,x from public.dbg where consumer_id=%s and no=%s order by at desc limit 16",[cid,place]).fetchall()[::-1]: print("   ",*r)
