"""Files in the directory of an embedded Postgres, safe from other users who may write there.

The user that Postgres runs as can replace a file of the data directory by a link to a file of root,
or by a pipe that is never written to. Root opens only plain files of that user.
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
    """As root, refuse a folder whose content other users may replace.

    A user who may write in a folder, or in one above it, can replace its content by links. In a
    folder with the sticky bit, such as /tmp, users cannot replace files of others. The path of the
    folder must have no links.

    Raises:
        PgQueueError: this is root, and the folder, or one above it, belongs to another user or is
            writable by others.
    """
    if os.geteuid() != 0:
        return
    for each in (folder, *folder.parents):
        found = each.stat()
        if found.st_uid != 0:  # with the sticky bit, too
            raise PgQueueError(
                f"{each} belongs to {owner_of_own(each)}, but this process runs as root",
                hint="start it as that user, or use a directory that belongs to root",
            )
        others = stat.S_IWOTH | (stat.S_IWGRP if found.st_gid else 0)
        if found.st_mode & others and (each == folder or not found.st_mode & stat.S_ISVTX):
            raise PgQueueError(
                f"other users may write in {each}, but this process runs as root",
                hint=f"chmod go-w {each}, or use a directory where only root may write",
            )


def open_own(path: Path, flags: int) -> int:
    """Open a plain file of the user who owns its folder; returns its descriptor.

    With `os.O_CREAT`, only its user can access the file afterwards, even if it existed.

    Raises:
        FileNotFoundError: there is none.
        PermissionError: this user may not open it.
        PgQueueError: not a plain file, or a file of another user.
    """
    # O_NONBLOCK: opening a pipe does not wait
    careful = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | careful, 0o600)
    except (FileNotFoundError, PermissionError):
        raise
    except OSError:  # a link, a folder, a pipe without a reader
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
    """The text of such a file, from a position on. Errors as in `open_own`."""
    with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def replace_own(path: Path, text: str) -> None:
    """Replace the text of such a file, which exists. Errors as in `open_own`."""
    with os.fdopen(open_own(path, os.O_WRONLY), "wb") as file:
        file.truncate()
        file.write(text.encode())


def put_own(path: Path, text: str) -> None:
    """Replace a file by a new one with this text, which only its user can access."""
    descriptor, made = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    Path(made).replace(path)


def owner_of_own(path: Path) -> str:
    """The name of the user who owns a file or folder; the uid if it has no name."""
    number = path.stat().st_uid
    with suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return str(number)


def _refused(path: Path) -> PgQueueError:
    return PgQueueError(
        f"{path} is not a plain file of {owner_of_own(path.parent)}, who owns the folder",
        hint="remove it if you did not create it",
    )
