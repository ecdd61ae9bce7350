"""The worker: it calls a handler for each message of a consumer, and settles the message.

from spark_pgqueue import Consumer, Reject

def bill(message):
    if not known(message.data):
        raise Reject("no such customer")
    ...

Consumer("postgresql://me@host/db", "orders", "billing").run(bill, concurrency=8)
"""

from spark_pgqueue.worker.consumer import Consumer
from spark_pgqueue.worker.handlers import handler
from spark_pgqueue.worker.supervision import supervised
from spark_pgqueue.worker.verdicts import Defer, Reject, Retry

__all__ = ["Consumer", "Defer", "Reject", "Retry", "handler", "supervised"]
