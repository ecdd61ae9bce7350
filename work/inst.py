"""inst.py DB [dir]: a new database with the schema of the working directory."""
import sys, psycopg, re
sys.path.insert(0, sys.argv[2] if len(sys.argv) > 2 else "/work/wt/one")
from spark_pgqueue.postgres import schema
import spark_pgqueue; print(spark_pgqueue.__file__)
url = open("/tmp/srv/url").read()
with psycopg.connect(url, autocommit=True) as c:
    c.execute(f"drop database if exists {sys.argv[1]} with (force)"); c.execute(f"create database {sys.argv[1]}")
from psycopg.conninfo import make_conninfo
u = make_conninfo(url, dbname=sys.argv[1])
with psycopg.connect(u, autocommit=True) as c:
    schema.install(c)
print(u)
