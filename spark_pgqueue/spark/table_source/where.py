"""Option where: statements that ask the condition of rows. `pgqueue.scan_where` has checked it.

The condition is asked in statements of the user's role. `kept_connection` pins their search path,
so that the condition finds the functions and operators of Postgres and no others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING

from spark_pgqueue.postgres.adbc import call
from spark_pgqueue.postgres.errors import PgQueueError, Said, sqlstate_of
from spark_pgqueue.spark.consumer_source.consumer import Stream
from spark_pgqueue.spark.partitions import KnownRange
from spark_pgqueue.spark.table_source.tables import Table, Where, column

if TYPE_CHECKING:
    import pyarrow as pa
    from adbc_driver_manager import dbapi

_CAUSES = ("22", "42601", "42703", "42725", "42804", "42846", "42883")
"""The SQLSTATEs of errors of values, of syntax and of types."""

_OTHER_CAUSES = re.compile("cancel|terminat|time ?out|recovery|shutting down", re.IGNORECASE)


@contextmanager
def blamed_on(where: str | None) -> Iterator[None]:
    """Name option where, if there is one, in an error that only the condition explains.

    Raises:
        PgQueueError: the condition is no expression, compares what cannot be compared, or fails for
            the values of a row. Other errors are raised as they are.
    """
    try:
        yield
    except Exception as error:
        sqlstate = sqlstate_of(error) or ""
        said = Said.by(error).message
        # Arrow makes an OSError, without a code, of what the server says while rows are fetched.
        fetched = re.search("PGRES_FATAL_ERROR.{0,1000}?: ERROR: +(.*)", said)
        is_cause = sqlstate.startswith(_CAUSES) or (fetched and not _OTHER_CAUSES.search(said))
        if where is None or isinstance(error, PgQueueError) or not is_cause:
            raise
        said = fetched[1] if fetched else said  # no detail, which may quote a message
        raise PgQueueError(f"option where is {where!r}: {said}", sqlstate=sqlstate) from None


def check_types(cursor: dbapi.Cursor, where: Where, kind: str) -> None:
    """Ask the condition of a row of nulls: an error of Postgres comes before the first task.

    Args:
        cursor: a cursor in a transaction.
        where: the condition.
        kind: the stream's kind.
    """
    nulls = (f"null::{column(name, kind)[0]} as {name}" for name in where.columns)
    row = ", ".join(["1 as one", *nulls])
    call(cursor, f"select 1 from (select {row}) m where ({where.condition})")


def messages_sql(
    table: Table,
    where: Where,
    stream: Stream,
    ranges: Sequence[KnownRange],
    known: pa.Table,
    reads: bool,
) -> str:
    """The from clause for the messages of ranges that pass a condition, in order.

    Args:
        table: the table.
        where: the condition.
        stream: the stream.
        ranges: the ranges of messages.
        known: what is known of the ranges.
        reads: whether the content of messages is needed, for the condition or else.

    Returns:
        m, the messages, with the number `no` of their range.
    """
    names = [name for name in where.columns if name in known.column_names]
    values = known.select(["lo", *names]).take([each.no for each in ranges]).to_pylist()
    rows = [more | each._asdict() for each, more in zip(ranges, values, strict=True)]
    types = [f"{name} {column(name)[0]}" for name in names]
    # Texts of users come as digits: no setting of the session changes how these are read.
    digits = json.dumps(rows, default=datetime.isoformat).encode().hex()
    source = (
        f"json_to_recordset(convert_from(decode('{digits}', 'hex'), 'UTF8')::json)"
        f" as r ({', '.join(['lo int8', 'hi int8', 'no int4', *types])})"
    )
    # The bounds of all ranges let the planner leave out the other segments of the stream.
    lo, hi = min(each.lo for each in ranges), max(each.hi for each in ranges)
    messages = f"select * from pgqueue.messages_{stream.stream_id} where seq >= {lo} and seq < {hi}"
    columns = ["r.no", *(f"r.{name}" for name in names)]
    if reads:
        data = "x.data_bytes" if stream.kind == "binary" else "x.data"
        columns += ["x.key", "x.headers", "x.inserted_at", "x.data_bytes", f"{data} as data"]
    if reads and not table.outlives:
        columns.append("x.seq")
        source += f" cross join lateral ({messages} and seq >= r.lo and seq < r.hi order by seq) x"
    else:
        columns.append("s.seq")
        source += " cross join lateral generate_series(r.lo, r.hi - 1) s (seq)"
        if reads:
            source += f" left join lateral ({messages} and seq = s.seq order by seq) x on true"
    return f"(select {', '.join(columns)} from {source}) m where ({where.condition})"
