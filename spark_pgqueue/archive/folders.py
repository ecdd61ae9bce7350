"""The folder of an archive, in a file system that pyarrow supports.

The uri and the names come from the database. This process has credentials that their authors may
not have, so it opens only what the allowed prefixes and the rules of this module permit.
`set_archive` refuses other uris, too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from spark_pgqueue.postgres.errors import PgQueueError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

ALLOW = "PGQUEUE_ARCHIVE_ALLOW"
"""The variable of the environment with the prefixes that a uri may have, with spaces between."""

_FILE_SYSTEMS = {
    "s3": "S3FileSystem",
    "gs": "GcsFileSystem",
    "gcs": "GcsFileSystem",
    "abfs": "AzureFileSystem",
    "abfss": "AzureFileSystem",
    "hdfs": "HadoopFileSystem",
}
"""The classes of pyarrow.fs that `archiveOptions` are arguments of, by the scheme of the uri."""

_NAME_NO_HOST = ("file", "s3", "gs", "gcs")
"""The schemes whose uri names no host. Uris of others may name a host that gets credentials."""

_BELOW = re.compile(r"[0-9a-f-]{36}/\d{1,10}(/[0-9a-f-]{36}-\d{1,10}\.parquet)?", re.ASCII)
"""The folder of a segment, or a file in it, below the archive's: see `layout`."""


def parse_options(text: str) -> dict[str, Any]:
    """Arguments for the file system, from JSON.

    Raises:
        ValueError: the text is no JSON object.
    """
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(text)
    return found


def parse_prefix(text: str) -> str:
    """A prefix that the uri of an archive may have.

    Raises:
        ValueError: no archive could have it.
    """
    _parts(text)
    return text


class Folder(NamedTuple):
    """The folder of an archive.

    Attributes:
        system: its file system.
        path: where it is there.
    """

    system: FileSystem
    path: str

    @property
    def is_local(self) -> bool:
        """Whether it is on a disk of this machine."""
        from pyarrow import fs

        return isinstance(self.system, fs.LocalFileSystem)

    def below(self, folder: str, name: str | None = None) -> str:
        """The path of a segment's folder, or of a file there.

        Raises:
            PgQueueError: an exporter would not name it so, or a link leads out of the archive.
        """
        below = folder if name is None else f"{folder}/{name}"
        path = f"{self.path}/{below}"
        if not _BELOW.fullmatch(below):
            raise PgQueueError(
                f"{below!r} is not a name that an exporter gives to a file or folder of the "
                f"archive {self.path}",
                hint="the manifest in the database is not the one that the exporter wrote: see "
                "pgqueue.archive_files",
            )
        if self.is_local and Path(path).resolve() != Path(self.path).resolve() / below:
            raise PgQueueError(
                f"{path} leads out of the archive {self.path}, through a symbolic link",
                hint="replace the link with its target",
            )
        return path


@contextmanager
def folder(
    uri: str, options: Mapping[str, Any] | None = None, allow: Sequence[str] = ()
) -> Iterator[Folder]:
    """The folder of an archive.

    Args:
        uri: as `set_archive` takes it.
        options: arguments for the class of the file system in `pyarrow.fs`; without them, pyarrow
            uses the uri and the environment.
        allow: prefixes, one of which the uri must have. Without any, those of `ALLOW` in the
            environment; and without these, the uri may be any that names no host.

    Raises:
        PgQueueError: as `check`; there is no such file system, the options do not suit it; or, from
            within, a file cannot be read or written.
    """
    import pyarrow as pa

    check(uri, options, allow)
    try:
        opened = _open(uri, options)
    except (OSError, TypeError, ValueError) as error:
        raise failed(uri, error) from error
    try:
        yield opened
    except FileNotFoundError:
        raise  # the caller decides what that means
    except (OSError, pa.ArrowInvalid) as error:
        raise failed(uri, error) from error


def _parts(uri: str) -> tuple[str, str]:
    """The scheme of a uri, and the path in its file system.

    Raises:
        ValueError: it is no uri of an archive.
    """
    scheme, found, path = uri.partition("://")
    if not found:
        scheme, path = "file", uri
    if scheme not in ("file", *_FILE_SYSTEMS) or not path or (scheme == "file") != (path[0] == "/"):
        raise ValueError(
            f"it is neither an absolute path nor a URI of file, {', '.join(_FILE_SYSTEMS)} with a "
            "host or bucket"
        )
    if scheme != "file" and re.search(r"[?#@]|/\.{1,2}(/|$)", unquote(path)):
        raise ValueError("it has options, a user, or a step such as ..")
    return scheme, path.rstrip("/")


def check(uri: str, options: Mapping[str, Any] | None, allow: Sequence[str]) -> None:
    """Refuse a uri that `folder` would not open.

    Raises:
        PgQueueError: it has no allowed prefix, or names a host without a prefix that allows it.
    """
    allow = allow or os.environ.get(ALLOW, "").split()
    try:
        scheme, path = _parts(uri.partition("?")[0] if options else uri)
        is_allowed = not allow or any(_has_prefix(scheme, path, each) for each in allow)
    except ValueError as error:
        raise failed(uri, error) from error
    if not is_allowed:
        why = f"is not below {' or '.join(allow)}, and this process opens no others"
    elif not allow and not options and scheme not in _NAME_NO_HOST:
        why = "names the host that would get the credentials of this process"
    else:
        return
    raise PgQueueError(
        f"the archive {_public(uri)} {why}",
        hint=f"if this is intended, allow it with --allow, or {ALLOW} in the environment",
    )


def _open(uri: str, options: Mapping[str, Any] | None) -> Folder:
    from pyarrow import fs

    scheme, path = _parts(uri.partition("?")[0] if options else uri)
    if scheme == "file":
        return Folder(fs.LocalFileSystem(), path)
    if options:  # instead of the options in the uri, which 0.1.0 accepted
        return Folder(getattr(fs, _FILE_SYSTEMS[scheme])(**options), path)
    return Folder(*fs.FileSystem.from_uri(uri))


def _has_prefix(scheme: str, path: str, prefix: str) -> bool:
    allowed, above = _parts(prefix)
    if scheme == "file":
        path, above = (str(Path(each or "/").resolve()).rstrip("/") for each in (path, above))
    return scheme == allowed and f"{path}/".startswith(f"{above}/")


def _public(uri: str) -> str:
    """A uri for errors, without options and user, which may hold a secret."""
    return re.sub("://.*@", "://", uri.partition("?")[0])


def failed(uri: str, error: Exception) -> PgQueueError:
    """The error for an archive or a file that cannot be read or written."""
    return PgQueueError(
        f"the archive {_public(uri)} cannot be read or written: {error}",
        hint="the exporter and all of Spark's executors must reach it under this uri; credentials "
        "come from their environment, or from archiveOptions",
    )


def make_durable(path: str) -> None:
    """Sync a local file and its folders to disk, before a commit refers to it."""
    file = Path(path)
    for each in (file, *file.parents[:3]):  # an attempt may have made these folders
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if each == file and hasattr(os, "posix_fadvise"):
                # `verify` reads it from the disk then.
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
