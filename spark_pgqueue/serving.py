"""HTTP for `pgqueue metrics` and `pgqueue web`: the standard library's server, with checks.

A connection has one request, and what two readers could read in two ways is refused. So nothing can
be smuggled past a proxy that reads a request otherwise than this server.
"""

from __future__ import annotations

import io
import ipaddress
import json
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, socket
from threading import BoundedSemaphore, Lock
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.url import redact
from spark_pgqueue.printable import printable

MAX_BODY = 64 << 10  # bytes of a request
MOST_CONNECTIONS = 32  # at a time, each with a thread
READ_SECONDS = 10.0  # for a whole request
_REQUEST_LINE = re.compile(rb"[A-Z]+ /[!-~]* HTTP/1\.[01]\r?\n")


class Address(NamedTuple):
    """An address to listen on.

    Attributes:
        host: a name or an address; by default only this machine.
        port: 0 for any free port.
    """

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return self.host == "localhost" or (
            (address := _address(self.host)) is not None and address.is_loopback
        )


def address(text: str, default_port: int) -> Address:
    """The address in `HOST`, `HOST:PORT`, `:PORT` or `PORT`; without a host only this machine.

    Raises:
        ValueError: the text is no address.
    """
    found = re.fullmatch(r"(\[[\w:.%]+\]|[\w.-]*?)(?::?(\d{1,5}))?", text.strip(), re.ASCII)
    port = int(found[2]) if found and found[2] else default_port
    if found is None or port > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT, :PORT or PORT")
    return Address(found[1].strip("[]") or "127.0.0.1", port)


class Answer(NamedTuple):
    """The answer to a request."""

    body: bytes
    kind: str = "application/json; charset=utf-8"
    status: int = 200


def as_json(value: Any, status: int = 200) -> Answer:
    """A value as JSON."""
    return Answer(json.dumps(value, ensure_ascii=False).encode(), status=status)


class Request(NamedTuple):
    """A request that passed the access checks.

    Attributes:
        method: GET or POST.
        path: the part before a question mark, ...
        query: ... and the part behind it, by name; the last value of a name.
        headers: by name, in small letters.
        body: bytes; empty for GET.
    """

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


class Server(ThreadingHTTPServer):
    """Answers requests, each in a thread of its own; at most `MOST_CONNECTIONS` at a time.

    Args:
        where: the address to listen on.
        answer: answers a request; an exception becomes an error without details.
        names: allowed names of the server, besides localhost, addresses and its own host. Requests
            for other names are refused: a foreign page whose name resolves to this server could
            read the answers (DNS rebinding).
        headers: the headers of every answer.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = MOST_CONNECTIONS

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
        self._room = BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((where.host, where.port), _Handler)

    @property
    def url(self) -> str:
        """The server's URL, with its actual port."""
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

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or refuse when there are too many."""
        if self._room.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except BaseException:  # no thread could be started
                self._room.release()
                raise
            return
        request.setblocking(False)
        with suppress(OSError):
            request.send(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that went away."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server  # type: ignore[assignment]
    raw_requestline: bytes
    protocol_version = "HTTP/1.1"
    server_version = "pgqueue"
    sys_version = ""
    timeout = 30  # seconds for which a client may be slow to read the answer

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Reading(self.connection))

    def parse_request(self) -> bool:
        """Read the request line and the headers; refuse them, if they are not plain."""
        self.command, self.requestline = "", ""
        self.request_version = self.protocol_version
        if not _REQUEST_LINE.fullmatch(self.raw_requestline):
            why = "the request line is not METHOD /path HTTP/1.1"
        elif not super().parse_request():
            return False
        else:
            why = self._ambiguity()
        if why is not None:
            self._send(as_json({"error": why}, 400))
        return why is None

    def handle_expect_100(self) -> bool:
        """Say nothing before the answer: bodies are small."""
        return True

    def _ambiguity(self) -> str | None:
        """What another reader of this request may read otherwise; None for nothing."""
        headers = self.headers
        values = [value for value in headers.values() if "\r" in value or "\n" in value]
        # The parser takes a line that begins with "From " for the begin, or the end, of a mail.
        if headers.defects or headers.get_unixfrom() or headers.get_payload() or values:
            return "a line of the headers is not Name: value"
        if len(headers.get_all("Host", [])) > 1:
            return "there are two Host"
        if "Transfer-Encoding" in headers:
            return "Transfer-Encoding is not supported"
        lengths = headers.get_all("Content-Length", [])
        if self.command == "POST":
            if len(lengths) != 1 or not re.fullmatch("[0-9]{1,18}", lengths[0]):
                return "there must be one Content-Length"
        elif lengths not in ([], ["0"]):
            return f"{self.command} has no body"
        return None

    def do_GET(self) -> None:
        self._handle(b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        if length > MAX_BODY:
            self._send(as_json({"error": "a body of at most 64 kB is needed"}, 413))
            return
        body = self.rfile.read(length)
        if len(body) < length:
            self._send(as_json({"error": "the body is shorter than Content-Length"}, 400))
            return
        self._handle(body)

    def _handle(self, body: bytes) -> None:
        if not self.server.may_be_called(self.headers.get("Host")):
            error = "this name is not the server's: say --allow-host NAME, if it is"
            self._send(as_json({"error": error}, 421))
            return
        path, _, query = self.path.partition("?")
        request = Request(
            "GET" if self.command == "HEAD" else self.command,
            path,
            dict(parse_qsl(query, keep_blank_values=True)),
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
        self.connection.settimeout(self.timeout)
        self.send_response(answer.status)
        self.send_header("Connection", "close")  # and the handler closes it
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
        """Log nothing: a scraper that polls every few seconds would fill a disk."""


class _Reading(io.RawIOBase):
    """Reads a request from a connection, within a time for all of it."""

    def __init__(self, connection: socket):
        self._connection = connection
        self._until = time.monotonic() + READ_SECONDS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request takes too long")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class Shared:
    """The result of a call, shared by all requests within a moment: a poll costs the database once.

    Args:
        call: the call.
        seconds: how long its result is valid.
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
    """Write a line to standard error, without passwords."""
    text = error.message if isinstance(error, PgQueueError) else str(error)
    print("pgqueue:", printable(redact(" ".join(text.split()))), file=sys.stderr, flush=True)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
