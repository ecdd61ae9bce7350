"""The Python client: the functions of the schema pgqueue, with Python's types.

    with spark_pgqueue.connect("postgresql://me@host/db") as queue:
        queue.create_stream("orders", if_not_exists=True)
        queue.create_consumer("orders", "billing", if_not_exists=True)
        queue.send("orders", "order 1", key="customer 7")

        claim = None
        while claim := queue.receive("orders", "billing", max_messages=100, ack=claim):
            for message in claim.messages:
                bill(message.data)

Each call is one statement (one that waits makes several), and a transaction of its own unless it is
made inside of `with queue.transaction():`. To send in the same transaction as other work, use the
connection that does this work: `Client(connection).send(...)`.
"""

from spark_pgqueue.client.asynchronous import AsyncClaim, AsyncClient, AsyncGroup, connect_async
from spark_pgqueue.client.client import Client, connect
from spark_pgqueue.client.descriptions import ConsumerDescription, StreamDescription
from spark_pgqueue.client.groups import Group
from spark_pgqueue.client.messages import (
    Batch,
    Claim,
    DeadLetters,
    DeadMessage,
    Done,
    Explanation,
    Failure,
    Message,
    Outcome,
    PeekedMessage,
    PublishedMessage,
    StoredMessage,
)
from spark_pgqueue.client.rates import Rates, rates
from spark_pgqueue.client.results import (
    Archive,
    Binding,
    Capture,
    ConsumerHealth,
    ConsumerInfo,
    ConsumerStats,
    GroupStats,
    KeyStats,
    Look,
    OpenClaim,
    PartitionStats,
    Position,
    Retention,
    Schedule,
    Stream,
)

__all__ = [
    "Archive",
    "AsyncClaim",
    "AsyncClient",
    "AsyncGroup",
    "Batch",
    "Binding",
    "Capture",
    "Claim",
    "Client",
    "ConsumerDescription",
    "ConsumerHealth",
    "ConsumerInfo",
    "ConsumerStats",
    "DeadLetters",
    "DeadMessage",
    "Done",
    "Explanation",
    "Failure",
    "Group",
    "GroupStats",
    "KeyStats",
    "Look",
    "Message",
    "OpenClaim",
    "Outcome",
    "PartitionStats",
    "PeekedMessage",
    "Position",
    "PublishedMessage",
    "Rates",
    "Retention",
    "Schedule",
    "StoredMessage",
    "Stream",
    "StreamDescription",
    "connect",
    "connect_async",
    "rates",
]
