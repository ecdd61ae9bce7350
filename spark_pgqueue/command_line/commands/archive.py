"""Commands of `pgqueue archive`."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import typer

from spark_pgqueue import client
from spark_pgqueue.archive.exporter import export
from spark_pgqueue.archive.folders import ALLOW, parse_options, parse_prefix
from spark_pgqueue.command_line.app import connect, repeat, sub_app
from spark_pgqueue.command_line.arguments import (
    AnyStream,
    IfExists,
    Json,
    StreamName,
    Url,
    Yes,
    lasting,
)
from spark_pgqueue.command_line.input import confirm
from spark_pgqueue.command_line.output import count_of, report, show
from spark_pgqueue.printable import printable

archive_app: typer.Typer = sub_app("archive", "Write old messages to Parquet files.")


def _options(text: str) -> dict[str, Any]:
    try:
        return parse_options(text)
    except ValueError:
        raise typer.BadParameter("it is not a JSON object") from None  # it may hold a secret


def _prefix(text: str) -> str:
    try:
        return parse_prefix(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@archive_app.command("set")
def archive_set(
    stream: StreamName,
    uri: Annotated[
        str, typer.Argument(metavar="URI", show_default=False, help="/path, s3://bucket/path, ...")
    ],
    keep: Annotated[timedelta | None, lasting("How long files are kept: 365d.")] = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Archive a stream: its old messages are written to files before retention deletes them."""
    with connect(url) as queue:
        queue.set_archive(stream, uri, keep_for=keep)
        report(as_json, stream=stream, uri=uri)


@archive_app.command("stop")
def archive_stop(stream: StreamName, as_json: Json = False, url: Url = None) -> None:
    """Stop archiving a stream; existing files stay readable until the stream is dropped."""
    with connect(url) as queue:
        queue.set_archive(stream, None)
        report(as_json, stream=stream)


@archive_app.command("drop")
def archive_drop(
    stream: StreamName,
    yes: Yes = False,
    if_exists: IfExists = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Drop the archive of a stream; `maintain`, then `archive run` delete its files."""
    with connect(url) as queue:
        if queue.archives(stream):
            confirm(f"Delete the archive of stream {stream!r} with its files?", yes)
        elif if_exists:
            report(as_json, stream=stream, dropped=False)
            return
        queue.drop_archive(stream)
        report(as_json, stream=stream, dropped=True)


@archive_app.command("list")
def archive_list(stream: AnyStream = None, as_json: Json = False, url: Url = None) -> None:
    """List the archives: what is in files, and what is still to be exported."""
    with connect(url) as queue:
        show(queue.archives(stream), client.Archive, as_json)


@archive_app.command("run")
def archive_run(
    options: Annotated[
        dict[str, Any] | None,
        typer.Option(
            parser=_options,
            metavar="JSON",
            envvar="PGQUEUE_ARCHIVE_OPTIONS",
            show_default=False,
            help="Arguments of the file system in pyarrow.fs. By default, pyarrow uses the uri and "
            "the environment.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            parser=_prefix,
            metavar="PREFIX",
            envvar=ALLOW,
            show_default=False,
            help="Open only archives below s3://bucket/path or /path; can be repeated. Without it, "
            "the database decides where this process reads and writes.",
        ),
    ] = None,
    every: Annotated[timedelta | None, lasting("Repeat at this interval: 1m.")] = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Write the closed segments of all streams with an archive to files.

    Several can run: only one exports a stream at a time. With --every, it continues
    until it is interrupted, also while the database or the files are unavailable.
    """

    def report_exported(step: str, each: Any) -> None:
        if step == "exported":  # at once: another stream may fail
            said = f"{printable(each.stream)}: segment {each.segment}, "
            said += f"{count_of(each.messages)}, {each.bytes} bytes"
            report(
                as_json,
                said,
                stream=each.stream,
                segment=each.segment,
                files=each.files,
                messages=each.messages,
                bytes=each.bytes,
            )

    def write() -> None:
        export(url, options, report_exported, allow or ())

    repeat(write, every, lambda _: True)
