"""PostgreSQL 17 and 19 for the tests: Debian's packages, fetched once by apt and installed nowhere.

apt gets lists, state and cache of its own, and the mirror of the machine. It verifies the lists by
the keys of Debian, and each package by its checksum there. The packages of another release need
its libraries, so each program is a script that starts it with those.
"""

from __future__ import annotations

import fcntl
import functools
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from spark_pgqueue.postgres import binaries
from spark_pgqueue.postgres.errors import PgQueueError

SUITES = {17: ["trixie"], 19: ["sid", "experimental"]}
"""The releases of Debian that have a version and the libraries it needs."""

KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

SCRIPT = """#!/bin/sh
exec {loader} --library-path {loader.parent} --argv0 "$0" {program} "$@"
"""


def cache() -> Path:
    """The folder that keeps what was fetched; root's servers run as a user who reaches it."""
    if os.geteuid() == 0:
        return Path("/var/cache/spark-pgqueue")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spark-pgqueue"


def find(version: int) -> Path:
    """The folder of a version's programs; fetched, and put on the PATH, if the machine has none.

    Raises:
        PgQueueError: it can neither be found nor fetched; says why.
    """
    try:
        return binaries.find_binaries(version)
    except PgQueueError:
        if version not in SUITES:
            raise
    if isinstance(programs := _fetch(version), PgQueueError):
        raise programs
    os.environ["PATH"] += os.pathsep + str(programs)
    return programs


@functools.cache  # also of what failed: the next test asks again
def _fetch(version: int) -> Path | PgQueueError:
    try:
        return _fetched(version)
    except (OSError, PgQueueError) as error:
        return PgQueueError(f"PostgreSQL {version} cannot be fetched: {error}")


def _fetched(version: int) -> Path:
    home = cache() / f"postgresql-{version}"
    programs = home / "usr/lib/postgresql" / str(version) / "bin"
    home.parent.mkdir(parents=True, exist_ok=True)
    with (home.parent / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.exists():
            with tempfile.TemporaryDirectory(dir=home.parent) as folder:
                unpacked = Path(folder) / "unpacked"
                for package in _download(version, Path(folder)):
                    _run(["dpkg-deb", "-x", package, unpacked])
                _write_scripts(unpacked, programs.relative_to(home), home)
                for each in (home.parent, unpacked, unpacked / programs.relative_to(home)):
                    each.chmod(0o755)  # whatever the umask is
                unpacked.rename(home)
    return programs


def _download(version: int, folder: Path) -> list[Path]:
    """The files of the packages of a version and all that they depend on."""
    sources = [f"deb [signed-by={KEYS}] {_mirror()} {suite} main" for suite in SUITES[version]]
    (folder / "sources").write_text("\n".join([*sources, ""]))
    # Of a release candidate: its libpq too, which else is that of the stable version.
    (folder / "preferences").write_text(
        f"Package: src:postgresql-{version}\nPin: release *\nPin-Priority: 900\n"
    )
    (folder / "status").touch()
    for each in ("lists/partial", "cache/archives/partial"):
        (folder / each).mkdir(parents=True)
    settings = {
        "Dir::Etc::SourceList": folder / "sources",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::Preferences": folder / "preferences",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Dir::State": folder,
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder / "cache",
        "APT::Install-Recommends": "0",
        "APT::Sandbox::User": "root",  # the user _apt cannot write into this folder
        "APT::Update::Error-Mode": "any",
        "Acquire::Languages": "none",
        "Debug::NoLocking": "1",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    _run([*apt, "update"])
    _run([*apt, "--yes", "--download-only", "install", f"postgresql-{version}"])
    return list((folder / "cache/archives").glob("*.deb"))


def _mirror() -> str:
    """Where this machine has its packages of Debian from."""
    try:
        system = platform.freedesktop_os_release()
    except OSError:
        system = {}
    if system.get("ID") == "debian" and KEYS.exists() and shutil.which("apt-get"):
        listed = _run(["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)"])
        for line in listed.splitlines():
            release, _, mirror = line.partition(" ")
            if release == system.get("VERSION_CODENAME"):
                return mirror
    raise PgQueueError("this is no Debian with apt and debian-archive-keyring")


def _write_scripts(unpacked: Path, programs: Path, home: Path) -> None:
    """In place of each program, a script that starts it where it is going to be."""
    theirs = programs.with_name("programs")
    (unpacked / programs).rename(unpacked / theirs)
    (unpacked / programs).mkdir()
    (loader,) = (unpacked / "usr/lib").glob("*/ld-linux*.so.*")
    for program in (unpacked / theirs).iterdir():
        script = unpacked / programs / program.name
        script.write_text(
            SCRIPT.format(
                loader=home / loader.relative_to(unpacked), program=home / theirs / program.name
            )
        )
        script.chmod(0o755)


def _run(command: list[str | Path]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise PgQueueError(f"{command[0]} failed: {said[-1000:]}")
    return done.stdout
