"""Keeps a server of PostgreSQL 18 in /tmp/srv; prints its url."""
import sys, time
from spark_pgqueue import embedded
with embedded.start("/tmp/srv/data") as s:
    open("/tmp/srv/url","w").write(s.url)
    while True: time.sleep(3600)
