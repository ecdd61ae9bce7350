"""The kinds of several streams, whose data are in one column."""

from __future__ import annotations

from collections.abc import Mapping

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.consumer_source.consumer import Stream


def kind_of(streams: Mapping[str, Stream]) -> str:
    """The kind of column data for all streams; text for no streams."""
    return "binary" if any(each.kind == "binary" for each in streams.values()) else "text"


def check_kinds(streams: Mapping[str, Stream], data: str | None = None) -> None:
    """Check that the data of all streams fit one column.

    Args:
        streams: by their names.
        data: the type of the column, where the query has it already.

    Raises:
        PgQueueError: the data do not fit.
    """
    binary = [name for name, each in streams.items() if each.kind == "binary"]
    others = [name for name, each in streams.items() if each.kind != "binary"]
    if binary and others:
        raise PgQueueError(
            f"stream {others[0]!r} is of kind {streams[others[0]].kind} and stream {binary[0]!r} "
            "of kind binary: column data cannot be both",
            hint="read them in two queries, or give streams, or a streamPattern, of one kind",
        )
    wrong = others if data == "binary" else binary if data is not None else []
    if wrong:
        raise PgQueueError(
            f"stream {wrong[0]!r} is of kind {streams[wrong[0]].kind}, but column data is {data}",
            hint="start the query anew if the stream is new; and remove schema(...)",
        )
