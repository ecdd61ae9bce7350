"""A server in a network of its own, which loses packets when a test says so, in each direction.

A thread that has entered the network takes along all that it starts: threads and processes. The
server's Unix socket can be reached from outside, whatever the network does.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from spark_pgqueue.postgres import connection, embedded, schema
from tests.conftest import SETTINGS, VERSIONS
from tests.sql.queue import one

T = TypeVar("T")

_NEWNET = 0x40000000  # CLONE_NEWNET
_LIBC = ctypes.CDLL(None, use_errno=True)

LOST = {
    "requests": "tcp dport 5432 drop",
    "answers": "tcp sport 5432 drop",
    "both": "tcp dport 5432 drop\ntcp sport 5432 drop",
}
"""The directions, and rules that lose the packets where they arrive: whoever sends sees nothing."""

# A connection is given up after 3 s, at both ends, in place of 20 s (`postgres/url.py`) and hours.
SOON = "keepalives_idle=1&keepalives_interval=1&keepalives_count=2&tcp_user_timeout=3000"
SERVER = {
    "listen_addresses": "127.0.0.1", "synchronous_commit": "on", "tcp_user_timeout": 3000,
    "tcp_keepalives_idle": 1, "tcp_keepalives_interval": 1, "tcp_keepalives_count": 2,
}  # fmt: skip


class Network:
    """A network namespace with a server.

    Attributes:
        server: the server; its own url goes past the network.
        url: of the server, through the network.
    """

    def __init__(self, home: Path):
        self._namespace = self._apart(self._make)
        self.server = self.run(
            lambda: embedded.start(home, version=VERSIONS[0], settings={**SETTINGS, **SERVER})
        )
        rules = home / "data" / "pg_hba.conf"
        rules.write_text("local all all trust\nhost all all 127.0.0.1/32 trust\n")
        with connection.connect(self.server.url) as conn:
            conn.execute("select pg_reload_conf()")
            schema.install(conn)
        self.url = f"postgresql://postgres@127.0.0.1/postgres?connect_timeout=2&{SOON}"

    @staticmethod
    def _apart(job: Callable[[], T]) -> T:
        """Run a job in a thread of its own, which may go into another network."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(job())
            except BaseException as error:
                result.set_exception(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return result.result()

    @staticmethod
    def _make() -> int:
        if _LIBC.unshare(_NEWNET):
            pytest.skip(f"a network of its own needs root: {os.strerror(ctypes.get_errno())}")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    def run(self, job: Callable[[], T]) -> T:
        """Run a job in the network; returns its result."""

        def inside() -> T:
            assert _LIBC.setns(self._namespace, _NEWNET) == 0
            return job()

        return self._apart(inside)

    @contextmanager
    def losing(self, direction: str) -> Iterator[None]:
        """Within the block, all packets of a direction are lost: see `LOST`."""
        hook = "type filter hook input priority 0"
        self._nft(f"table inet faults {{\nchain input {{\n{hook}\n{LOST[direction]}\n}}\n}}\n")
        try:
            yield
        finally:
            self._nft("delete table inet faults\n")

    def sessions(self) -> int:
        """How many sessions of the server came through the network."""
        with connection.connect(self.server.url) as conn:
            count = "select count(*) from pg_stat_activity where client_addr is not null"
            return one(conn, count)

    def _nft(self, rules: str) -> None:
        command = ["nft", "-f", "-"]
        self.run(lambda: subprocess.run(command, input=rules, text=True, check=True))

    def close(self) -> None:
        """Stop the server, and let go of the network."""
        self.server.stop("immediate")
        self.server.close()
        os.close(self._namespace)


@contextmanager
def a_network(home: Path) -> Iterator[Network]:
    """A network with a server in a new folder; skips the test where there can be none."""
    if missing := [tool for tool in ("ip", "nft") if shutil.which(tool) is None]:
        pytest.skip(f"apt-get install iproute2 nftables: no {', '.join(missing)} here")
    network = Network(home)
    try:
        yield network
    finally:
        network.close()
        shutil.rmtree(home)
