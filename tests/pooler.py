"""A real PgBouncer in front of a server of the tests."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
"""Debian puts it where only root's path leads."""

MODES = ("transaction", "session")

CONFIGURATION = """
[databases]
{database} = host={host} port={port} dbname={database} user={user}{password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {size}
max_client_conn = 1000
logfile = {folder}/log
pidfile = {folder}/pid
"""


@contextmanager
def pooled(url: str, mode: str, size: int) -> Iterator[str]:
    """The url of a database through a PgBouncer, which ends with the block.

    Args:
        url: the database.
        mode: transaction or session.
        size: how many connections it makes to the server, at most.
    """
    if PROGRAM is None:
        pytest.skip("no pgbouncer (on Debian and Ubuntu: apt install pgbouncer)")
    given = conninfo_to_dict(url)
    folder = Path(tempfile.mkdtemp(prefix="pgqueue-pooler-"))
    # It refuses to run as root: as whoever may use the server's socket.
    user, group = _owner(str(given["host"])) if os.getuid() == 0 else (None, None)
    if user is not None and group is not None:
        os.chown(folder, user, group)
    listen = _free_port()
    (folder / "ini").write_text(
        CONFIGURATION.format(
            database=given["dbname"],
            host=given["host"],
            port=given.get("port", 5432),
            user=given["user"],
            password=f" password={password}" if (password := given.get("password")) else "",
            listen=listen,
            mode=mode,
            size=size,
            folder=folder,
        )
    )
    through = make_conninfo(
        "", host="127.0.0.1", port=listen, dbname=str(given["dbname"]), user=str(given["user"])
    )
    process = subprocess.Popen(
        [PROGRAM, "-q", str(folder / "ini")],
        user=user,
        group=group,
        extra_groups=None if group is None else [],
        stdin=subprocess.DEVNULL,
    )
    try:
        _wait_for(through, process, folder)
        yield through
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _owner(host: str) -> tuple[int, int]:
    """The user and group that may use a socket in a folder; of an address, any but root.

    They are let through to it: the server itself needs no way, it is there.
    """
    if not host.startswith("/"):
        return 65534, 65534
    found = Path(host).stat()
    for parent in Path(host).resolve().parents:
        if parent.stat().st_uid == os.getuid() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    return found.st_uid, found.st_gid


def _free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return any_port.getsockname()[1]


def _wait_for(url: str, process: subprocess.Popen[bytes], folder: Path) -> None:
    end = time.monotonic() + 30
    while True:
        log = (folder / "log").read_text() if (folder / "log").exists() else ""
        assert process.poll() is None, f"pgbouncer ended with {process.returncode}: {log}"
        try:
            psycopg.connect(url, connect_timeout=5).close()
            return
        except psycopg.OperationalError:
            assert time.monotonic() < end, log
            time.sleep(0.05)
