import sys, psycopg
c = psycopg.connect(f"dbname={sys.argv[1]} user=postgres host=/tmp/srv/data/data port=5432", autocommit=True)
c.execute("set search_path = pg_catalog, pg_temp"); c.execute("set check_function_bodies = off")
for f in sys.argv[2:]:
    try: c.execute(open(f).read())
    except psycopg.Error as e: print(f, e)
