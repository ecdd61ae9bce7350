"""buf(conn, statement): which tables and indexes it reads how many blocks of."""
def snap(conn):
    conn.execute("select pg_stat_force_next_flush()"); conn.execute("select pg_stat_clear_snapshot()")
    r = {}
    for n, b in conn.execute("select 'heap '||relname as n, heap_blks_hit+heap_blks_read as b from pg_statio_user_tables union all select 'idx '||indexrelname, idx_blks_hit+idx_blks_read from pg_statio_user_indexes union all select 'tup '||indexrelname, idx_tup_read from pg_stat_user_indexes union all select 'scans '||indexrelname, idx_scan from pg_stat_user_indexes union all select 'seqscan tup '||relname, seq_tup_read from pg_stat_user_tables"): r[n] = r.get(n, 0) + (b or 0)
    return r
def buf(conn, statement, args=None, top=14, show=None):
    a = snap(conn); conn.execute(statement, args); b = snap(conn)
    d = sorted(((b[k] - a.get(k, 0), k) for k in b), reverse=True)
    print("  ".join(f"{k} {v}" for v, k in d[:top] if v))
