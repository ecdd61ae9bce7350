"""walk.py DB ORDERING SEED CALLS: one session, random calls, and after each call the invariants."""
import random, sys, psycopg, json, traceback
db, ordering, seed, calls = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rnd = random.Random(seed)
c = psycopg.connect(f"dbname={db} user=postgres host=/tmp/srv/data/data port=5432", autocommit=True)
q = lambda s, *a: c.execute(s, a).fetchall()
S = f"walk_{ordering}_{seed}"
if q("select 1 from pgqueue.streams where name=%s", S): q("select pgqueue.drop_stream(%s)", S)
q("select pgqueue.create_stream(%s)", S)
settings = {"limit": {"per_key_limit": 2}, "one": {"per_key_limit": 1}, "fair": {"fair": True}, "interval": {"per_key_interval": "30 ms", "per_key_burst": 2},
            "keyint": {"per_key_interval": "30 ms", "per_key_burst": 2}, "keylim": {"per_key_limit": 3}, "latest": {"per_key_latest": True}, "keylatest": {"per_key_latest": True}}.get(ordering, {})
real = ordering if ordering in ("key", "stream", "none") else ("key" if ordering.startswith("key") else "none")
settings["backoff"] = "constant"; settings["max_deliver_count"] = "never"
cid = q("select pgqueue.create_consumer(%s, 'c', 'earliest', %s, p_settings => %s)", S, real, json.dumps(settings))[0][0]
keyed = q("select _pgqueue.is_keyed(way) from pgqueue.consumers where consumer_id = %s", cid)[0][0]
h = dict(q("select key, hashtextextended(key,0) from unnest(array['k0','k1','k2','k3','k4','k5']) key"))
claims, log, keys, done, arr = {}, [], {}, set(), {}
prev = []
lines = {}
LANES = (1000001, 1000002, 1000003, 1000004, 1000005)
def rows():
    return c.cursor(row_factory=psycopg.rows.namedtuple_row).execute("select *, (select array_agg(x order by x) from unnest(seqs) g, generate_series(lower(g), upper(g)-1) x) as ss from pgqueue.consumer_messages where lane <> 1000005 and consumer_id = %s order by bundle_no", (cid,)).fetchall()
def khash(s):
    if real == 'stream': return 0
    return None if keys[s] is None else h[keys[s]]
def check():
    rs = rows(); ids = {r.bundle_no: r for r in rs}; seen = {}; firsts = {}
    for r in rs:
        ss = r.ss or []
        assert len(ss) == r.message_count, f"count {r}"
        for s in ss:
            assert s not in seen, f"twice {s} {r} {seen[s]}"
            seen[s] = r
            arr.setdefault(s, r.arrival_no)
        if r.token is None: assert ss, f"empty {r}"
        if r.head is not None:
            hd = ids.get(r.head); assert hd and hd.token == r.token and r.bundle_no in (hd.members or []), f"head of {r}: {hd}"
        if r.members:
            pass
        assert r.lane != 1000002 or r.token is not None, f"held free {r}"
        if keyed and r.lane in (1000001, 1000003) and r.key is not None:
            if r.lane == 1000001 or r.place != -2: firsts[r.key] = firsts.get(r.key, 0) + 1
            if r.lane == 1000003 and r.place >= 1 << 61: assert (ids.get(r.place - (1 << 61)) and ids[r.place - (1 << 61)].key == r.key) or q("select 1 from pgqueue.consumer_messages where consumer_id=%s and lane=1000005 and key=%s", cid, r.key), f"nobody looks at {r}"
            assert {khash(s) for s in ss} == {r.key}, f"key {r}"
        if keyed and r.lane == 0 and r.keys is not None and not r.shrunk:
            have = sorted(khash(s) for s in ss if khash(s) is not None)
            if real == 'none': assert sorted(r.keys) == have, f"keys {have} {r}"
            else: assert sorted(r.keys) == sorted(set(have)), f"keys {have} {r}"
    if keyed:
        for k in {r.key for r in rs if r.key is not None and r.lane in (1000001, 1000003)}:
            if firsts.get(k) != 1:
                print("BAD", k); [print("   was", x) for x in prev if x[0] == k]; [print("   now", tuple(r)[1:12], r.token, r.keys, r.ss) for r in rs if r.key == k or k in (r.keys or [])]
            assert firsts.get(k) == 1, f"key {k} has {firsts.get(k)} firsts"
        prev[:] = [(r.key, tuple(r)[1:12], r.ss) for r in rs if r.key is not None]
    taken = {s for s, in q("select s from pgqueue.publications p, unnest(p.seqs) g, generate_series(lower(g), upper(g)-1) s where stream_id = (select stream_id from pgqueue.streams where name = %s) and publication_id < (select next_publication from pgqueue.consumer_cursors where consumer_id = %s) and not exists (select from pgqueue.consumer_gaps g where g.consumer_id = %s and g.publication_ids @> p.publication_id)", S, cid, cid)}
    lost = {s for s in keys if s in taken} - set(seen) - done
    if 'latest' not in ordering: assert not lost, f"lost {sorted(lost)[:5]}"
    assert not set(seen) & done, f"again {set(seen) & done}"
    hints = c.execute("select (hints).lanes is null, (hints).lanes_from from pgqueue.consumer_cursors where consumer_id = %s order by version desc limit 1", (cid,)).fetchone()
    if real in ("key", "stream"):
        by = {}
        for s in sorted(seen, key=lambda s: (seen[s].arrival_no, s)): by.setdefault(khash(s), []).append(s)
        for k, ss in by.items():
            if k is not None:
                old = [s for s in lines.get(k, []) if s in seen]
                assert [s for s in ss if s in set(old)] == old, f"order of {k}: {ss}, was {old}"
                lines[k] = ss
        for k, ss in by.items():
            if k is None: continue
            for i, s in enumerate(ss):
                r = seen[s]
                can = r.token is not None or (r.lane == 0 and (r.behind is None or r.behind not in ids))
                if can:
                    for e in ss[:i]:
                        o = seen[e]
                        assert o.bundle_no == r.bundle_no or (o.token is not None and o.token == r.token), f"{s} of {k} in {r} while {e} in {o}"
    if ordering in ("limit", "one", "keylim"):
        lim = settings["per_key_limit"]; n = {}
        for r in rs:
            if r.token is not None or (r.lane == 0 and (r.behind is None or r.behind not in ids)):
                for s in r.ss or []:
                    if khash(s) is not None: n[khash(s)] = n.get(khash(s), 0) + 1
        assert all(v <= lim for v in n.values()), f"limit {n}"
    # hints hide nothing
    lanes = c.execute("select l.lane, l.place, l.first_seq, l.low_place, l.low_seq from pgqueue.consumer_cursors k, unnest((k.hints).lanes) l where k.consumer_id = %s", (cid,)).fetchall()
    by_lane = {l[0]: l for l in lanes}
    if hints and not hints[0]:
        lf = hints[1]
        for r in rs:
            if r.lane in LANES: continue
            l = by_lane.get(r.lane)
            if l is None: assert lf is not None and r.lane >= lf, f"lane hidden {r} {lanes} {lf}"; continue
            assert (r.place, r.first_seq) >= (l[3], l[4]), f"below low {r} {l}"
            if r.token is None: assert l[1] is not None and (r.place, r.first_seq) >= (l[1], l[2]), f"below floor {r} {l}"
def held(cl): return [s for s, in q("select x from _pgqueue.held(_pgqueue.number_in(%s), _pgqueue.token_in(%s)) b, unnest(b.seqs) g, generate_series(lower(g), upper(g)-1) x", cl, cl)]
def age():
    c.execute("update pgqueue.consumer_messages set claimed_at = claimed_at - interval '2 s' where consumer_id = %s and token is not null", (cid,))
    c.execute("update pgqueue.consumer_cursors set hints.probe_at = '-infinity', hints.quiet_until = null where consumer_id = %s", (cid,))
def run():
  global claims
  for i in range(calls):
    x = rnd.random()
    if x < .2:
        for _ in range(rnd.choice([1, 1, 3, 12])):
            k = None if rnd.random() < .05 else f"k{rnd.randrange(6)}"
            d = rnd.random() < .05
            pr = rnd.choice([0,0,0,1,-1]) if real == 'none' else 0
            s = q("select pgqueue.send(%s, 'x', p_key => %s, p_priority => %s, p_deliver_at => case when %s then clock_timestamp() + interval '20 ms' end)", S, k, pr, d)[0][0]
            keys[s] = k
        log.append(f"send .. {s}")
    elif x < .55:
        n = rnd.choice([1, 1, 2, 5, 20, 300, 2000])
        r = q("select claim_id, seq, key from pgqueue.receive(%s, 'c', %s)", S, n)
        log.append(f"receive {n}: {r[0][0] if r else None} {[y[1] for y in r]}")
        assert len(r) <= n
        if r:
            claims[r[0][0]] = [y[1] for y in r]
            assert sorted(held(r[0][0])) == sorted(y[1] for y in r), "claimed other than returned"
            if real in ("key", "stream"):
                last = {}
                for _, s, k in r:
                    kk = 0 if real == "stream" else k
                    if kk is not None: assert last.get(kk, 0) < s or True, "order in claim"; last[kk] = s
    elif x < .62:
        age(); log.append("age")
    elif x < .64:
        sq = rnd.sample(sorted(keys), min(len(keys), 3)) if keys else []
        if sq:
            n = q("select pgqueue.cancel(%s, 'c', %s)", S, sq)[0][0]; log.append(f"cancel {sq}: {n}")
            left = {s for r in rows() for s in r.ss or []}
            done.update(s for s in sq if s not in left)
    elif x < .66:
        sq = rnd.sample(sorted(keys), min(len(keys), 3)) if keys else []
        if sq: n = q("select pgqueue.postpone(%s, 'c', %s, clock_timestamp() + interval '15 ms')", S, sq)[0][0]; log.append(f"postpone {sq}: {n}")
    elif x < .67:
        n = q("select pgqueue.retry(%s, 'c')", S)[0][0]; log.append(f"retry {n}")
    elif x < .68:
        c.execute("update pgqueue.consumer_cursors set hints = null where consumer_id = %s", (cid,)); log.append("hints lost")
    elif x < .69 and real == 'none' and not keyed:
        r = q("""select claim_id, seq, key from pgqueue.receive_where(%s, 'c', '$.key == "k1"', 3)""", S)
        log.append(f"where: {r}")
        if r: claims[r[0][0]] = [y[1] for y in r]; assert all(y[2] == 'k1' for y in r)
    elif claims:
        cl = rnd.choice(list(claims)); ss = claims[cl]
        part = [s for s in ss if rnd.random() < .5] or ss[:1]
        y = rnd.random()
        if y < .3:
            n = q("select pgqueue.ack(%s)", cl)[0][0]; log.append(f"ack {cl}: {n}"); done.update(ss); del claims[cl]; assert n == len(ss), (n, len(ss))
        elif y < .55:
            n = q("select pgqueue.ack(%s, %s)", cl, part)[0][0]; log.append(f"ack {cl} {part}: {n}"); done.update(part); claims[cl] = [s for s in ss if s not in part]; assert n == len(part), (n, part)
        elif y < .6:
            n = q("select pgqueue.extend(%s)", cl)[0][0]; log.append(f"extend {cl}: {n}"); assert n == len(ss)
        elif y < .75:
            d = rnd.choice([None, '10 ms']); n = q("select pgqueue.nack(%s, %s, %s)", cl, part, d)[0][0]; log.append(f"nack {cl} {part} {d}: {n}")
        elif y < .85:
            d = rnd.choice([None, '10 ms']); n = q("select pgqueue.nack(%s, null, %s)", cl, d)[0][0]; log.append(f"nack {cl} {d}: {n}"); 
        elif y < .9:
            n = q("select pgqueue.defer(%s, %s, '5 ms', '1')", cl, part)[0][0]; log.append(f"defer {cl} {part}: {n}")
        else:
            c.execute("update pgqueue.consumer_messages set lease_until = clock_timestamp() - interval '1 ms' where consumer_id = %s and token = _pgqueue.token_in(%s) and lease_until is not null", (cid, cl))
            c.execute("update pgqueue.consumer_messages set place = _pgqueue.place_at(lease_until) where consumer_id = %s and token = _pgqueue.token_in(%s) and lane = 1000002 and lease_until is not null", (cid, cl))
            c.execute("update pgqueue.consumer_cursors set hints.probe_at = '-infinity', hints.quiet_until = null, hints.held_from = 'epoch' where consumer_id = %s", (cid,))
            log.append(f"end lease {cl}")
    for cl in list(claims):
        now = set(held(cl)); claims[cl] = [s for s in claims[cl] if s in now]
        if not claims[cl]: del claims[cl]
    if 'latest' in ordering:
        pass
    check()
  # drain
  for cl in list(claims): q("select pgqueue.ack(%s)", cl); done.update(claims[cl])
  import time
  for _ in range(150):
    r = q("select claim_id, seq from pgqueue.receive(%s, 'c', %s)", S, rnd.choice([1, 3, 50]))
    if r: q("select pgqueue.ack(%s)", r[0][0]); done.update(s for _, s in r); check()
    elif not rows() and not (set(keys) - done): break
    else: time.sleep(.005); age()
  else:
    if 'latest' not in ordering: raise AssertionError(f"stuck: {sorted(set(keys) - done)[:10]} {rows()[:5]}")
try:
    run()
    print(ordering, "seed", seed, "ok", len(done), "done", len(keys), "sent")
except (AssertionError, psycopg.Error) as e:
    print(ordering, "seed", seed, "FAULT", str(e)[:1500])
    for l in log[-int(sys.argv[5]) if len(sys.argv)>5 else -14:]: print("   ", l[:300])
    if not isinstance(e, AssertionError): traceback.print_exc(limit=3)
    sys.exit(1)
