"""A time limit for responses of Postgres: TCP stays connected to a server that is frozen."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.forks import HasDescriptor
from spark_pgqueue.postgres.url import conninfo
from spark_pgqueue.printable import warn

SHORT = 90.0
"""Seconds for a short statement, which may wait a minute for a lock."""

ANSWER = 10.0
"""Seconds in which a server that is not frozen responds to a trivial statement."""

_IDLE_LOOKS = 10  # the thread ends after so many checks without a statement


class TimeLimit:
    """Shuts down a connection whose server does not respond to a statement in time.

    A thread checks each second, or more often for a shorter limit, while there are statements.

    Args:
        seconds: the limit.
        is_alive: called at the limit; returns whether the connection's server is working, and the
            statement may continue for as long again. None for short statements.
    """

    def __init__(self, seconds: float, is_alive: Callable[[HasDescriptor], bool] | None = None):
        self._seconds = seconds
        self._is_alive = is_alive
        self._lock = threading.Lock()
        self._conn: HasDescriptor | None = None  # that waits for an answer
        self._until = 0.0
        self._is_watched = False

    @contextmanager
    def around(self, conn: HasDescriptor) -> Iterator[None]:
        """A context for one statement. After the limit it fails, as for a lost connection."""
        with self._lock:
            self._conn, self._until = conn, time.monotonic() + self._seconds
            if not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, name="pgqueue limit", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._conn = None

    def _watch(self) -> None:
        idle = 0
        while True:
            time.sleep(min(1.0, self._seconds / 4))
            with self._lock:
                idle = 0 if self._conn is not None else idle + 1
                if idle >= _IDLE_LOOKS:
                    self._is_watched = False
                    return
                waiting = self._conn, self._until
            if waiting[0] is not None and time.monotonic() >= self._until:
                may_go_on = self._is_alive is not None and self._is_alive(waiting[0])
                with self._lock:  # the statement may have ended meanwhile
                    if (self._conn, self._until) == waiting:
                        self._end_or_prolong(may_go_on)

    def _end_or_prolong(self, may_go_on: bool) -> None:
        if may_go_on:
            self._until = time.monotonic() + self._seconds
        elif self._conn is not None:
            _shut(self._conn)
            self._conn = None
            warn("no answer from Postgres for %s s: the connection is lost", self._seconds)


def answers(url: str | None, beside: HasDescriptor) -> bool:
    """Whether a server is working: it responds to another connection, even with an error.

    Args:
        url: the database.
        beside: a connection to the server. Other hosts and addresses of the url are not tried.
    """
    try:
        conn = psycopg.connect(_same_server(url, beside), autocommit=True)
    except (OSError, PgQueueError):  # the connection is closed, or the url not complete now
        return True
    except psycopg.errors.ConnectionTimeout:
        return False
    except psycopg.Error:
        return True
    try:
        conn.pgconn.send_query(b"select 1")
        return bool(select.select([conn.fileno()], [], [], ANSWER)[0])
    except psycopg.Error:
        return True
    finally:
        conn.close()


def _same_server(url: str | None, conn: HasDescriptor) -> str:
    """The url with only the address of the connection."""
    info = conninfo(url)
    with socket.socket(fileno=os.dup(conn.fileno())) as shared:
        if shared.family == socket.AF_UNIX:  # its name may be relative to the server's directory
            return info
        address, port = shared.getpeername()[:2]
    host = str(conninfo_to_dict(info).get("host") or address)
    host = address if "," in host else host  # the name, for a certificate
    return make_conninfo(info, host=host, hostaddr=address, port=port)


def _shut(conn: HasDescriptor) -> None:
    # Wakes the thread of the statement, which waits for the socket. Only that thread may close the
    # connection.
    try:
        with socket.socket(fileno=os.dup(conn.fileno())) as shared:
            shared.shutdown(socket.SHUT_RDWR)
    except (OSError, psycopg.Error):  # it is closed already
        pass
