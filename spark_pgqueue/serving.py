"""HTTP for `pgqueue metrics` and `pgqueue web`: the standard library's server, and who may ask."""

from __future__ import annotations

import ipaddress
import json
import re
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.url import redact
from spark_pgqueue.printable import printable

MAX_BODY = 64 << 10  # bytes of a request


class Address(NamedTuple):
    """Where to listen.

    Attributes:
        host: a name or an address; only this machine by default.
        port: 0 for any that is free.
    """

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether nobody but this machine can connect."""
        return self.host == "localhost" or (
            (address := _address(self.host)) is not None and address.is_loopback
        )


def address(text: str, default_port: int) -> Address:
    """What `HOST`, `HOST:PORT`, `:PORT` or `PORT` says; without a host it is this machine alone.

    Raises:
        ValueError: it says something else.
    """
    found = re.fullmatch(r"(\[[\w:.%]+\]|[\w.-]*?)(?::?(\d{1,5}))?", text.strip(), re.ASCII)
    port = int(found[2]) if found and found[2] else default_port
    if found is None or port > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT, :PORT or PORT")
    return Address(found[1].strip("[]") or "127.0.0.1", port)


class Answer(NamedTuple):
    """What a request is answered with."""

    body: bytes
    kind: str = "application/json; charset=utf-8"
    status: int = 200


def as_json(value: Any, status: int = 200) -> Answer:
    """A value as JSON."""
    return Answer(json.dumps(value, ensure_ascii=False).encode(), status=status)


class Request(NamedTuple):
    """A request that may be answered.

    Attributes:
        method: GET or POST.
        path: without what follows a question mark, ...
        query: ... and that, by name; of a name that comes twice the last.
        headers: by name in small letters.
        body: bytes; empty for GET.
    """

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


class Server(ThreadingHTTPServer):
    """Answers requests, each in a thread of its own.

    Args:
        where: to listen.
        answer: what to answer; an exception becomes an error without details.
        names: names by which it may be asked for, besides localhost, addresses and the host that it
            listens on. Another one is refused: a page of somebody else's, whose name was made to
            lead here, could read what it says.
        headers: of every answer.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self,
        where: Address,
        answer: Callable[[Request], Answer],
        *,
        names: tuple[str, ...] = (),
        headers: dict[str, str] | None = None,
    ):
        if ":" in where.host:
            self.address_family: int = AF_INET6
        self.answer = answer
        all_names = (*names, where.host, "localhost")
        self.names: set[str] = {name.lower().rstrip(".") for name in all_names}
        self.headers: dict[str, str] = headers or {}
        super().__init__((where.host, where.port), _Handler)

    @property
    def url(self) -> str:
        """Where it listens, with the port that it got."""
        host, port = self.server_address[:2]
        host = host.decode() if isinstance(host, bytes) else str(host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    def may_be_called(self, host: str | None) -> bool:
        """Whether a request may have this Host."""
        if host is None:
            return False
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name.rstrip(".") in self.names or _address(name) is not None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked went away."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server  # type: ignore[assignment]
    protocol_version = "HTTP/1.1"
    server_version = "pgqueue"
    sys_version = ""
    timeout = 30  # seconds that a connection may say nothing

    def do_GET(self) -> None:
        self._handle(b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            self.close_connection = True
            self._send(as_json({"error": "a body of at most 64 kB is needed"}, 413))
            return
        self._handle(self.rfile.read(int(length)))

    def _handle(self, body: bytes) -> None:
        if not self.server.may_be_called(self.headers.get("Host")):
            error = "this name is not the server's: say --allow-host NAME, if it is"
            self._send(as_json({"error": error}, 421))
            return
        target = urlsplit(self.path)
        request = Request(
            "GET" if self.command == "HEAD" else self.command,
            target.path,
            dict(parse_qsl(target.query, keep_blank_values=True)),
            {name.lower(): value for name, value in self.headers.items()},
            body,
        )
        try:
            answer = self.server.answer(request)
        except Exception as error:
            log(error)
            answer = as_json({"error": "it failed; the server's log says why"}, 500)
        self._send(answer)

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: who looks every few seconds would fill a disk."""


class Shared:
    """The result of a call, shared by all who ask within a moment: a poll costs the database once.

    Args:
        call: what to call.
        seconds: how long its result is good.
    """

    def __init__(self, call: Callable[[], Any], seconds: float = 1.0):
        self._call, self._seconds = call, seconds
        self._lock = Lock()
        self._until = 0.0
        self._value: Any = None

    def __call__(self) -> Any:
        with self._lock:
            if time.monotonic() >= self._until:
                self._value = self._call()
                self._until = time.monotonic() + self._seconds
            return self._value


def log(error: BaseException | str) -> None:
    """A line on standard error, without passwords."""
    text = error.message if isinstance(error, PgQueueError) else str(error)
    print("pgqueue:", printable(redact(" ".join(text.split()))), file=sys.stderr, flush=True)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
