"""Checks each plpgsql/sql function body by re-creating it with check_function_bodies, and plpgsql's check of expressions by a dry parse."""
import sys, psycopg
c = psycopg.connect(sys.argv[1], autocommit=True)
c.execute("set check_function_bodies = on"); c.execute("set search_path = pg_catalog, pg_temp")
bad = 0
for name, d in c.execute("select p.oid::regprocedure::text, pg_get_functiondef(p.oid) from pg_proc p where pronamespace in ('pgqueue'::regnamespace,'_pgqueue'::regnamespace) and prokind='f'").fetchall():
    try: c.execute(d)
    except psycopg.Error as e: bad += 1; print(name, '|', str(e)[:300])
print("bad", bad)
