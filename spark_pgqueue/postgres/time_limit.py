"""A limit for an answer of Postgres: a server that is frozen answers TCP for ever."""

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

from spark_pgqueue.postgres.forks import HasDescriptor
from spark_pgqueue.postgres.url import conninfo
from spark_pgqueue.printable import warn

SHORT = 90.0
"""Seconds. A statement that should be short may wait a minute for a lock."""

ANSWER = 10.0
"""Seconds in which a server that is not frozen answers a statement that does nothing."""

_IDLE_LOOKS = 10  # after so many looks without a statement the thread ends


class TimeLimit:
    """Shuts a connection down whose server leaves a statement without an answer for too long.

    A thread looks each second, or more often for a shorter limit, while there are statements.

    Args:
        seconds: the limit.
        is_alive: says at the limit whether the connection's server is at work, and the statement
            may go on for as long again; None for statements that should be short.
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
        """Around one statement. After the limit it fails, as for a connection that was lost."""
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
    """Whether a server is at work: it answers another connection, be it by an error.

    Args:
        url: the database.
        beside: a connection to the server. Another host or address of the url says nothing.
    """
    try:
        conn = psycopg.connect(_same_server(url, beside), autocommit=True)
    except OSError:  # the connection is closed
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
    """The url with the address alone to which the connection leads."""
    info = conninfo(url)
    with socket.socket(fileno=os.dup(conn.fileno())) as shared:
        if shared.family == socket.AF_UNIX:  # the name may be relative to the server's directory
            return info
        address, port = shared.getpeername()[:2]
    host = str(conninfo_to_dict(info).get("host") or address)
    host = address if "," in host else host  # the name, where there is one: of a certificate
    return make_conninfo(info, host=host, hostaddr=address, port=port)


def _shut(conn: HasDescriptor) -> None:
    # The thread of the statement waits for the socket, and finds it at its end. Only that thread
    # may close the connection.
    try:
        with socket.socket(fileno=os.dup(conn.fileno())) as shared:
            shared.shutdown(socket.SHUT_RDWR)
    except (OSError, psycopg.Error):  # it is closed already
        pass
