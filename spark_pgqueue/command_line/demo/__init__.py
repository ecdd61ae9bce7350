"""The demo, `pgqueue demo`: a year of flights through Postgres and Spark.

    files ── publisher ──▶ flights ─┬─▶ daily      flights and delays of each day
                                    ├─▶ router ──▶ notices ─┬─▶ desk      delayed.*
                                    │                       └─▶ refunds   cancelled.*
                                    └─▶ airports   added later, from the first message on

The publisher, daily and router are Spark queries that run at the same time. desk is a worker in a
separate process, which is killed and started again. refunds and airports receive with the client.
The figures of each consumer are compared with those of the file.

`flights` has the file and its figures; `queries` the Spark queries, and `session` their session;
`desk` the handler of the worker, and `process` its process; `tally` the two other consumers;
`screen` and `picture` the output; and `story` runs all of it.
"""

from spark_pgqueue.command_line.demo.flights import read_file

__all__ = ["read_file"]
