"""The checkpoint of a Spark query as files, which say how far the query is. Needs no Spark.

A checkpoint is a folder. Spark writes `offsets/N` before micro-batch N begins: where the batch
ends, for each source of the query. It writes `commits/N` when the batch is done. The last
`offsets/N` may have no commit: then the batch is not finished, and Spark runs it again when the
query restarts.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from spark_pgqueue.postgres.errors import FOREIGN_CHECKPOINT, PgQueueError

VERSIONS = ("v1", "v2")
"""Formats of `offsets/N`: a line for each source, by its number (v1) or with its name (v2)."""

FIELDS = ["reader", "claim", "messages"]
"""The fields of an offset of a checkpoint reader, in the order in which they are written."""


def local_folder(location: str) -> Path:
    """The folder of a checkpointLocation on this machine.

    A location is no encoded URI: Hadoop's Path takes %20 as these three characters.

    Raises:
        ValueError: the location is on another file system, or empty.
    """
    if not location.strip():
        raise ValueError
    if not re.match(r"[A-Za-z][\w+.-]*:", location):
        return Path(location)
    path = re.fullmatch(r"file:(?://(?:localhost)?)?(/[^/].*|/)", location, re.IGNORECASE)
    if path is None:
        raise ValueError
    return Path(path[1])


def position_of(offset: Any) -> tuple[str, int, int] | None:
    """reader, claim and messages of a checkpoint reader's offset; None for another offset."""
    if isinstance(offset, dict) and list(offset) == FIELDS:
        return offset["reader"], offset["claim"], offset["messages"]
    return None


def unknown_offset(offset: Any) -> PgQueueError:
    """The error for an offset of another version, or of another format such as rate."""
    return PgQueueError(
        f"the checkpoint's offset {offset} is none of this version of spark-pgqueue",
        hint="upgrade spark-pgqueue if a newer version has written it, else give the query a "
        "checkpointLocation of its own",
        sqlstate=FOREIGN_CHECKPOINT,
    )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, as it was when it was read.

    Attributes:
        folder: the checkpoint's folder.
        query_id: the query's id, which stays the same after restarts; None where the checkpoint has
            none yet.
        last: the number of the last micro-batch that was begun; None for none.
        finished: the number of the last micro-batch that was finished; None for none.
        offsets: the end of batch `last`, by source; None for a source without messages.
        finished_offsets: the end of batch `finished`, by source.
    """

    folder: Path
    query_id: str | None
    last: int | None
    finished: int | None
    offsets: dict[str, Any]
    finished_offsets: dict[str, Any]

    @classmethod
    def read(cls, location: str) -> Checkpoint:
        """Read a checkpoint.

        Raises:
            PgQueueError: the location is not on this machine, is no checkpoint, or is of an unknown
                version of Spark.
        """
        try:
            folder = local_folder(location)
        except ValueError:
            raise PgQueueError(
                f"the checkpoint {location} is not in a folder of this machine",
                hint="copy it to one (with `aws s3 cp --recursive` or `hdfs dfs -get`, say), all "
                "of it, and give that",
            ) from None
        if not (folder / "offsets").is_dir():
            raise PgQueueError(
                f"{folder} is no checkpoint: it has no folder offsets",
                hint="give the checkpointLocation of the query",
            )
        # The commits are read first: a running query goes on meanwhile.
        finished, last = _last(folder / "commits"), _last(folder / "offsets")
        if finished is not None and not (folder / "offsets" / str(finished)).exists():
            raise PgQueueError(
                f"the checkpoint {folder} is not complete: it has commits/{finished} and not "
                f"offsets/{finished}",
                hint="copy it again, all of it, while its query does not run",
            )
        return cls(
            *(folder, _query_id(folder), last, finished),
            offsets_in(folder, last),
            offsets_in(folder, finished),
        )

    @property
    def is_finished(self) -> bool:
        """Whether the last micro-batch that was begun is finished."""
        return self.last == self.finished

    def fork(self, target: Path, readers: dict[str, str]) -> str:
        """Copy the checkpoint for another query, which goes on from the same place.

        Args:
            target: a folder that does not exist.
            readers: the ids of the checkpoint readers, and the ids of their copies.

        Returns:
            the id of the other query.

        Raises:
            PgQueueError: the target exists; or the query went on meanwhile, and the copy was
                deleted.
        """
        if target.exists():
            raise PgQueueError(f"{target} exists already", hint="give a folder that does not")
        query_id = str(uuid4())
        shutil.copytree(self.folder, target)
        try:
            _write(target / "metadata", json.dumps({"id": query_id}))
            for file in _numbered(target / "offsets"):
                text = file.read_text()
                for reader, other in readers.items():
                    text = text.replace(reader, other)
                _write(file, text)
            again = Checkpoint.read(str(self.folder))
            if (again.last, again.finished) != (self.last, self.finished):
                raise PgQueueError(
                    f"the query of {self.folder} runs: it went on while its checkpoint was copied",
                    hint="stop the query first",
                )
        except BaseException:
            shutil.rmtree(target)
            raise
        return query_id


def offsets_in(folder: Path, batch: int | None) -> dict[str, Any]:
    """The end of a micro-batch, by source: its name, or its number.

    Raises:
        PgQueueError: an unknown version of Spark has written the checkpoint.
    """
    if batch is None:
        return {}
    file = folder / "offsets" / str(batch)
    version, _, *lines = file.read_text().splitlines() or [""] * 2
    if version not in VERSIONS:
        raise PgQueueError(
            f"{file} is of format {version!r}, which is not known",
            hint="upgrade spark-pgqueue: a newer Spark has written it",
        )
    if version == "v2":
        named = (line.partition(":")[::2] for line in lines)
    else:
        named = ((str(number), line) for number, line in enumerate(lines))
    return {name: _offset(text) for name, text in named}


def _offset(text: str) -> Any:
    if text == "-":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text  # the offset of another format


def _last(folder: Path) -> int | None:
    return max((int(file.name) for file in _numbered(folder)), default=None)


def _numbered(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (file for file in folder.iterdir() if file.name.isdecimal())


def _query_id(folder: Path) -> str | None:
    try:
        return json.loads((folder / "metadata").read_text())["id"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise PgQueueError(
            f"{folder}/metadata is none of Spark's",
            hint="give the checkpointLocation of the query",
        ) from None


def _write(file: Path, text: str) -> None:
    """Write a file of Spark, and remove the checksum of its former content."""
    file.write_text(text)
    (file.parent / f".{file.name}.crc").unlink(missing_ok=True)
