"""The base of the client's calls."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, LiteralString
from weakref import WeakSet

from spark_pgqueue.client import arguments
from spark_pgqueue.client.long_poll import LongPoll
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.statements import Statements


class Calls:
    """Calls of the schema's functions, over the connection of one client."""

    _statements: Statements
    _long_poll: LongPoll
    _consuming: WeakSet[Generator[Any, None, None]]
    """Iterations over claims, which may have claims when the client is closed."""

    def _check_can_wait(self) -> None:
        if not self._statements.can_wait:
            raise PgQueueError(
                "wait needs a connection of the client's own, outside a transaction",
                hint="leave wait out, or make the client with spark_pgqueue.connect(url)",
            )

    def _must_exist(self, stream: str | None) -> None:
        if stream is not None:
            self._value("select pgqueue.open_stream(%s::text)", arguments.text("stream", stream))

    def _value(self, sql: LiteralString, *parameters: Any) -> Any:
        return self._statements.rows(sql, parameters)[0][0]
