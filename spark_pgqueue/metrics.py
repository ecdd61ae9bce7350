"""The figures of the queue as OpenMetrics text, for Prometheus and other scrapers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import psycopg

from spark_pgqueue import openmetrics, serving
from spark_pgqueue.client import Client, ConsumerStats, Look, PartitionStats, Stream
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.serving import Answer, Request

PORT = 9187
SCRAPE_SECONDS = 10.0  # the timeout of a scrape that names none, as in Prometheus
DASHBOARD = Path(__file__).with_name("grafana.json")

Labels = dict[str, str]
Sample = tuple[Labels, float | int | None]


class Family(NamedTuple):
    """A metric: samples that share a name, a type and a meaning.

    Attributes:
        name: the name without the suffix of the type.
        type: gauge, counter or stateset.
        help: one sentence.
        samples: returns the labels and the value of each sample of a look; None for no value.
        unit: the last word of the name; empty for none.
    """

    name: str
    type: str
    help: str
    samples: Callable[[Look], Iterable[Sample]]
    unit: str = ""


STATES = ("new", "ready", "delayed", "waiting", "claimed", "dead")


def _of_streams(value: Callable[[Stream], float | None]) -> Callable[[Look], Iterator[Sample]]:
    return lambda look: (({"stream": each.name}, value(each)) for each in look.streams)


def _of_consumers(
    value: Callable[[ConsumerStats, Look], float | None],
) -> Callable[[Look], Iterator[Sample]]:
    return lambda look: ((_labels(each), value(each, look)) for each in look.consumers)


def _of_partitions(
    value: Callable[[PartitionStats], float],
) -> Callable[[Look], Iterator[Sample]]:
    return lambda look: (
        ({"stream": stream, "group": group, "partition": str(each.partition)}, value(each))
        for stream, group, each in look.partitions
    )


def _labels(consumer: ConsumerStats) -> Labels:
    return {"stream": consumer.stream, "consumer": consumer.consumer}


def _by_state(look: Look) -> Iterator[Sample]:
    for each in look.consumers:
        for state in STATES:
            yield _labels(each) | {"state": state}, getattr(each, state)


def _age(look: Look, since: object) -> float:
    """Seconds from a time to a look; 0 without a time."""
    return 0 if since is None else max(0.0, (look.at - since).total_seconds())  # type: ignore[operator]


FAMILIES = (
    Family(
        "pgqueue_stream_sent",
        "counter",
        "Messages sent to the stream, including rolled-back ones.",
        _of_streams(lambda s: s.sent),
    ),
    Family(
        "pgqueue_stream_messages",
        "gauge",
        "Stored messages: an estimate, from the planner or from the messages sent.",
        _of_streams(lambda s: s.messages),
    ),
    Family(
        "pgqueue_stream_size_bytes",
        "gauge",
        "Size of the stream's messages and their indexes on disk.",
        _of_streams(lambda s: s.bytes),
        "bytes",
    ),
    Family(
        "pgqueue_stream_consumers",
        "gauge",
        "Consumers and groups of the stream.",
        _of_streams(lambda s: s.consumers),
    ),
    Family(
        "pgqueue_consumer_messages",
        "gauge",
        "Unfinished messages of the consumer, by state.",
        _by_state,
    ),
    Family(
        "pgqueue_consumer_backlog",
        "gauge",
        "Messages that are neither claimed nor dead: new, ready, delayed and waiting.",
        _of_consumers(lambda c, _: c.backlog),
    ),
    Family(
        "pgqueue_consumer_estimated",
        "gauge",
        "1 while the backlog and the new messages are estimates: very many publications are new.",
        _of_consumers(lambda c, _: int(c.estimated)),
    ),
    Family(
        "pgqueue_consumer_taken",
        "counter",
        "Messages that the consumer has taken from the stream, at the latest on delivery.",
        _of_consumers(lambda c, _: c.taken),
    ),
    Family(
        "pgqueue_consumer_settled",
        "counter",
        "Messages acknowledged or dead-lettered.",
        _of_consumers(lambda c, _: c.settled),
    ),
    Family(
        "pgqueue_consumer_skipped",
        "counter",
        "Messages that retention removed before the consumer had finished them.",
        _of_consumers(lambda c, _: c.skipped),
    ),
    Family(
        "pgqueue_consumer_oldest_age_seconds",
        "gauge",
        "Age of the oldest message that could be delivered now; 0 if there is none.",
        _of_consumers(lambda c, look: _age(look, c.oldest_at)),
        "seconds",
    ),
    Family(
        "pgqueue_consumer_claims",
        "gauge",
        "Open claims, including those past their visibility timeout.",
        _of_consumers(lambda c, _: c.claims),
    ),
    Family(
        "pgqueue_consumer_expired_claims",
        "gauge",
        "Claims past their visibility timeout that have not been taken over.",
        _of_consumers(lambda c, _: c.expired),
    ),
    Family(
        "pgqueue_consumer_oldest_claim_seconds",
        "gauge",
        "Age of the oldest claim; 0 if there is none.",
        _of_consumers(lambda c, look: _age(look, c.oldest_claim_at)),
        "seconds",
    ),
    Family(
        "pgqueue_consumer_paused",
        "gauge",
        "1 for a consumer that claims nothing until it is resumed.",
        _of_consumers(lambda c, _: int(c.paused)),
    ),
    Family(
        "pgqueue_consumer_stuck_claims",
        "gauge",
        "Claims that a worker extends beyond ten visibility timeouts: its handler may hang.",
        _of_consumers(lambda c, _: c.stuck),
    ),
    Family(
        "pgqueue_consumer_status",
        "gauge",
        "1 for the current status of the consumer, as in consumer_health.",
        lambda look: ((_labels(c) | {"status": c.status}, 1) for c in look.consumers),
    ),
    Family(
        "pgqueue_group_behind",
        "gauge",
        "Messages of the whole group after the committed offset of the partition.",
        _of_partitions(lambda p: p.behind),
    ),
    Family(
        "pgqueue_group_owned",
        "gauge",
        "1 if a worker has leased the partition, else 0.",
        _of_partitions(lambda p: int(p.worker is not None)),
    ),
)


def text(look: Look | None, seconds: float) -> str:
    """All metrics of a look.

    Args:
        look: the figures; None when the database did not answer.
        seconds: how long the look took.
    """
    families = [
        Family(
            "pgqueue_up",
            "gauge",
            "Whether the database answered.",
            lambda _: [({}, int(bool(look)))],
        ),
        Family(
            "pgqueue_look_seconds",
            "gauge",
            "How long the database took to answer.",
            lambda _: [({}, seconds)],
            "seconds",
        ),
    ]
    if look:
        families += FAMILIES
    return openmetrics.text(
        openmetrics.Lines(each.name, each.type, each.help, _lines(each, look), each.unit)
        for each in families
    )


def _lines(family: Family, look: Look | None) -> Iterator[openmetrics.Sample]:
    suffix = "_total" if family.type == "counter" else ""
    for labels, value in family.samples(look):  # type: ignore[arg-type]  # those without a look
        yield suffix, labels, value


def look_at(queue: Client) -> str:
    """All metrics of a database, now."""
    began = time.monotonic()
    look = queue.look()
    return text(look, time.monotonic() - began)


def serve(
    queue: Callable[[], Client], where: serving.Address, names: tuple[str, ...]
) -> serving.Server:
    """A server of the metrics at /metrics; call its `serve_forever`.

    Args:
        queue: returns a client, for each request.
        where: the address to listen on.
        names: see `serving.Server`.

    Raises:
        PgQueueError: the extra `web` is not installed.
        OSError: the server cannot listen there.
    """
    scrape = scraping(queue)

    def answer(request: Request) -> Answer:
        if request.path == "/metrics" and request.method == "GET":
            return scrape(request)
        return Answer(b"pgqueue: see /metrics\n", "text/plain; charset=utf-8", 404)

    return serving.Server(where, answer, names=names)


def scraping(queue: Callable[[], Client]) -> Callable[[Request], Answer]:
    """A function that answers a scrape; scrapes within a second share a look.

    The answer comes before the scraper's timeout, with `pgqueue_up` 0 if the database has not
    answered by then.
    """
    shared = serving.Shared(lambda: _scrape(queue))

    def scrape(request: Request) -> Answer:
        seconds = _patience(request)
        try:
            found = shared(seconds)
        except TimeoutError:
            serving.log(f"the database has not answered for {seconds:g} s")
            found = text(None, seconds)
        return Answer(found.encode(), openmetrics.KIND)

    return scrape


def _patience(request: Request) -> float:
    """Seconds that a scrape may take: most of the timeout that Prometheus sends with it."""
    given = request.headers.get("x-prometheus-scrape-timeout-seconds", "")
    known = re.fullmatch(r"\d{1,5}(\.\d{1,9})?", given, re.ASCII)
    return 0.8 * (float(given) if known else SCRAPE_SECONDS)


def _scrape(queue: Callable[[], Client]) -> str:
    began = time.monotonic()
    try:
        return look_at(queue())
    except (PgQueueError, psycopg.Error) as error:
        serving.log(error)
        return text(None, time.monotonic() - began)
