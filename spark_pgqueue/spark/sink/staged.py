"""What a task of the sink tells the driver: where its rows are, which nobody sees yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pyspark.sql.datasource import WriterCommitMessage

from spark_pgqueue.spark.sink.actions import Action


@dataclass(frozen=True)
class StagedRows:
    """What a task has staged for a table.

    Attributes:
        write_no: the number of the write.
        table: the table's name, as SQL.
        chunks: random numbers, one for the rows of each COPY.
        rows: how many rows the chunks have.
        is_repeated: whether the task staged nothing because the batch was written before.
    """

    write_no: int
    table: str
    chunks: tuple[int, ...] = ()
    rows: int = 0
    is_repeated: bool = False


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """The message of a task to the driver.

    Attributes:
        sink: the sink's identity.
        staged: the ids of the task's staged chunks.
        rows: how many rows the chunks have.
        actions: the actions of other rows, with their messages.
        query_id: the id of the Spark query that writes; None where that is not known.
        is_repeated: whether the task staged nothing because the batch, or a later one, was
            published before.
        home: the id of the stream of all chunks; None where rows name their streams.
        table: the rows for a table.
    """

    sink: str
    staged: tuple[int, ...]
    rows: int
    actions: tuple[tuple[Action, str], ...] = ()
    query_id: str | None = None
    is_repeated: bool = False
    home: int | None = None
    table: StagedRows | None = None


def all_staged(tasks: Iterable[StagedRows]) -> StagedRows | None:
    """What all tasks of a batch have staged; None where no rows are for a table."""
    found = [task for task in tasks if task.chunks]
    if not found:
        return None
    chunks = tuple(chunk for task in found for chunk in task.chunks)
    return StagedRows(found[0].write_no, found[0].table, chunks, sum(task.rows for task in found))
