"""Files in the directory of an embedded Postgres, beside users who may lay traps there.

The user that Postgres runs as can put anything in the place of a file of the data directory: a link
to a file of root's, or a pipe that is never written to. Root opens only plain files of that user.
"""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from spark_pgqueue.postgres.errors import PgQueueError


def check_own_folder(folder: Path) -> None:
    """Refuse a folder in which root would work beside users who may lay traps there.

    A user who may write in a folder, or in one above it, can put a link in place of what is in it.
    In a folder with the sticky bit, such as /tmp, nobody replaces what is another user's.

    Args:
        folder: the folder, which exists; its path has no links.

    Raises:
        PgQueueError: this is root, and the folder, or one above it, belongs to another user or may
            be written by others.
    """
    if os.geteuid() != 0:
        return
    for each in (folder, *folder.parents):
        found = each.stat()
        if found.st_uid != 0:  # with the sticky bit, too
            raise PgQueueError(
                f"{each} belongs to {owner_of_own(each)}, and this is root",
                hint="start it as that user, or give a directory of root's",
            )
        others = stat.S_IWOTH | (stat.S_IWGRP if found.st_gid else 0)
        if found.st_mode & others and (each == folder or not found.st_mode & stat.S_ISVTX):
            raise PgQueueError(
                f"other users may write in {each}, and this is root",
                hint=f"chmod go-w {each}, or give a directory where only root may write",
            )


def open_own(path: Path, flags: int) -> int:
    """Open a file of the user who owns its folder, and nothing else; returns its descriptor.

    With `os.O_CREAT`, the file is for its user alone, also if it was made before.

    Args:
        path: the file.
        flags: as for `os.open`.

    Raises:
        FileNotFoundError: there is none.
        PermissionError: this user may not open it.
        PgQueueError: there is something else, or a file of another user.
    """
    # O_NONBLOCK: a pipe is opened at once, and found to be one
    careful = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | careful, 0o600)
    except (FileNotFoundError, PermissionError):
        raise
    except OSError:  # a link, a folder, a pipe that nobody reads
        raise _refused(path) from None
    found = os.fstat(descriptor)
    owners = {path.parent.stat().st_uid} | ({os.geteuid()} - {0})
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_uid not in owners:
        os.close(descriptor)
        raise _refused(path)
    if flags & os.O_CREAT and found.st_mode & 0o077:
        os.fchmod(descriptor, 0o600)
    return descriptor


def read_own(path: Path, start: int = 0) -> str:
    """The text of such a file, from a position on. Raises what `open_own` does."""
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def replace_own(path: Path, text: str) -> None:
    """Write a text into such a file, which is there. Raises what `open_own` does."""
    with os.fdopen(open_own(path, os.O_WRONLY), "wb") as file:
        file.truncate()
        file.write(text.encode())


def put_own(path: Path, text: str) -> None:
    """Put a new file with this text in the place of what is there, for its user alone."""
    descriptor, made = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    Path(made).replace(path)


def owner_of_own(path: Path) -> str:
    """The name of the user who owns a file or folder; the number where there is no name."""
    number = path.stat().st_uid
    with suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return str(number)


def _refused(path: Path) -> PgQueueError:
    return PgQueueError(
        f"{path} is not a plain file of {owner_of_own(path.parent)}, who owns the folder",
        hint="remove it, if you do not know what it is",
    )
