"""Commands of `pgqueue stream`."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from spark_pgqueue import client
from spark_pgqueue.command_line.app import connect, fail, sub_app
from spark_pgqueue.command_line.arguments import (
    AnyStream,
    IfExists,
    IfNotExists,
    Json,
    Kind,
    OptionalSettings,
    Settings,
    StreamName,
    Topic,
    ToStream,
    Unread,
    Url,
    Yes,
    lasting,
    size,
)
from spark_pgqueue.command_line.input import confirm
from spark_pgqueue.command_line.output import details, json_of_row, report, show

stream_app: typer.Typer = sub_app("stream", "Create, change, drop, copy and list streams.")


@stream_app.command("create")
def stream_create(
    name: StreamName,
    settings: OptionalSettings = None,
    kind: Annotated[Kind, typer.Option(help="The kind of its payloads.")] = Kind.text,
    if_not_exists: IfNotExists = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Create a stream: `stream create orders dedup_window=1d`."""
    with connect(url) as queue:
        queue.create_stream(
            name,
            kind.value,
            if_not_exists=if_not_exists,
            settings=dict(settings or ()),
        )
        report(as_json, stream=name)


@stream_app.command("set")
def stream_set(
    name: StreamName, settings: Settings, as_json: Json = False, url: Url = None
) -> None:
    """Change settings of a stream while it is in use: notify=off max_bytes=1000."""
    with connect(url) as queue:
        queue.alter_stream(name, dict(settings))
        report(as_json, stream=name, settings=dict(settings))


@stream_app.command("drop")
def stream_drop(
    name: StreamName,
    yes: Yes = False,
    if_exists: IfExists = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Delete a stream with its messages and consumers, and the files of its archive."""
    with connect(url) as queue:
        if any(each.name == name for each in queue.streams()):
            files = ", and the files of its archive" if list(queue.archives(name)) else ""
            confirm(f"Delete stream {name!r} with its messages and consumers{files}?", yes)
        elif if_exists:
            report(as_json, stream=name, dropped=False)
            return
        queue.drop_stream(name)
        report(as_json, stream=name, dropped=True)


@stream_app.command("retention")
def stream_retention(
    name: StreamName,
    keep_for: Annotated[
        timedelta | None, lasting("Keep messages for this long after publication: 7d.", "--for")
    ] = None,
    messages: Annotated[
        int | None, typer.Option(help="Keep this many of the newest messages.")
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            "--bytes",
            parser=size,
            metavar="SIZE",
            help="Keep this much of the newest messages: 10GB.",
        ),
    ] = None,
    done: Annotated[
        bool, typer.Option("--done", help="Keep messages until all consumers are done.")
    ] = False,
    unread: Annotated[
        Unread | None,
        typer.Option(
            help="What to do with expired messages that a consumer has not finished.",
            show_default="keep",
        ),
    ] = None,
    keep_dead: Annotated[
        timedelta | None, lasting("Keep dead letters for this long.", "--dead")
    ] = None,
    forever: Annotated[
        bool, typer.Option("--forever", help="Keep all messages, which is the default.")
    ] = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Set how long messages are kept, or show it; `pgqueue maintain` deletes them.

    The options replace all earlier limits: an option that is not given sets no limit.
    """
    limits = (keep_for, messages, size, keep_dead)
    has_limit = done or any(limit is not None for limit in limits)
    with connect(url) as queue:
        if forever and has_limit:
            fail("--forever cannot be combined with a limit")
        if unread is not None and not has_limit:
            fail("--unread needs a limit: the options replace all earlier limits")
        if forever or has_limit:
            queue.set_retention(
                name,
                keep_for=keep_for,
                messages=messages,
                size=size,
                done=done,
                unread=(unread or Unread.keep).value,
                keep_dead=keep_dead,
            )
        for each in queue.retention(name):
            if as_json:
                print(json_of_row(each))
            else:
                details(each, "stream")


@stream_app.command("list")
def stream_list(as_json: Json = False, url: Url = None) -> None:
    """List the streams; the number of messages is an estimate."""
    with connect(url) as queue:
        show(queue.streams(), client.Stream, as_json)


@stream_app.command("bind")
def stream_bind(
    stream: StreamName, topic: Topic, to_stream: ToStream, as_json: Json = False, url: Url = None
) -> None:
    """Copy new messages whose key matches this topic to another stream."""
    with connect(url) as queue:
        queue.bind(stream, topic, to_stream)
        report(as_json, stream=stream, topic=topic, to_stream=to_stream)


@stream_app.command("unbind")
def stream_unbind(
    stream: StreamName, topic: Topic, to_stream: ToStream, as_json: Json = False, url: Url = None
) -> None:
    """Stop copying messages of this topic."""
    with connect(url) as queue:
        if not queue.unbind(stream, topic, to_stream):
            fail(f"{topic!r} of stream {stream!r} is not bound to {to_stream!r}")
        report(as_json, stream=stream, topic=topic, to_stream=to_stream)


@stream_app.command("bindings")
def stream_bindings(
    stream: AnyStream = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """List the topics that are copied to other streams."""
    with connect(url) as queue:
        show(queue.bindings(stream), client.Binding, as_json)
