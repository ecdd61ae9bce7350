"""`python -m spark_pgqueue` is the command line `pgqueue`."""

from spark_pgqueue.cli import app

app(prog_name="pgqueue")
