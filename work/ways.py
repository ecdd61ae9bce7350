"""How many SQL functions one receive and one ack go through, by variant.
PYTHONPATH=$P FOLDER=<empty folder> python ways.py   (starts an embedded server in FOLDER)"""
import os, uuid, collections
from spark_pgqueue import embedded
from spark_pgqueue.postgres import connection, schema
CALLED = ("select schemaname || '.' || funcname, calls from pg_stat_xact_user_functions where schemaname in ('pgqueue','_pgqueue','pgmq') and funcname !~ '^(limit|max)_'")
VARIANTS = [  # name, create_consumer arguments, messages before, p_max
    ("none, new, 1", {}, 0, 1), ("none, slot, 1", {}, 50, 1), ("none, backlog, 10", {}, 5000, 10), ("none, backlog, 1000", {}, 5000, 1000),
    ("none, priorities, 1", {"_prio": True}, 50, 1),
    ("key, new, 1", {"p_ordering": "key"}, 0, 1), ("key, slot, 1", {"p_ordering": "key"}, 50, 1), ("key, backlog, 10", {"p_ordering": "key"}, 5000, 10), ("key, backlog, 1000", {"p_ordering": "key"}, 5000, 1000),
    ("stream, new, 1", {"p_ordering": "stream"}, 0, 1), ("stream, slot, 1", {"p_ordering": "stream"}, 50, 1), ("stream, 1000", {"p_ordering": "stream"}, 5000, 1000),
    ("per_key_limit, 1", {"p_settings": '{"per_key_limit": 2}'}, 50, 1), ("per_key_interval, 1", {"p_settings": '{"per_key_interval": "1 s"}'}, 50, 1),
    ("key + per_key_limit, 1", {"p_ordering": "key", "p_settings": '{"per_key_limit": 2}'}, 50, 1),
    ("fair, 1", {"p_settings": '{"fair": true}'}, 50, 1), ("per_key_latest, 1", {"p_settings": '{"per_key_latest": true}'}, 50, 1), ("per_key_capacity, 1", {"p_settings": '{"per_key_capacity": 1000}'}, 50, 1),
    ("max_in_flight, 1", {"p_settings": '{"max_in_flight": 10}'}, 50, 1), ("rate_limit, 1", {"p_settings": '{"rate_limit": 1000, "rate_interval": "1 s"}'}, 50, 1),
    ("max_backlog, 1", {"p_settings": '{"max_backlog": 100000}'}, 50, 1), 
    ("keep_history, 1", {"p_settings": '{"keep_history": "1 day"}'}, 50, 1), ("filtered, 1", {"p_where": '$.headers.a == 1'}, 50, 1),
    ("receive_where, 1", {"_where": True}, 50, 1), ("reader (Spark), 1000", {"_reader": True}, 5000, 1000), ("pgmq.read + delete, 1", {"_pgmq": True}, 50, 1),
]
union_r, union_a = set(), set()
table = []
with embedded.start(os.environ["FOLDER"]) as server, connection.connect(server.url) as conn:
    schema.install(conn)
    try:
        conn.execute((schema.sql_directory() / "pgmq").exists() and "select 1")
        schema.install(conn, pgmq=True)
    except Exception as error: print("pgmq:", type(error).__name__, error)
    q = lambda s, *a: conn.execute(s, a).fetchall()
    conn.execute("set track_functions = 'all'")
    def counted(f):
        with conn.transaction():
            before = dict(q(CALLED)); out = f(); after = dict(q(CALLED))
        d = {n: c - before.get(n, 0) for n, c in after.items() if c > before.get(n, 0)}
        return out, d
    for n, (name, how, before, size) in enumerate(VARIANTS):
        stream = f"s{n}"; how = dict(how); prio = how.pop("_prio", False); where = how.pop("_where", False); reader = how.pop("_reader", False); pgmq = how.pop("_pgmq", False)
        if pgmq:
            try: q("select pgmq.create(%s)", stream)
            except Exception as e: print(name, e); continue
        else:
            q("select pgqueue.create_stream(%s)", stream)
            args = ", ".join(f"{k} => %s" for k in how)
            (cid,) = q(f"select pgqueue.create_consumer(%s, 'c', p_start => 'earliest'{', ' + args if args else ''})", stream, *how.values())[0]
        def send(k):
            for i in range(0, k, 500):
                m = min(500, k - i)
                if pgmq:
                    q("select pgmq.send_batch(%s, array(select '{\"a\":1}'::jsonb from generate_series(1, %s)))", stream, m)
                elif m < 100:
                    for j in range(m): q("select pgqueue.send(%s, 'x', p_key => %s, p_headers => '{\"a\": 1}', p_priority => %s)", stream, f"k{(i+j)%97}", j % 3 if prio else 0)
                else: q("select pgqueue.send_batch(%s, array(select 'x' from generate_series(1,%s) g), p_keys => array(select 'k' || g %% 97 from generate_series(1,%s) g))", stream, m, m)
        rid = uuid.uuid4(); start = [0, 0]
        def one():
            if pgmq:
                (m,), r = counted(lambda: q("select msg_id from pgmq.read(%s, 30, 1)", stream))
                _, a = counted(lambda: q("select pgmq.delete(%s, %s::bigint)", stream, m[0]))
            elif reader:
                rows, r = counted(lambda: (q("select * from pgqueue.reader_claim(%s,%s,%s,%s,%s)", rid, cid, start[0], start[1], size)))
                b = start[0]; start[:] = rows[-1][0], rows[-1][1]
                _, a = counted(lambda: (q("select * from pgqueue.reader_resume(%s,%s,%s,%s)", rid, cid, b, start[0]), q("select * from pgqueue.reader_plan(%s,%s::bigint,%s::bigint)", rid, b, start[0])))
            else:
                sql = "select claim_id, seq from pgqueue.receive_where(%s,'c','$.headers.a == 1', %s)" if where else "select claim_id, seq from pgqueue.receive(%s,'c',%s)"
                rows, r = counted(lambda: q(sql, stream, size))
                if not rows: return None
                _, a = counted(lambda: q("select pgqueue.ack(%s)", rows[0][0]))
            return r, a
        # warm: several rounds, keep the most frequent way and the longest way
        send(max(before, 1)); seen = collections.Counter(); worst = None; ds = set(); da = set()
        for i in range(24 if size < 100 else 4):
            if not before: send(1)
            try: x = one()
            except Exception as e: conn.rollback() if not conn.autocommit else None; print(name, type(e).__name__, e); break
            if x is None: break
            r, a = x; key = (tuple(sorted(r)), tuple(sorted(a)), sum(r.values()), sum(a.values())); seen[key] += 1
            ds |= set(r); da |= set(a)
            if worst is None or sum(r.values()) > worst[1]: worst = (len(r), sum(r.values()))
        if not seen: continue
        k = seen.most_common(1)[0][0]
        table.append((name, len(k[0]), k[2], len(k[1]), k[3], worst[0], worst[1], len(ds | da)))
        union_r |= ds; union_a |= da
        print("%-24s usual: receive %3d functions %4d calls, ack %2d functions %3d calls; longest receive %3d functions %4d calls; all seen %d" % table[-1], flush=True)
    print("union of functions over all variants:", len(union_r | union_a), "receive", len(union_r), "ack", len(union_a))
