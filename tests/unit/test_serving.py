"""The HTTP server of `pgqueue web` and `metrics`, asked by raw sockets, as no client would."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from spark_pgqueue import serving
from tests.unit.test_metrics import serving_at

HOST = "Host: localhost\r\n"
HIDDEN = "GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Asked:
    """A server, and the requests that it has answered."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.bodies: list[bytes] = []
        self.here = b"here"
        self.release = threading.Event()
        self.release.set()
        self.server = serving.Server(serving.Address("127.0.0.1", 0), self.answer)

    def answer(self, request: serving.Request) -> serving.Answer:
        self.paths.append(request.path)
        self.bodies.append(request.body)
        assert self.release.wait(20)
        return serving.Answer(self.here)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.server_address[1]), timeout=20)

    def send(self, text: str | bytes) -> str:
        """All that comes back, until the server closes the connection."""
        with self.connect() as conn:
            conn.sendall(text.encode("latin-1") if isinstance(text, str) else text)
            return rest_of(conn)


def rest_of(conn: socket.socket) -> str:
    found = b""
    try:
        while part := conn.recv(65536):
            found += part
    except ConnectionResetError:  # it was closed before it had read all
        pass
    return found.decode()


@pytest.fixture
def asked() -> Iterator[Asked]:
    found = Asked()
    with serving_at(found.server):
        yield found


@pytest.mark.parametrize(
    "text",
    [
        # a body, where one reader sees one and another does not
        f"GET / HTTP/1.1\r\n{HOST}Content-Length: {len(HIDDEN)}\r\n\r\n{HIDDEN}",
        f"HEAD / HTTP/1.1\r\n{HOST}Content-Length: {len(HIDDEN)}\r\n\r\n{HIDDEN}",
        f"GET / HTTP/1.1\r\n{HOST}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n{HIDDEN}",
        f"POST / HTTP/1.1\r\n{HOST}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n{HIDDEN}",
        f"POST / HTTP/1.1\r\n{HOST}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
        f"0\r\n\r\n{HIDDEN}",
        f"POST / HTTP/1.1\r\n{HOST}Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n{HIDDEN}",
        # two lengths
        f"POST / HTTP/1.1\r\n{HOST}Content-Length: 1\r\nContent-Length: 50\r\n\r\nx{HIDDEN}",
        f"POST / HTTP/1.1\r\n{HOST}Content-Length: 1\r\nContent-Length: 1\r\n\r\nx{HIDDEN}",
        f"POST / HTTP/1.1\r\n{HOST}Content-Length: 1, 50\r\n\r\nx{HIDDEN}",
        f"POST / HTTP/1.1\r\n{HOST}Content-Length: 1, 1\r\n\r\nx{HIDDEN}",
        f"GET / HTTP/1.1\r\n{HOST}Content-Length: 0\r\nContent-Length: 0\r\n\r\n{HIDDEN}",
        f"GET / HTTP/1.1\r\n{HOST}Content-Length: 0, 0\r\n\r\n{HIDDEN}",
        f"POST / HTTP/1.1\r\n{HOST}Content-Length: +1\r\n\r\nx{HIDDEN}",
        f"POST / HTTP/1.1\r\n{HOST}Content-Length: 0x1\r\n\r\nx{HIDDEN}",
        f"POST / HTTP/1.1\r\n{HOST}\r\nx{HIDDEN}",
        # headers that each reader cuts in another way
        f"GET / HTTP/1.1\r\n{HOST}X: a\r\n Content-Length: 50\r\n\r\n{HIDDEN}",
        f"GET / HTTP/1.1\r\n{HOST}no colon\r\nContent-Length: 50\r\n\r\n{HIDDEN}",
        f"GET / HTTP/1.1\r\n{HOST}: no name\r\n\r\n{HIDDEN}",
        f"GET / HTTP/1.1\r\nFrom Content-Length: 50\r\n{HOST}\r\n{HIDDEN}",
        f"GET / HTTP/1.1\r\n{HOST}From Content-Length: 50\r\n\r\n{HIDDEN}",
        f"GET / HTTP/1.1\r\n{HOST}Host: evil.example\r\n\r\n{HIDDEN}",
        f"GET / HTTP/1.1\r\n{HOST}X: a\rContent-Length: 50\r\n\r\n{HIDDEN}",
        f"GET / HTTP/1.1\r\n{HOST}X: a\x00b\r\n\r\n{HIDDEN}",
        f"GET / HTTP/1.1\r\n{HOST}Content-Length: 5 0\r\n\r\n{HIDDEN}",
        f"GET / HTTP/1.1\r\n{HOST}X\x00: b\r\n\r\n{HIDDEN}",
        f"POST / HTTP/1.1\r\n{HOST}Content-Length: 1\n\tX: y\r\n\r\nx{HIDDEN}",
        f"POST / HTTP/1.1\n{HOST}Content-Length: 1\nContent-Length: 1\n\nx{HIDDEN}",
        # lines without a CR
        f"GET / HTTP/1.1\n{HOST}\r\n{HIDDEN}",
        f"GET / HTTP/1.1\r\n{HOST}X: a\nY: b\r\n\r\n{HIDDEN}",
        f"GET / HTTP/1.1\r\n{HOST}X: a\n\r\n{HIDDEN}",
        f"GET / HTTP/1.1\r\n{HOST}\n{HIDDEN}",
        # request lines
        f"GET //[ HTTP/1.1 x\r\n{HOST}\r\n{HIDDEN}",
        f"GET http://[/ HTTP/1.1\r\n{HOST}\r\n{HIDDEN}",
        f"GET http://localhost/ HTTP/1.1\r\n{HOST}\r\n{HIDDEN}",
        f"GET  /  HTTP/1.1\r\n{HOST}\r\n{HIDDEN}",
        f"GET /\x01 HTTP/1.1\r\n{HOST}\r\n{HIDDEN}",
        f"GET * HTTP/1.1\r\n{HOST}\r\n{HIDDEN}",
        f"GET / HTTP/1.9\r\n{HOST}\r\n{HIDDEN}",
        f"GET /\r\n{HIDDEN}",
        f"\r\n{HIDDEN}",
    ],
)
def test_what_two_readers_could_read_in_two_ways_is_refused(
    asked: Asked, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """With 400, and the connection is closed: nothing behind it is a request (smuggling)."""
    found = asked.send(text)
    assert found.startswith("HTTP/1.1 400 ")
    assert found.count("\r\n\r\n") == 1, "there are two answers"
    assert asked.paths == []
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("keep", ["", "Connection: keep-alive\r\n"])
def test_a_connection_has_one_request(asked: Asked, keep: str) -> None:
    first = f"POST /first HTTP/1.1\r\n{HOST}{keep}Content-Length: 3\r\n\r\nabc"
    found = asked.send(first + HIDDEN)
    assert found.startswith("HTTP/1.1 200 ")
    assert "\r\nConnection: close\r\n" in found
    assert found.endswith("\r\n\r\nhere")
    assert (asked.paths, asked.bodies) == (["/first"], [b"abc"])


@pytest.mark.parametrize(
    "path", ["//[", "//evil.example/a", "/a//b", "/[", "/%zz?%zz&&=", "/?a;b=1"]
)
def test_any_path_is_an_answer(asked: Asked, path: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert asked.send(f"GET {path} HTTP/1.1\r\n{HOST}\r\n").startswith("HTTP/1.1 200 ")
    assert asked.paths[0].startswith("/")
    assert not asked.paths[0].startswith("//")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (f"GET / HTTP/1.1\r\n{HOST}Content-Length: 0\r\n\r\n", 200),
        (f"GET / HTTP/1.0\r\n{HOST}\r\n", 200),
        (f"POST / HTTP/1.1\r\n{HOST}Content-Length: 99999999\r\n\r\nx", 413),
        (f"PUT / HTTP/1.1\r\n{HOST}\r\n", 501),
        (f"OPTIONS / HTTP/1.1\r\n{HOST}\r\n", 501),
        (f"GET /{'x' * 70000} HTTP/1.1\r\n{HOST}\r\n", 431),
        (f"GET / HTTP/1.1\r\n{HOST}" + "X: y\r\n" * 9000 + "\r\n", 431),
        ("GET / HTTP/1.1\r\n\r\n", 400),
        ("GET / HTTP/1.0\r\n\r\n", 421),
        *(
            (f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n", status)
            for host, status in {
                **dict.fromkeys(("LOCALHOST.:80", "127.0.0.1", "[::1]:1", "[fe80::1%eth0]"), 200),
                **dict.fromkeys(("[", "", "[::1]evil.example", "[::1].evil.example"), 421),
                **dict.fromkeys(("evil@localhost", "localhost/evil", "localhost#evil"), 421),
                **dict.fromkeys(("localhost:x", "localhost, evil.example", "evil.example"), 421),
            }.items()
        ),
    ],
)
def test_other_requests_are_answered(asked: Asked, text: str, status: int) -> None:
    assert asked.send(text).startswith(f"HTTP/1.1 {status} ")


def test_a_body_that_ends_early_is_not_answered_as_if_it_were_whole(asked: Asked) -> None:
    with asked.connect() as conn:
        conn.sendall(f"POST / HTTP/1.1\r\n{HOST}Content-Length: 9\r\n\r\nabc".encode())
        conn.shutdown(socket.SHUT_WR)
        assert rest_of(conn).startswith("HTTP/1.1 400 ")
    assert asked.paths == []


@pytest.mark.parametrize("begin", ["", f"POST / HTTP/1.1\r\n{HOST}Content-Length: 60000\r\n\r\n"])
def test_who_sends_a_byte_now_and_then_is_not_waited_for(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, begin: str
) -> None:
    """Of a head, or of a body: the time is that of the whole request."""
    monkeypatch.setattr(serving, "READ_SECONDS", 0.5)
    began = time.monotonic()
    with asked.connect() as conn:
        conn.sendall(begin.encode())
        conn.settimeout(0.05)
        while time.monotonic() < began + 10:
            try:
                conn.sendall(b"X")
                assert conn.recv(1) == b""
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break
    assert time.monotonic() < began + 10


def test_the_threads_have_a_bound(asked: Asked) -> None:
    """More connections than that are refused at once; those that are free again serve others."""
    asked.release.clear()
    begun = threading.active_count()
    conns = [asked.connect() for _ in range(serving.MOST_CONNECTIONS)]
    for conn in conns:
        conn.sendall(f"GET /held HTTP/1.1\r\n{HOST}\r\n".encode())
    end = time.monotonic() + 20
    while len(asked.paths) < serving.MOST_CONNECTIONS and time.monotonic() < end:
        time.sleep(0.01)
    assert asked.send("").startswith("HTTP/1.1 503 ")
    assert threading.active_count() <= begun + serving.MOST_CONNECTIONS
    asked.release.set()
    for conn in conns:
        with conn:
            assert rest_of(conn).startswith("HTTP/1.1 200 ")
    while not (found := asked.send(HIDDEN)).startswith("HTTP/1.1 200 "):
        assert time.monotonic() < end, found


@pytest.mark.parametrize("begin", ["", "GET /never HTTP/1.1\r\nHo"])
def test_clients_that_send_nothing_keep_nobody_out(asked: Asked, begin: str) -> None:
    """A new connection ends the oldest one without a request; the others may still send."""
    with ExitStack() as stack:
        conns = [stack.enter_context(asked.connect()) for _ in range(serving.MOST_CONNECTIONS)]
        for conn in conns:
            conn.sendall(begin.encode())
        assert asked.send(HIDDEN).startswith("HTTP/1.1 200 ")
        assert rest_of(conns[0]) == ""
        conns[1].sendall(HIDDEN.encode() if not begin else b"st: localhost\r\n\r\n")
        assert rest_of(conns[1]).startswith("HTTP/1.1 200 ")


def test_clients_that_do_not_read_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_CONNECTIONS", 2)
    asked = Asked()
    asked.here = bytes(32 << 20)  # more than the sockets take
    with serving_at(asked.server), ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(asked.connect()).sendall(HIDDEN.encode())
        end = time.monotonic() + 10
        while len(asked.paths) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        asked.here = b"here"
        while not (found := asked.send(HIDDEN)).startswith("HTTP/1.1 200 "):
            assert time.monotonic() < end, found
