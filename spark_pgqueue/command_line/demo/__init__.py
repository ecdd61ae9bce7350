"""The demo, as `pgqueue demo` runs it: a year of flights through Postgres and Spark, as a story.

    files ── publisher ──▶ flights ─┬─▶ daily      flights and delays of each day
                                    ├─▶ router ──▶ notices ─┬─▶ desk      delayed.*
                                    │                       └─▶ refunds   cancelled.*
                                    └─▶ airports   added later, over all that there is

The publisher, daily and router are Spark queries that run at the same time; desk is a worker in a
process of its own, which is killed in the middle and started again; refunds and airports receive
with the client. What each of them saw is compared with the same figures, computed from the file.

`flights` has the file and its figures, `queries` what Spark does, in the `session` of `session`,
`desk` what the worker does, `process` the process of it, `tally` the two others; `screen` is what
is shown, with the `picture`, and `story` all of it in its order.
"""

from spark_pgqueue.command_line.demo.flights import read_file

__all__ = ["read_file"]
