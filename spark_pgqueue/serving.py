"""HTTP for `pgqueue metrics` and `pgqueue web`: h11 reads requests and writes answers.

A connection has one request, and what two readers could read in two ways is refused. So nothing can
be smuggled past a proxy that reads a request otherwise than this server.

The connections and their limits are our own: uvicorn, hypercorn, granian, waitress, cheroot and
aiohttp wait without end for a body that arrives a byte at a time, and most of them for headers
(November 2026).
"""

from __future__ import annotations

import ipaddress
import json
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from email.utils import formatdate
from importlib.util import find_spec
from socket import AF_INET6, SHUT_RDWR, socket
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import BoundedSemaphore, Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

from spark_pgqueue.postgres.errors import PgQueueError, how_to_install
from spark_pgqueue.postgres.url import redact
from spark_pgqueue.printable import for_json, text_of

if TYPE_CHECKING:
    import h11

MAX_BODY = 64 << 10  # bytes of a request
MOST_CONNECTIONS = 32  # at a time, each with a thread
READ_SECONDS = 10.0  # for a whole request
SEND_SECONDS = 30.0  # for a whole answer
END_SECONDS = 1.0  # for the end of a connection that makes room for another


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
    text = json.dumps(value, default=for_json, ensure_ascii=False)
    return Answer(text.encode(), status=status)


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


class Server(ThreadingTCPServer):
    """Answers requests, each in a thread of its own; at most `MOST_CONNECTIONS` at a time.

    Beyond these, a new connection ends the oldest one that waits for its client. So clients that
    connect and send nothing, or do not read, cannot keep out a probe or a scrape.

    Args:
        where: the address to listen on.
        answer: answers a request; an exception becomes an error without details.
        names: allowed names of the server, besides localhost, addresses and its own host. Requests
            for other names are refused: a foreign page whose name resolves to this server could
            read the answers (DNS rebinding). None allows all names.
        headers: the headers of every answer.

    Raises:
        PgQueueError: h11 is not installed.
        OSError: it cannot listen there.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(
        self,
        where: Address,
        answer: Callable[[Request], Answer],
        *,
        names: tuple[str, ...] | None = (),
        headers: dict[str, str] | None = None,
    ):
        if find_spec("h11") is None:
            raise PgQueueError(
                "serving HTTP requires the package h11 (spark-pgqueue[web])",
                hint=how_to_install("web"),
            )
        if ":" in where.host:
            self.address_family: int = AF_INET6
        self.answer = answer
        self.has_any_name: bool = names is None
        all_names = (*(names or ()), where.host, "localhost")
        self.names: set[str] = {name.lower().rstrip(".") for name in all_names}
        self.headers: dict[str, str] = headers or {}
        self._room = BoundedSemaphore(MOST_CONNECTIONS)
        self._waiting: dict[socket, None] = {}  # connections that wait for their clients, in order
        self._lock = Lock()  # of these
        super().__init__((where.host, where.port), _Handler)

    @property
    def url(self) -> str:
        """The server's URL, with its actual port."""
        host, port = self.server_address[:2]
        host = host.decode() if isinstance(host, bytes) else str(host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    def may_be_called(self, host: str | None) -> bool:
        """Whether a request may have this Host."""
        if self.has_any_name:
            return True
        found = re.fullmatch(r"(?:([\w.-]+)|\[([\w.:%]+)\])(?::\d*)?", host or "", re.ASCII)
        if found is None:
            return False
        name = (found[1] or found[2]).lower().rstrip(".")
        return name in self.names or _address(name) is not None

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or refuse when there are too many."""
        if self._room.acquire(blocking=False) or (
            self._end_oldest() and self._room.acquire(timeout=END_SECONDS)
        ):
            try:
                self.wait_for(request)
                super().process_request(request, client_address)
            except BaseException:  # no thread could be started
                self._leave(request)
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
            self._leave(request)

    def wait_for(self, connection: socket) -> None:
        """Note that a connection waits for its client from now on, and may be ended."""
        with self._lock:
            self._waiting[connection] = None

    def wait_no_longer(self, connection: socket) -> None:
        """Note that a connection does not wait for its client."""
        with self._lock:
            self._waiting.pop(connection, None)

    def _leave(self, connection: socket) -> None:
        self.wait_no_longer(connection)
        self._room.release()

    def _end_oldest(self) -> bool:
        """End the oldest connection that waits for its client; returns whether there was one."""
        with self._lock:
            oldest = next(iter(self._waiting), None)
            if oldest is not None:
                del self._waiting[oldest]
                with suppress(OSError):  # its client went away
                    oldest.shutdown(SHUT_RDWR)
        return oldest is not None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that went away."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseRequestHandler):
    """Reads a request with h11, and answers it."""

    request: socket
    server: Server  # type: ignore[assignment]

    def handle(self) -> None:
        import h11

        http = h11.Connection(h11.SERVER)
        try:
            request = self._read(http)
            self.server.wait_no_longer(self.request)
            answer = request if isinstance(request, Answer) else self._answer(request)
        except h11.RemoteProtocolError as error:  # its text repeats what was sent
            answer = as_json({"error": "this is not HTTP/1.1"}, error.error_status_hint)
        self._send(http, answer)

    def _read(self, http: h11.Connection) -> Request | Answer:
        """The request; or the answer to one that is refused."""
        import h11

        until = time.monotonic() + READ_SECONDS
        received, body, request = bytearray(), bytearray(), None
        while not isinstance(event := http.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Request):
                request = event
                if refusal := _refusal(request, received):
                    return refusal
            elif isinstance(event, h11.Data):
                body += event.data
            elif event is not h11.NEED_DATA or (left := until - time.monotonic()) <= 0:
                raise TimeoutError("the client disconnected, or is too slow")
            else:
                self.request.settimeout(left)
                received += (data := self.request.recv(4096))
                http.receive_data(data)
        assert request is not None
        path, _, query = request.target.decode().partition("?")
        return Request(
            "GET" if request.method == b"HEAD" else request.method.decode(),
            f"/{path.lstrip('/')}",
            dict(parse_qsl(query, keep_blank_values=True)),
            {name.decode(): value.decode("latin-1") for name, value in request.headers},
            bytes(body),
        )

    def _answer(self, request: Request) -> Answer:
        if not self.server.may_be_called(request.headers.get("host")):
            error = "this name is not the server's: say --allow-host NAME, if it is"
            return as_json({"error": error}, 421)
        try:
            return self.server.answer(request)
        except Exception as error:
            log(error)
            return as_json({"error": "it failed; the server's log says why"}, 500)

    def _send(self, http: h11.Connection, answer: Answer) -> None:
        import h11

        headers = {
            "Connection": "close",  # and socketserver closes it
            "Date": formatdate(usegmt=True),
            "Content-Type": answer.kind,
            "Content-Length": str(len(answer.body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            **self.server.headers,
        }
        head = h11.Response(status_code=answer.status, headers=[*headers.items()])
        sent = http.send(head) or b""
        with suppress(h11.LocalProtocolError):  # the answer to HEAD has no body
            sent += http.send(h11.Data(data=answer.body)) or b""
        self.server.wait_for(self.request)
        self.request.settimeout(SEND_SECONDS)
        self.request.sendall(sent)


def _refusal(request: h11.Request, received: bytearray) -> Answer | None:
    """The answer to what h11 reads, and another reader might read otherwise; None for the rest.

    Args:
        request: the request, whose lines and equal lengths h11 has joined.
        received: its bytes, to the end of its headers or further.
    """
    lines = re.split(rb"(?<=\n\n)|(?<=\n\r\n)", received, maxsplit=1)[0]
    lengths = re.findall(rb"\ncontent-length:.*", lines, re.IGNORECASE)
    headers = dict(request.headers)
    length = int(headers.get(b"content-length", 0))
    wanted = request.method == b"POST"
    why, status = "", 400
    if request.method not in (b"GET", b"HEAD", b"POST"):
        why, status = "the method is not GET, HEAD or POST", 501
    elif not request.target.startswith(b"/") or request.http_version not in (b"1.0", b"1.1"):
        why = "the request line is not METHOD /path HTTP/1.1"
    elif re.search(rb"\n[ \t]|[^\r]\n", lines):
        why = "a line of the headers is not Name: value, with CR and LF behind it"
    elif b"transfer-encoding" in headers:
        why = "Transfer-Encoding is not supported"
    elif length and not wanted:
        why = "only POST has a body"
    elif not wanted <= len(lengths) <= 1 or b"," in b"".join(lengths):
        why = "there must be one Content-Length"
    elif length > MAX_BODY:
        why, status = "a body of at most 64 kB is needed", 413
    return as_json({"error": why}, status) if why else None


class Shared:
    """The result of a call, shared by all requests within a moment: a poll costs the database once.

    Args:
        call: the call; it runs in a thread of its own.
        seconds: how long its result is valid.
    """

    def __init__(self, call: Callable[[], Any], seconds: float = 1.0):
        self._call, self._seconds = call, seconds
        self._lock = Lock()
        self._until = 0.0
        self._last: Future[Any] | None = None

    def __call__(self, patience: float | None = None) -> Any:
        """The result.

        Args:
            patience: how many seconds to wait for it; None for as long as the call takes.

        Raises:
            TimeoutError: the call takes longer. It continues, and later requests wait for it.
        """
        with self._lock:
            last = self._last
            if last is None or (last.done() and time.monotonic() >= self._until):
                last = Future()
                Thread(target=self._run, args=(last,), daemon=True).start()
                self._last = last
        return last.result(patience)

    def _run(self, last: Future[Any]) -> None:
        try:
            found = self._call()
        except BaseException as error:
            last.set_exception(error)
        else:
            self._until = time.monotonic() + self._seconds
            last.set_result(found)


def log(error: BaseException | str) -> None:
    """Write a line to standard error, without passwords."""
    print("pgqueue:", redact(text_of(error)), file=sys.stderr, flush=True)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
