"""Reports liveness and readiness of workers to systemd, Kubernetes and other supervisors.

sd_notify(3) has the protocol of systemd: a datagram to the socket NOTIFY_SOCKET.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from spark_pgqueue import openmetrics, serving
from spark_pgqueue.client import arguments
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.worker import meter
from spark_pgqueue.worker.consumer import Consumer
from spark_pgqueue.worker.health import NOT_RUNNING, Health, worst

PORT = 8080
"""The port of the probes, where only a host is given."""

_FIRST_LOOK, _LOOK = 0.1, 1.0  # seconds between two looks, until all workers are ready and later


@contextmanager
def supervised(*workers: Consumer, health: str | None = None) -> Iterator[None]:
    """Report the health of workers while the block runs: to systemd, and over HTTP.

    If systemd started the program with `Type=notify`, it is notified when all workers are ready and
    when they stop, with a status line. With `WatchdogSec`, it restarts a program that hangs.
    GET /live and GET /ready answer 200 for yes and 503 for no, with the status as JSON; /metrics
    answers with the figures of this process as OpenMetrics.

        >>> billing = spark_pgqueue.Consumer(url, "orders", "billing")
        >>> with spark_pgqueue.supervised(billing, health=":0"):
        ...     billing.run(lambda message: print(billing.health.status), wait=timedelta(0))
        working
        working
        2

    Args:
        workers: all must be live and ready.
        health: the address to serve, as HOST:PORT, :PORT or PORT; without a host, only locally.
            None to serve nothing. It requires the extra `web`.

    Raises:
        PgQueueError: health is no address, or the extra is not installed.
        OSError: it cannot listen there.
    """

    def look() -> Health:
        return worst(worker.health for worker in workers)

    def figures() -> str:
        return meter.text(worker._meter for worker in workers)

    with ExitStack() as stack:
        if health is not None:
            stack.enter_context(_answering(look, figures, health))
        if address := os.environ.get("NOTIFY_SOCKET"):
            stack.enter_context(_notifying(look, address))
        yield


@contextmanager
def _answering(
    look: Callable[[], Health], figures: Callable[[], str], where: str
) -> Iterator[None]:
    try:
        address = serving.address(arguments.text("health", where), PORT)
    except ValueError as error:
        raise PgQueueError(f"health: {error}") from None

    def answer(request: serving.Request) -> serving.Answer:
        if (request.method, request.path) == ("GET", "/metrics"):
            return serving.Answer(figures().encode(), openmetrics.KIND)
        found = look()
        answers = {"/live": found.is_live, "/ready": found.is_ready}
        if request.method != "GET" or request.path not in answers:
            return serving.as_json({"error": "see /live, /ready and /metrics"}, 404)
        return serving.as_json({"status": found.status}, 200 if answers[request.path] else 503)

    # A port for other machines: probes and scrapers use the names that a service or container has.
    with serving.Server(address, answer, names=() if address.is_local else None) as server:
        serve = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
        serve.start()
        try:
            yield
        finally:
            server.shutdown()


@contextmanager
def _notifying(look: Callable[[], Health], address: str) -> Iterator[None]:
    ended = threading.Event()
    name = "\0" + address[1:] if address.startswith("@") else address  # in the abstract namespace
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(5)

        def tell(news: str) -> None:
            with suppress(OSError):  # systemd is restarting, or busy: a later ping comes through
                sender.sendto(news.encode(), name)

        thread = threading.Thread(target=_notify, args=(look, tell, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            tell("STOPPING=1")


def _notify(
    look: Callable[[], Health], tell: Callable[[str], None], ended: threading.Event
) -> None:
    watchdog = _watchdog()
    said, is_ready, next_ping = "", False, 0.0
    while not ended.wait(min(_LOOK if is_ready else _FIRST_LOOK, watchdog or _LOOK)):
        found, news = look(), []
        if found.status not in (said, NOT_RUNNING):
            said = found.status
            news.append(f"STATUS={said}")
            if said == "stopping":
                news.append("STOPPING=1")
        if found.is_ready and not is_ready:
            is_ready = True
            news.append("READY=1")
        if watchdog is not None and found.is_live and time.monotonic() >= next_ping:
            next_ping = time.monotonic() + watchdog
            news.append("WATCHDOG=1")
        if news:
            tell("\n".join(news))


def _watchdog() -> float | None:
    """Seconds between two pings, half of what systemd allows; None where it waits for none."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    of = os.environ.get("WATCHDOG_PID") or str(os.getpid())
    if not microseconds.isdecimal() or int(microseconds) == 0 or of != str(os.getpid()):
        return None
    return int(microseconds) / 2e6
