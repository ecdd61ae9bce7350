"""The checkpoint of a Spark query as files: what it says of where the query is. Needs no Spark.

A checkpoint is a folder. `offsets/N` is written before micro-batch N begins and says where it ends,
for each source of the query; `commits/N` is written when it is done. So the last one may be there
without its commit: Spark runs that one again when the query is started, and it is not finished.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

from spark_pgqueue.postgres.errors import FOREIGN_CHECKPOINT, PgQueueError

VERSIONS = ("v1", "v2")
"""Formats of `offsets/N`: an offset a line in the order of the sources, or each with a name."""

FIELDS = ["reader", "claim", "messages"]
"""What an offset of a reader of a consumer has, in the order in which it is written."""


def local_folder(location: str) -> Path:
    """The folder of a checkpointLocation on this machine.

    Raises:
        ValueError: it is elsewhere, or empty.
    """
    if not location.strip():
        raise ValueError
    if not re.match(r"[A-Za-z][\w+.-]*:", location):
        return Path(location)
    path = re.fullmatch(r"file:(?://(?:localhost)?)?(/[^/].*|/)", location, re.IGNORECASE)
    if path is None:
        raise ValueError
    return Path(unquote(path[1]))


def position_of(offset: Any) -> tuple[str, int, int] | None:
    """reader, claim and messages of an offset of a reader of a consumer; None: it is none."""
    if isinstance(offset, dict) and list(offset) == FIELDS:
        return offset["reader"], offset["claim"], offset["messages"]
    return None


def unknown_offset(offset: Any) -> PgQueueError:
    """For an offset that is none of this version's, or of another format, such as rate."""
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
        folder: where it is.
        query_id: the query's id, which it keeps over restarts; None: there is none yet.
        last: the number of the last micro-batch that was begun; None: there is none.
        finished: the number of the last one that was finished; None: there is none.
        offsets: where the last one that was begun ends, by source; null for one that had nothing.
        finished_offsets: the same of the last one that was finished.
    """

    folder: Path
    query_id: str | None
    last: int | None
    finished: int | None
    offsets: dict[str, Any]
    finished_offsets: dict[str, Any]

    @classmethod
    def read(cls, location: str) -> Checkpoint:
        """Read it.

        Raises:
            PgQueueError: it is not on this machine, none, or of a version of Spark that is not
                known.
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
        # What is finished first: a query that runs goes on meanwhile.
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
        """Whether the last micro-batch that was begun was finished."""
        return self.last == self.finished

    def fork(self, target: Path, readers: dict[str, str]) -> str:
        """Copy it for another query, which goes on from the same place.

        Args:
            target: a folder that does not exist.
            readers: the ids of readers by those that are to become theirs.

        Returns:
            the id of the other query.

        Raises:
            PgQueueError: the target exists; or the query went on meanwhile, and nothing is left.
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
    """Where a micro-batch ends, by source: its name, or its number.

    Raises:
        PgQueueError: a version of Spark that is not known has written it.
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
        return text  # another source's


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
    """Write a file of Spark's, without the checksum of what it was before."""
    file.write_text(text)
    (file.parent / f".{file.name}.crc").unlink(missing_ok=True)
