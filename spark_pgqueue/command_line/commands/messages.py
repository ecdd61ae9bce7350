"""Commands about messages: sending, receiving, reading, acknowledging and returning them."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer

from spark_pgqueue.client import Client
from spark_pgqueue.command_line.app import app, connect, fail
from spark_pgqueue.command_line.arguments import (
    POSITION,
    ClaimId,
    ConsumerName,
    Consumers,
    Headers,
    Json,
    Key,
    OnlySeqs,
    Priority,
    SeqList,
    Seqs,
    StreamName,
    Url,
    at,
    default_of,
    delay,
    json_value,
    lasting,
    position,
)
from spark_pgqueue.command_line.input import batches, payload_of, standard_input
from spark_pgqueue.command_line.output import (
    count_of,
    json_of_row,
    json_of_stored,
    line_of,
    report,
    settled,
)

TAIL = 1_000  # the number of messages that `tail` holds in memory


# Longer than 60 lines: Typer reads the options from the parameters.
@app.command()
def send(
    stream: StreamName,
    data: Annotated[
        str | None, typer.Option(help="The payload. Default: standard input, unchanged.")
    ] = None,
    lines: Annotated[
        bool,
        typer.Option("--lines", help="Send each line of standard input as a message: all or none."),
    ] = False,
    key: Key = None,
    header: Headers = None,
    priority: Priority = 0,
    deliver_at: Annotated[
        datetime | None, at("Not before (ISO 8601; local unless it has a zone).")
    ] = None,
    delay: Annotated[
        timedelta | None, lasting("Not before this delay has passed.", parser=delay)
    ] = None,
    expires_at: Annotated[datetime | None, at("From then on it is not delivered.")] = None,
    consumer: Consumers = None,
    dedup_key: Annotated[
        str | None,
        typer.Option(
            help="Publish nothing if a message with this key was sent within the stream's "
            "dedup_window."
        ),
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Create the stream if it does not exist, of kind text.")
    ] = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Publish a message, and print its seq; or a message per line, and print how many."""
    if lines and data is not None:
        raise typer.BadParameter("--lines reads standard input: omit --data")
    if lines and dedup_key is not None:
        raise typer.BadParameter("--dedup-key is for a single message: omit --lines")
    if delay is not None and deliver_at is not None:
        raise typer.BadParameter("give --delay or --deliver-at, not both")
    headers = dict(header) if header else None
    publish = {
        "priority": priority,
        "delay": delay,
        "deliver_at": deliver_at,
        "consumers": consumer,
        "expires_at": expires_at,
    }
    given = b""
    if data is not None:
        given = os.fsencode(data)
    elif not lines:
        given = standard_input()
    with connect(url) as queue, queue.transaction():
        if create:
            queue.create_stream(stream, if_not_exists=True)
        binary = queue.kind(stream) == "binary"
        sent = seq = 0
        if not lines:
            payload = payload_of(given, binary)
            seq = queue.send(
                stream, payload, key=key, headers=headers, dedup_key=dedup_key, **publish
            )
        for batch in batches(binary) if lines else ():
            publish["keys"] = [key] * len(batch)
            publish["headers"] = [headers] * len(batch)
            sent += len(queue.send_batch(stream, batch, **publish))
    if lines:
        report(as_json, f"{count_of(sent)} sent", stream=stream, sent=sent)
    else:
        report(as_json, str(seq), stream=stream, seq=seq)


# Longer than 60 lines, as `send` is.
@app.command()
def receive(
    stream: StreamName,
    consumer: ConsumerName,
    max_messages: Annotated[
        int, typer.Option("--max", min=1, help="Claim at most this many.")
    ] = default_of(Client.receive, "max_messages"),
    visibility_timeout: Annotated[
        timedelta | None,
        lasting("With --no-ack: the visibility timeout. Default: the consumer's."),
    ] = None,
    no_ack: Annotated[
        bool,
        typer.Option("--no-ack", help="Keep the claim, for `pgqueue ack` or `pgqueue nack`."),
    ] = False,
    wait: Annotated[timedelta | None, lasting("Wait this long if there is none.")] = None,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="JSONPATH",
            help="Only messages that match, such as '$.data.total > 100'; the others stay.",
        ),
    ] = None,
    look: Annotated[
        int,
        typer.Option(min=1, help="With --where: check at most this many ready messages."),
    ] = default_of(Client.receive, "look"),
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with code 3 if nothing was received.")
    ] = False,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Receive messages, print them, and acknowledge them.

    A line has seq, key and data, separated by tabs, with unprintable characters escaped. --json has
    all values unchanged, and binary data in base64.
    """
    with connect(url) as queue:
        claim = queue.receive(
            stream,
            consumer,
            max_messages,
            visibility_timeout=visibility_timeout,
            wait=wait,
            where=where,
            look=look,
        )
        if claim is None:
            print("Nothing to receive.", file=sys.stderr)
            raise typer.Exit(3 if exit_code else 0)
        try:
            for message in claim.messages:
                print(json_of_row(message) if as_json else line_of(message))
            sys.stdout.flush()
        except BaseException:  # a message that was not printed was not delivered
            claim.defer()
            raise
        if no_ack:
            if not as_json:
                print(f"Claim {claim.claim_id}: pgqueue ack {claim.claim_id}", file=sys.stderr)
        elif claim.ack() < len(claim.messages):
            fail("not acknowledged: these messages will be delivered again")


@app.command()
def tail(
    stream: StreamName,
    start: Annotated[
        Any,
        typer.Option(
            "--from",
            parser=position,
            metavar=POSITION,
            help="Start with new messages, all stored messages, messages published since TIME (ISO "
            "8601, local unless it has a zone), or messages after an offset, as JSON.",
        ),
    ] = "latest",
    max_messages: Annotated[
        int | None, typer.Option("--max", min=1, help="Stop after this many messages.")
    ] = None,
    follow: Annotated[
        bool, typer.Option(help="Wait for new messages until Ctrl-C, or stop at the last message.")
    ] = True,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Print the messages of a stream without claiming them; consumers are not affected.

    The lines are as in `receive`. --no-follow prints the final offset to standard error.
    """
    left = max_messages
    with connect(url) as queue:
        offset = start if isinstance(start, dict) else queue.start_offset(stream, start)
        wait = timedelta(days=1) if follow else None
        while left is None or left > 0:
            size = min(left or TAIL, TAIL)
            batch = next(queue.read(stream, offset, max_messages=size, wait=wait), None)
            if batch is None and not follow:
                break
            if batch is not None:
                for message in batch.messages:
                    print(json_of_stored(message) if as_json else line_of(message))
                sys.stdout.flush()
                offset = batch.offset
                left = None if left is None else left - len(batch.messages)
    if not follow:
        print(f"Offset: {json.dumps(offset)}", file=sys.stderr)


@app.command()
def retry(
    stream: StreamName,
    consumer: ConsumerName,
    seq: OnlySeqs = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Deliver failed messages now, without their delays, for example after an outage."""
    with connect(url) as queue:
        count = queue.retry(stream, consumer, seq)
    said = f"{count_of(count, 'delay')} ended"
    report(as_json, said, stream=stream, consumer=consumer, retried=count)


@app.command()
def cancel(
    stream: StreamName,
    consumer: ConsumerName,
    seqs: SeqList,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Cancel unfinished messages of a consumer, in any state."""
    with connect(url) as queue:
        count = queue.cancel(stream, consumer, seqs)
    report(
        as_json, f"{count_of(count)} cancelled", stream=stream, consumer=consumer, cancelled=count
    )


@app.command()
def postpone(
    stream: StreamName,
    consumer: ConsumerName,
    seqs: SeqList,
    until: Annotated[datetime, at("Not before (ISO 8601; local unless it has a zone).")],
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Deliver unclaimed messages at a later time, or, with a time in the past, at once."""
    with connect(url) as queue:
        count = queue.postpone(stream, consumer, seqs, until)
    report(
        as_json, f"{count_of(count)} postponed", stream=stream, consumer=consumer, postponed=count
    )


@app.command()
def ack(
    claim: ClaimId,
    seq: Seqs = None,
    result: Annotated[
        Any,
        typer.Option(
            parser=json_value, metavar="JSON", help="A result to store; `pgqueue history` shows it."
        ),
    ] = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Acknowledge a claim, or messages of it."""
    with connect(url) as queue:
        settled(queue.ack(claim, seq, result=result), claim, "acknowledged", as_json)


@app.command()
def defer(
    claim: ClaimId,
    seq: Seqs = None,
    delay: Annotated[timedelta | None, lasting("Deliver the message after this delay.")] = None,
    state: Annotated[
        Any,
        typer.Option(
            parser=json_value,
            metavar="JSON",
            help="A state to store for later deliveries of the messages.",
        ),
    ] = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Deliver a claim, or messages of it, later. This does not count as a failure."""
    with connect(url) as queue:
        count = queue.defer(claim, seq, delay=delay or timedelta(), state=state)
        settled(count, claim, "deferred", as_json)


@app.command()
def nack(
    claim: ClaimId,
    seq: Seqs = None,
    delay: Annotated[
        timedelta | None,
        lasting(
            "Redeliver after this delay; 0: now. Default: the consumer's backoff.", parser=delay
        ),
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Stored as the last error.")] = None,
    as_json: Json = False,
    url: Url = None,
) -> None:
    """Return a claim, or messages of it, to be delivered again."""
    with connect(url) as queue:
        count = queue.nack(claim, seq, delay=delay, reason=reason)
        settled(count, claim, "returned", as_json)
