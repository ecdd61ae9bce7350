"""Where the files of an archive are: a folder of a file system that pyarrow knows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spark_pgqueue.postgres.errors import PgQueueError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

_FILE_SYSTEMS = {
    "s3": "S3FileSystem",
    "gs": "GcsFileSystem",
    "gcs": "GcsFileSystem",
    "abfs": "AzureFileSystem",
    "abfss": "AzureFileSystem",
    "hdfs": "HadoopFileSystem",
}
"""The classes of pyarrow.fs that `archiveOptions` are arguments of, by the scheme of the uri."""


def parse_options(text: str) -> dict[str, Any]:
    """Arguments for the file system, from JSON.

    Raises:
        ValueError: the text is no JSON object.
    """
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(text)
    return found


@contextmanager
def folder(uri: str, options: Mapping[str, Any] | None = None) -> Iterator[tuple[FileSystem, str]]:
    """The file system of an archive, and the archive's path in it.

    Args:
        uri: as `set_archive` takes it.
        options: arguments for the class of the file system in `pyarrow.fs`; without them, pyarrow
            goes by the uri and the environment.

    Raises:
        PgQueueError: there is no such file system, the options do not suit it; or, from within, a
            file cannot be read or written.
    """
    import pyarrow as pa

    try:
        opened = _open(uri, options)
    except (OSError, TypeError, ValueError) as error:
        raise _failed(uri, error) from error
    try:
        yield opened
    except FileNotFoundError:
        raise  # the reader says what that means
    except (OSError, pa.ArrowInvalid) as error:
        raise _failed(uri, error) from error


def _open(uri: str, options: Mapping[str, Any] | None) -> tuple[FileSystem, str]:
    from pyarrow import fs

    scheme, found, path = uri.partition("://")
    if not found or scheme == "file":
        return fs.LocalFileSystem(), path if found else uri
    if not options:
        return fs.FileSystem.from_uri(uri)
    if scheme not in _FILE_SYSTEMS:
        raise PgQueueError(
            f"the archive {uri} takes no options: its scheme is none of {', '.join(_FILE_SYSTEMS)}",
            hint="remove archiveOptions",
        )
    return getattr(fs, _FILE_SYSTEMS[scheme])(**options), path.partition("?")[0]


def _failed(uri: str, error: Exception) -> PgQueueError:
    return PgQueueError(
        f"the archive {uri} cannot be read or written: {error}",
        hint="the exporter and all of Spark's executors must reach it under this uri; credentials "
        "come from their environment, or from archiveOptions",
    )


def make_durable(path: str) -> None:
    """Have a local file on disk, with its name, before a commit refers to it."""
    for each in (path, *_above(path)):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _above(path: str) -> Iterator[str]:
    """The folder of a file, and the two above it, which an attempt may have made."""
    for _ in range(3):
        path = os.path.dirname(path)  # noqa: PTH120 (a path of pyarrow)
        yield path
