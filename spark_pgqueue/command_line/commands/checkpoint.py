"""The command `pgqueue checkpoint`: the position of a Spark query, and the claims that it holds."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from spark_pgqueue.command_line.app import app
from spark_pgqueue.command_line.arguments import Json, Url, Yes
from spark_pgqueue.command_line.input import confirm
from spark_pgqueue.command_line.output import count_of, json_of_fields
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.printable import printable
from spark_pgqueue.spark.driver.checkpoint import Checkpoint, CheckpointReader, CheckpointReaders


@app.command()
def checkpoint(
    path: Annotated[
        str, typer.Argument(metavar="PATH", show_default=False, help="Its checkpointLocation.")
    ],
    ack: Annotated[
        bool, typer.Option("--ack", help="Acknowledge what the query had finished.")
    ] = False,
    release: Annotated[
        bool,
        typer.Option(
            "--release",
            help="Also return its other messages, for others to claim at once. The query then "
            "needs a new checkpoint.",
        ),
    ] = False,
    fork: Annotated[
        Path | None,
        typer.Option(
            metavar="NEWPATH",
            help="Copy it for another query, which continues from the same position next to this "
            "one.",
        ),
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Show the position of a Spark query by its checkpoint, and the claims that it holds.

    PATH is a local folder; copy a remote checkpoint to one first.
    """
    if sum((ack, release, fork is not None)) > 1:
        raise typer.BadParameter("only one of --ack, --release and --fork")
    found = Checkpoint.read(path)
    with closing(Statements(url, patience=0)) as statements:
        readers_there = CheckpointReaders(found, statements)
        done = _do(readers_there, found, ack, release, fork, yes)
        _show(found, readers_there.readers(), done, as_json)


def _do(
    readers_there: CheckpointReaders,
    found: Checkpoint,
    ack: bool,
    release: bool,
    fork: Path | None,
    yes: bool,
) -> dict[str, Any]:
    if ack:
        return {"acknowledged": readers_there.acknowledge()}
    if release:
        confirm(
            f"Release all that {printable(str(found.folder))} holds? Its query then needs a new "
            "checkpoint",
            yes,
        )
        acknowledged, released = readers_there.release()
        return {"acknowledged": acknowledged, "released": released}
    if fork is not None:
        return {"fork": str(fork), "fork_query_id": readers_there.fork(fork)}
    return {}


def _show(
    found: Checkpoint, readers: dict[str, CheckpointReader], done: dict[str, Any], as_json: bool
) -> None:
    if as_json:
        fields = {
            "path": str(found.folder),
            "query_id": found.query_id,
            "batch": found.last,
            "is_finished": found.is_finished,
            "finished_batch": found.finished,
            "sources": [
                _source(name, offset, readers.get(name)) for name, offset in found.offsets.items()
            ],
        }
        print(json_of_fields(fields | done))
        return
    print(f"query: {found.query_id or 'not started yet'}")
    print(f"batch: {_batch(found)}")
    for name, offset in found.offsets.items():
        print(f"source {printable(name)}: {printable(_line(offset, readers.get(name)))}")
    if "acknowledged" in done:
        print(f"{count_of(done['acknowledged'])} acknowledged")
    if "released" in done:
        print(f"{count_of(done['released'])} released: the query needs a new checkpoint")
    if "fork" in done:
        print(f"copied to {printable(done['fork'])}, for query {done['fork_query_id']}")


def _source(name: str, offset: Any, reader: CheckpointReader | None) -> dict[str, Any]:
    fields = {"source": name, "offset": offset}
    if reader is not None:
        fields["known"] = reader.claims_held is not None
        if reader.claims_held is not None:
            fields |= vars(reader.claims_held)
    return fields


def _batch(found: Checkpoint) -> str:
    if found.last is None:
        return "none yet"
    if found.is_finished:
        return f"{found.last}, finished"
    return f"{found.last}, not finished: it runs again when the query is started"


def _line(offset: Any, reader: CheckpointReader | None) -> str:
    if offset is None:
        return "nothing yet"
    if reader is None:
        streams = offset.get("streams") if isinstance(offset, dict) else None
        if not isinstance(streams, dict):
            return "not a pgqueue source"
        read = sum(each["messages"] for each in streams.values())
        return f"{', '.join(streams) or 'streams'} without a consumer, {count_of(read)} so far"
    had = reader.claims_held
    if had is None:
        return "a reader that does not exist in this database, or was released"
    holds = [
        f"{count:,} {what}"
        for count, what in (
            (had.finished, "finished"),
            (had.unfinished, "of the unfinished batch"),
            (had.unlogged, "for the next batch"),
        )
        if count
    ]
    held = "holds nothing"
    if holds:
        held = f"holds {', '.join(holds)}"
        if had.lease_until is not None:
            held += f", until {had.lease_until:%Y-%m-%d %H:%M:%S} if it does not run"
    return (
        f"consumer {had.consumer} of stream {had.stream}, {count_of(reader.messages)} finished so "
        f"far; {held}; backlog {had.backlog:,}"
    )
