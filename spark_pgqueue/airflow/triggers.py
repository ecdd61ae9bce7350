"""A trigger of Airflow that waits for messages, and the provider by which Airflow finds it.

MessageQueueTrigger(scheme="pgqueue", stream="orders", consumer="billing")
"""

# Airflow is not among what this package is checked with.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import psycopg
from airflow.providers.common.messaging.providers.base_provider import BaseMessageQueueProvider
from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from spark_pgqueue.client import AsyncClient, Message, arguments, connect_async
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.retrying import is_worth_a_retry
from spark_pgqueue.printable import warn

_WAIT = timedelta(minutes=1)  # for messages: a cancelled wait ends at once
_PAUSE = 2.0  # seconds until the next try, while Postgres is away


class PgQueueProvider(BaseMessageQueueProvider):
    """Gives Airflow the trigger of this package for the scheme pgqueue."""

    scheme = "pgqueue"

    def trigger_class(self) -> type[BaseEventTrigger]:
        return PgQueueTrigger


class PgQueueTrigger(BaseEventTrigger):
    """Claims messages, and makes an event of each claim.

    A claim is acknowledged when Airflow requests the next event. If it crashes before that, the
    messages are redelivered after the visibility timeout, and cause another event.

    Args:
        stream: the stream's name.
        consumer: the consumer's name.
        max_messages: of an event, at most.
        conn_id: the connection of Airflow that has the url; None for PGQUEUE_URL, or libpq's
            environment, of the triggerer.

    Raises:
        PgQueueError: an argument has the wrong type.
    """

    def __init__(
        self, *, stream: str, consumer: str, max_messages: int = 1, conn_id: str | None = None
    ):
        super().__init__()
        self.stream = arguments.text("stream", stream)
        self.consumer = arguments.text("consumer", consumer)
        self.max_messages = arguments.number("max_messages", max_messages)
        self.conn_id = arguments.maybe(arguments.text, "conn_id", conn_id)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """What Airflow stores of the trigger: no password."""
        given = ("stream", "consumer", "max_messages", "conn_id")
        return f"{__name__}.{type(self).__name__}", {name: getattr(self, name) for name in given}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield an event for each claim."""
        while True:
            try:
                async with await connect_async(await self._url()) as queue:
                    async for event in self._events(queue):
                        yield event
            except (PgQueueError, psycopg.Error) as error:
                if not is_worth_a_retry(error):
                    raise
                warn("%s; trying again", error, logger="spark_pgqueue.airflow")
                await asyncio.sleep(_PAUSE)

    async def _events(self, queue: AsyncClient) -> AsyncIterator[TriggerEvent]:
        while True:
            claim = await queue.receive(self.stream, self.consumer, self.max_messages, wait=_WAIT)
            if claim is None:
                continue
            messages = [_shown(message) for message in claim.messages]
            yield TriggerEvent(
                {"stream": self.stream, "consumer": self.consumer, "messages": messages}
            )
            await claim.ack()

    async def _url(self) -> str | None:
        if self.conn_id is None:
            return os.environ.get("PGQUEUE_URL") or None
        from airflow.sdk import BaseHook

        if hasattr(BaseHook, "aget_connection"):
            connection = await BaseHook.aget_connection(self.conn_id)
        else:
            # asyncio.to_thread would read the supervisor's answers in another event loop
            from asgiref.sync import sync_to_async

            connection = await sync_to_async(BaseHook.get_connection)(self.conn_id)
        return connection.get_uri()


def _shown(message: Message) -> dict[str, Any]:
    """A message as Airflow can hold it: bytes as text of base 16, and headers other than strings as
    JSON text. A number that msgspec cannot encode would end all triggers.
    """
    data = message.data.hex() if isinstance(message.data, bytes) else message.data
    return {
        "seq": message.seq,
        "key": message.key,
        "data": data,
        "headers": {name: _text(value) for name, value in message.headers.items()},
        "deliver_count": message.deliver_count,
        "inserted_at": message.inserted_at.isoformat(),
    }


def _text(header: Any) -> str | None:
    """A header as the archive and Spark have it."""
    if header is None or isinstance(header, str):
        return header
    return json.dumps(header, ensure_ascii=False)
