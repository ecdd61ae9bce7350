"""An embedded Postgres, started or found by its directory.

    with embedded.start("my-data") as server:
        connection = spark_pgqueue.connect(server.url)

The server listens only on a Unix socket, which only its own user (and root) can access. If the
setting listen_addresses enables TCP, pg_hba.conf rejects all TCP connections until you change it.
Any number of processes can use one directory. The server stops with the last process that called
`start`; processes that only use the `url` do not count. If that last process is killed, the server
runs until the next process that uses the directory ends.

    directory/data     the data directory, with the socket and the log, server.log
    directory/users    locked (shared) by each process that uses the server, until it ends
    directory/lock     held while a server is started or stopped
    directory/kept     exists while the server stays up without users: see `keep_up`
    directory/socket   the path of a short link to the socket, if the directory's path is too long

`binaries` finds the programs of Postgres, and the user that root's servers run as. This user does
not need access to the folders above the directory, which may be in /root: Postgres gets its data
directory as an open descriptor, /proc/self/fd/N, for which the kernel checks no permissions on
those folders. (The current directory would not work: before version 16 Postgres leaves it for a
moment, and returns to it by its name.)
"""

from __future__ import annotations

import atexit
import fcntl
import os
import pwd
import re
import shlex
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from spark_pgqueue.postgres.binaries import find_binaries, for_everybody, owner_of
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.own_files import (
    check_own_folder,
    open_own,
    owner_of_own,
    put_own,
    read_own,
    replace_own,
)

_PORT = 5432  # only part of the socket's name
_TIMEOUT = 120  # seconds for a start (it may have to recover from a crash) or a stop
_DESCRIPTORS = Path("/proc/self/fd")
# The lines that initdb writes for TCP with --auth-host=trust.
_TRUSTED = r"(?m)^(host\s+\w+\s+all\s+(?:127\.0\.0\.1/32|::1/128)\s+)trust$"


def start(
    directory: str | os.PathLike[str],
    *,
    version: int = 18,
    settings: Mapping[str, str | int] | None = None,
    keep: bool = False,
) -> Server:
    """Start the embedded Postgres of a directory, unless it is already running.

        >>> with embedded.start("my-data") as server, spark_pgqueue.connect(server.url) as queue:
        ...     version = queue.install()

    Args:
        directory: the server's folder; created if missing. It must be empty, or that of a server.
        version: major version of Postgres; must be that of existing data.
        settings: Postgres settings by name, for instance `{"fsync": "off"}`. They apply only when
            this call starts the server.
        keep: whether the server keeps running after the last process that uses it.

    Returns:
        the server; its `url` connects to it from this machine.

    Raises:
        PgQueueError: the binaries are missing, the data is of another version, the directory holds
            something else, or Postgres does not start (with the end of its log).
    """
    return Server(Path(directory).expanduser().resolve(), version, dict(settings or {}), keep)


def version_in(directory: str | os.PathLike[str]) -> int | None:
    """The major version of the embedded Postgres of a directory; None where there is none.

    Raises:
        PgQueueError: the data belongs to another user, or has no version.
    """
    written = Path(directory).expanduser().resolve() / "data" / "PG_VERSION"
    try:
        return int(read_own(written))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        owner = owner_of_own(written.parent)
        raise PgQueueError(f"{directory} belongs to {owner}") from None
    except ValueError:
        raise PgQueueError(f"{written} does not contain a version of Postgres") from None


class Server:
    """A running embedded Postgres that this process uses; made by `start`.

    Attributes:
        directory (Path): the server's folder.
        version (int): the major version.
    """

    def __init__(self, directory: Path, version: int, settings: dict[str, str | int], keep: bool):
        self.directory = directory
        self.version = version
        self._settings = settings
        self._keep = keep
        self._pid = os.getpid()
        self._bin = find_binaries(version)
        self._data = directory / "data"
        self._kept = directory / "kept"
        _check_directory(directory, version)
        self._owner = owner_of(self._data)
        if self._owner:
            self._bin = for_everybody(self._bin)
        self._users: IO[bytes] | None = None
        self._way: Path | None = None
        try:
            with self._lock():
                if not self._data.exists():
                    self._initialize()
                if not self.is_running():
                    self._run()
                self._users = self._open_own("users")
                fcntl.flock(self._users, fcntl.LOCK_SH)
        except PermissionError as error:
            owner = owner_of_own(directory)
            raise PgQueueError(f"{directory} belongs to {owner}: {error}") from None
        atexit.register(self.close)

    @property
    def url(self) -> str:
        """A libpq URI of the database `postgres`, as superuser; it holds no password."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        """A libpq URI of another database of this server.

        Args:
            database: its name; it need not exist yet.
        """
        host = quote(self._socket_directory(), safe="/")
        return f"postgresql://postgres@/{quote(database, safe='')}?host={host}&port={_PORT}"

    def is_running(self) -> bool:
        """Whether the server runs."""
        # Not `pg_ctl status`: it takes any process with the id in a stale postmaster.pid for the
        # server.
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(f"{self._socket_directory()}/.s.PGSQL.{_PORT}")
            except (FileNotFoundError, ConnectionRefusedError):
                return False
            return True

    def close(self) -> None:
        """Stop using the server; stop it, if no other process uses it and `keep` is not set.

        Called when the process ends. Safe to repeat.
        """
        # A forked child inherits this object, but only its parent uses the server.
        if self._users is None or os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        users, self._users = self._users, None
        if not self._data.exists():  # the data was deleted: the server ends by itself
            self._remove_way()
            users.close()
            return
        with self._lock(), users:
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            if not self._keep and not self._kept.exists():
                self._halt("fast")
                self._remove_way()

    def keep_up(self) -> None:
        """Keep the server running without users, until `stop`."""
        self._open_own("kept").close()

    def stop(self, mode: str = "fast") -> None:
        """Stop the server now, even while other processes use it.

        Args:
            mode: "fast" aborts running transactions; "immediate" is a crash, from which the next
                start recovers; "smart" waits for clients to disconnect.
        """
        with self._lock():
            self._kept.unlink(missing_ok=True)
            self._halt(mode)

    def restart(self, mode: str = "fast") -> None:
        """Stop the server as `stop` does, if it runs, and start it again; `url` stays the same."""
        with self._lock():
            self._halt(mode)
            self._run()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<embedded Postgres {self.version} in {self.directory}>"

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with self._open_own("lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _open_own(self, name: str) -> IO[bytes]:
        """A file to lock, which no other user can open."""
        return os.fdopen(open_own(self.directory / name, os.O_WRONLY | os.O_CREAT), "wb")

    def _initialize(self) -> None:
        # Under another name first: a killed initdb leaves an incomplete data directory.
        half_made = self.directory / "data.new"
        shutil.rmtree(half_made, ignore_errors=True)
        half_made.mkdir(mode=0o700)
        if self._owner:
            descriptor = os.open(half_made, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            os.fchown(descriptor, pwd.getpwnam(self._owner).pw_uid, self._owner_group())
            os.close(descriptor)
        # The same collation on every machine. No sync: the first checkpoint syncs the data.
        command = ["initdb", "--username=postgres", "--auth-local=trust", "--auth-host=reject"]
        command += ["--encoding=UTF8", "--no-locale", "--no-sync"]
        with self._handed_over(half_made) as (folder, how):
            made = self._postgres(how, *command, f"--pgdata={folder}")
        if made.returncode != 0:
            raise PgQueueError(f"initdb failed in {self.directory}:\n{made.stdout.strip()}")
        half_made.rename(self._data)

    def _run(self) -> None:
        self._close_tcp()
        settings = {"listen_addresses": "", "unix_socket_permissions": "0700", **self._settings}
        # The current directory of a server is its data directory.
        settings |= {"port": _PORT, "unix_socket_directories": "."}
        options = " ".join(f"-c {name}={shlex.quote(str(v))}" for name, v in settings.items())
        log = self._data / "server.log"
        began = _size_of(log)
        started = self._pg_ctl("start", "-o", options)
        if started.returncode != 0:
            said = read_own(log, began) if _size_of(log) else ""
            raise PgQueueError(
                f"the embedded Postgres in {self.directory} did not start:\n"
                f"{(said or started.stdout).strip()[-2000:]}",
                hint=f"see {log}",
            )

    def _halt(self, mode: str) -> None:
        if not self.is_running():
            return
        stopped = self._pg_ctl("stop", "-m", mode)
        if stopped.returncode != 0:
            raise PgQueueError(
                f"the embedded Postgres in {self.directory} did not stop: {stopped.stdout.strip()}"
            )

    def _close_tcp(self) -> None:
        """Reject TCP connections that initdb trusted, in a directory made by an earlier version."""
        rules = self._data / "pg_hba.conf"
        with suppress(FileNotFoundError):  # Postgres reports it
            text = read_own(rules)
            closed = re.sub(_TRUSTED, r"\1reject", text)
            if closed != text:
                replace_own(rules, closed)

    def _socket_directory(self) -> str:
        """Where clients find the server's socket: the data directory, or a short link to it."""
        # The path of a socket has at most 103 bytes (on macOS; 107 on Linux), and libpq splits
        # host at commas.
        folder = os.fsencode(self._data)
        if len(folder) <= 103 - len(f"/.s.PGSQL.{_PORT}") and re.fullmatch(rb"[\w./+-]+", folder):
            return str(self._data)
        # The file `socket` has the path for other processes and for the next start.
        note = self.directory / "socket"
        with suppress(FileNotFoundError):
            self._way = Path(read_own(note))
            if self._is_ours(self._way):
                return str(self._way / "data")
        self._way = Path(tempfile.mkdtemp(prefix="pgqueue-", dir="/tmp"))  # its mode is 0700
        (self._way / "data").symlink_to(self._data)
        if self._owner:
            shutil.chown(self._way, self._owner, self._owner_group())
        put_own(note, str(self._way))
        return str(self._way / "data")

    def _is_ours(self, way: Path) -> bool:
        """Whether a folder in /tmp is a link that this code made, and not another user's."""
        try:
            found = way.lstat()
            trusted = {os.geteuid(), pwd.getpwnam(self._owner).pw_uid if self._owner else None}
            private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
            return private and found.st_uid in trusted and (way / "data").readlink() == self._data
        except OSError:
            return False

    def _remove_way(self) -> None:
        if self._way is not None and self._is_ours(self._way):
            shutil.rmtree(self._way, ignore_errors=True)

    def _owner_group(self) -> int:
        assert self._owner is not None
        return pwd.getpwnam(self._owner).pw_gid

    def _pg_ctl(self, action: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        with self._handed_over(self._data) as (data, how):
            if action == "start":
                arguments = ("-l", f"{data}/server.log", *arguments)
            wait = ("-w", "-t", str(_TIMEOUT))
            return self._postgres(how, "pg_ctl", action, "-D", data, *wait, *arguments)

    @contextmanager
    def _handed_over(self, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        """A path of a folder in `directory` for the owner, and options to run a process with it."""
        # Paths without quotes: pg_ctl puts them into a shell command, between double quotes.
        if self._owner is None:
            yield folder.name, {"cwd": self.directory}
            return
        how = {"user": self._owner, "group": self._owner_group(), "extra_groups": []}
        if not _DESCRIPTORS.is_dir():  # not Linux: the owner needs access to the folders above
            yield folder.name, {"cwd": self.directory, **how}
            return
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            name = str(_DESCRIPTORS / str(descriptor))
            yield name, {"cwd": "/", "pass_fds": [descriptor], **how}
        finally:
            os.close(descriptor)

    def _postgres(
        self, how: Mapping[str, Any], program: str, *arguments: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of Postgres with the options of `_handed_over`; its output is `stdout`."""
        # PGPORT, PGDATA and similar variables are for the user's other servers.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
        # A file, not a pipe: the server inherits it, and would keep a pipe open while it runs.
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                [self._bin / program, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                **how,
            )
            output.seek(0)
            return subprocess.CompletedProcess(done.args, done.returncode, output.read())


def _size_of(log: Path) -> int:
    try:
        descriptor = open_own(log, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    with os.fdopen(descriptor) as file:
        return os.fstat(file.fileno()).st_size


def _check_directory(directory: Path, version: int) -> None:
    """Create the directory if it is missing; refuse one of other files, or of another version.

    Raises:
        PgQueueError: the directory is refused, or cannot be created.
    """
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        foreign = any(directory.iterdir()) and not (directory / "lock").exists()
    except OSError as error:
        raise PgQueueError(
            f"could not create a directory for an embedded Postgres: {error}"
        ) from None
    check_own_folder(directory)
    if foreign:
        raise PgQueueError(
            f"{directory} is neither empty nor the directory of an embedded Postgres",
            hint="give a new or an empty directory",
        )
    if (made_by := version_in(directory)) not in (None, version):
        raise PgQueueError(
            f"{directory} holds data of PostgreSQL {made_by}, not {version}",
            hint=f"start it with version={made_by}, or give another directory",
        )
