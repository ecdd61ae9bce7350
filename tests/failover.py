"""A primary and its standby, real ones: kill -9, promote, pg_rewind, and a url that names both."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from spark_pgqueue import embedded
from spark_pgqueue.postgres import binaries, connection, schema
from spark_pgqueue.postgres.errors import PgQueueError
from tests.processes import wait_until
from tests.sql.queue import one

# What pg_rewind needs, and what a test may do without.
SETTINGS: dict[str, str | int] = {
    "wal_log_hints": "on", "fsync": "off", "max_wal_size": "512MB", "max_connections": 100,
}  # fmt: skip


class Pair:
    """Two servers. `primary` is the one that takes writes, `standby` follows it.

    A folder that has had a pair before goes on with its data: what was the primary, or was to be
    it, is the primary again, and has a new standby.

    Attributes:
        url: of both: whoever connects gets the one that takes writes.
    """

    def __init__(self, home: Path, settings: Mapping[str, str | int] = SETTINGS):
        self._home, self._settings = home, settings
        self._note = home / "primary"
        name = self._note.read_text() if self._note.exists() else "one"
        self.primary = self._start(name)
        self.owner = pwd.getpwnam(self.data(self.primary).owner())
        with connection.connect(self.primary.url) as conn:
            if one(conn, "select pg_is_in_recovery()"):  # the run ended before it was promoted
                conn.execute("select pg_promote()")
            self._wait_for_nobody(conn)
            schema.install(conn)
            # In a file, where pg_rewind finds it: it recovers the old primary first.
            conn.execute("alter system set wal_keep_size = '512MB'")
            conn.execute("select pg_reload_conf()")
        self.standby = self.add_standby()
        hosts = [conninfo_to_dict(self._url_of(name))["host"] for name in ("one", "two")]
        self.url = (
            f"postgresql://postgres@/postgres?host={','.join(map(str, hosts))}&port=5432,5432"
            "&target_session_attrs=read-write"
        )

    def _start(self, name: str) -> embedded.Server:
        return embedded.start(self._home / name, settings=dict(self._settings))

    def _url_of(self, name: str) -> str:
        return next(s.url for s in (self.primary, self.standby) if s.directory.name == name)

    def _wait_for_nobody(self, conn: psycopg.Connection) -> None:
        """From now on a commit waits for no standby."""
        conn.execute("alter system reset synchronous_standby_names")
        conn.execute("select pg_reload_conf()")

    def add_standby(self) -> embedded.Server:
        """Make the other folder a copy of the primary that follows it, whatever was there."""
        name = {"one": "two", "two": "one"}[self.primary.directory.name]
        data = self._home / name / "data"
        self._end(data)
        shutil.rmtree(data, ignore_errors=True)
        data.parent.mkdir(exist_ok=True)
        (data.parent / "lock").touch(mode=0o600)  # so that it is one of ours
        os.chown(data.parent, os.geteuid(), self.owner.pw_gid)
        self.run("pg_basebackup", "-d", self.primary.url, "-D", str(data), "-R", "-c", "fast",
                 as_owner=False)  # fmt: skip
        self.clean(data)
        return self._start(name)

    def run(self, program: str, *arguments: str, as_owner: bool = True) -> None:
        """Run a program of Postgres; skips the test where there is none."""
        folder = binaries.find_binaries(18)
        if os.geteuid() == 0:
            folder = binaries.for_everybody(folder)
        if not (folder / program).exists():
            pytest.skip(f"{folder} has no {program}")
        how: dict[str, Any] = {}
        if as_owner and os.geteuid() == 0:
            how = {"user": self.owner.pw_uid, "group": self.owner.pw_gid, "extra_groups": []}
        done = subprocess.run(
            [folder / program, *arguments], capture_output=True, text=True, timeout=120, cwd="/",
            **how,
        )  # fmt: skip
        assert done.returncode == 0, f"{program}: {done.stderr}"

    def clean(self, data: Path) -> None:
        """What a copy of a running server's folder has and must not have."""
        for left in (*data.glob(".s.PGSQL*"), *data.glob("postmaster.*")):
            if left.name != "postmaster.opts":
                left.unlink()
        for place in (data, *data.rglob("*")):
            os.chown(place, self.owner.pw_uid, self.owner.pw_gid, follow_symlinks=False)

    def data(self, server: embedded.Server) -> Path:
        return server.directory / "data"

    def synchronize(self) -> None:
        """From now on a commit waits until the standby has it on disk."""
        with connection.connect(self.primary.url) as conn:
            conn.execute("alter system set synchronous_standby_names = '*'")
            conn.execute("select pg_reload_conf()")
            state = "select sync_state = 'sync' from pg_stat_replication"
            wait_until(lambda: one(conn, state))

    def follow(self) -> None:
        """Until the standby has what the primary has."""
        with connection.connect(self.primary.url) as conn:
            lsn = one(conn, "select pg_current_wal_flush_lsn()")
        with connection.connect(self.standby.url) as conn:
            replayed = "select pg_last_wal_replay_lsn() >= %s::pg_lsn"
            wait_until(lambda: one(conn, replayed, lsn))

    def cut(self) -> None:
        """From now on the standby gets nothing more, as if its network were gone."""
        with connection.connect(self.standby.url) as conn:
            conn.execute("alter system set primary_conninfo = ''")
            conn.execute("select pg_reload_conf()")
            wait_until(lambda: not one(conn, "select count(*) from pg_stat_wal_receiver"))

    def kill(self) -> None:
        """kill -9 of all processes of the primary."""
        self._end(self.data(self.primary))

    def _end(self, data: Path) -> None:
        """kill -9 of the server of a folder, if it runs."""
        try:
            pid = int((data / "postmaster.pid").read_text().split()[0])
            postmaster = psutil.Process(pid)
            if "postgres" not in postmaster.name():
                return  # its number was given out again
            processes = [postmaster, *postmaster.children(recursive=True)]
        except (FileNotFoundError, psutil.NoSuchProcess):
            return
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=20)

    def promote(self) -> None:
        """The standby takes over; what was the primary is `standby` now, and does not run."""
        self._note.write_text(self.standby.directory.name)
        with connection.connect(self.standby.url) as conn:
            conn.execute("select pg_promote()")
        self.primary, self.standby = self.standby, self.primary

    def replace_standby(self) -> None:
        """Begin anew with the server that was killed, while the other one goes on.

        Commits wait for no standby until `synchronize`.
        """
        with connection.connect(self.primary.url) as conn:
            self._wait_for_nobody(conn)
        self.standby.close()
        self.standby = self.add_standby()

    def rewind(self) -> None:
        """Make the killed server a standby of the one that took over.

        That one stops meanwhile: its socket is in its data, and pg_rewind cannot read it there.
        """
        data, source = self.data(self.standby), self.data(self.primary)
        self.clean(data)
        self.primary.stop()
        self.run("pg_rewind", "-D", str(data), "--source-pgdata", str(source))
        self.primary.restart()
        (data / "standby.signal").touch()
        with (data / "postgresql.auto.conf").open("a") as settings:
            settings.write(f"primary_conninfo = '{self.primary.url}'\n")
        self.clean(data)
        self.standby.restart()

    def close(self) -> None:
        for server in (self.standby, self.primary):
            with suppress(PgQueueError, psycopg.Error):
                server.stop("immediate")
            server.close()


@contextmanager
def a_pair() -> Iterator[Pair]:
    """A primary and its standby, with the schema."""
    home = Path(tempfile.mkdtemp(prefix="pgqueue-test-", dir="/tmp"))
    home.chmod(0o755)
    pair = None
    try:
        pair = Pair(home)
        yield pair
    finally:
        if pair is not None:
            pair.close()
        shutil.rmtree(home, ignore_errors=True)
