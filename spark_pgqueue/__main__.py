"""`python -m spark_pgqueue`: the command line."""

from spark_pgqueue.command_line.cli import app

app(prog_name="pgqueue")
