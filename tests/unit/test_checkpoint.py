"""Checkpoints of Spark as files: which micro-batch they are at, and how they are copied."""

import json
from pathlib import Path

import pytest

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.driver.checkpoint import Checkpoint, position_of
from spark_pgqueue.spark.options.values import local_folder

READER = {"reader": "5e0e5a3f-5e0e-5e0e-5e0e-5e0e5a3f5e0e", "claim": 7, "messages": 100}


def written(folder: Path, batches: int, commits: int, version: str = "v1") -> Path:
    """A checkpoint with a source of ours, one that had nothing and one of somebody else's."""
    for name in ("offsets", "commits", "state"):
        (folder / name).mkdir(parents=True)
    (folder / "metadata").write_text('{"id":"a query"}')
    for batch in range(batches):
        ours = json.dumps(READER | {"claim": 7 + batch, "messages": 100 * (batch + 1)})
        lines = [ours, "-", "41"]
        if version == "v2":
            lines = [f"{name}:{line}" for name, line in zip("abc", lines, strict=True)]
        text = "\n".join([version, "{}", *lines])
        (folder / "offsets" / str(batch)).write_text(text)
        (folder / "offsets" / f".{batch}.crc").write_bytes(b"crc")
    for batch in range(commits):
        (folder / "commits" / str(batch)).write_text("v1\n{}")
    return folder


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_it_says_where_the_query_is_by_source(tmp_path: Path, version: str):
    found = Checkpoint.read(str(written(tmp_path / "c", 12, 11, version)))
    assert (found.query_id, found.last, found.finished, found.is_finished) == (
        *("a query", 11, 10),
        False,
    )
    ours, nothing, other = found.offsets
    assert [ours, nothing, other] == (["0", "1", "2"] if version == "v1" else ["a", "b", "c"])
    assert position_of(found.offsets[ours]) == (READER["reader"], 18, 1200)
    assert position_of(found.finished_offsets[ours]) == (READER["reader"], 17, 1100)
    assert (found.offsets[nothing], found.offsets[other]) == (None, 41)
    assert position_of(found.offsets[nothing]) is position_of(found.offsets[other]) is None


def test_a_query_that_has_not_begun_has_no_offsets(tmp_path: Path):
    found = Checkpoint.read((written(tmp_path / "c", 0, 0)).as_uri())
    assert (found.last, found.finished, found.offsets, found.is_finished) == (None, None, {}, True)


def test_where_a_checkpoint_is_on_this_machine():
    assert local_folder("a/b") == Path("a/b")
    for there in ("file:///a/b", "file:/a/b", "file://localhost/a/b", "FILE:///a/b", "/a/b"):
        assert local_folder(there) == Path("/a/b")


def test_a_location_is_not_decoded():
    """Spark makes the folder `a%20b` of both."""
    assert local_folder("/a%20b") == local_folder("file:///a%20b") == Path("/a%20b")


@pytest.mark.parametrize(
    "there",
    ["s3://bucket/c", "s3a://b/c", "hdfs:///c", "dbfs:/c", "file://host/c", "abfss://x@y/c"],
)
def test_one_that_is_elsewhere_has_to_be_copied(there: str):
    with pytest.raises(PgQueueError, match="is not in a local folder") as error:
        Checkpoint.read(there)
    assert "copy all of it" in (error.value.hint or "")


def test_what_is_no_checkpoint_or_not_complete_is_refused(tmp_path: Path):
    for folder, says in (
        (tmp_path, "is not a checkpoint"),
        (tmp_path / "none", "is not a checkpoint"),
    ):
        with pytest.raises(PgQueueError, match=says):
            Checkpoint.read(str(folder))
    folder = written(tmp_path / "c", 2, 2)
    (folder / "offsets" / "1").write_text("v9\n{}\n")
    with pytest.raises(PgQueueError, match="is of format 'v9'"):
        Checkpoint.read(str(folder))
    (folder / "offsets" / "1").unlink()
    with pytest.raises(PgQueueError, match=r"has commits/1 but not offsets/1"):
        Checkpoint.read(str(folder))
    (folder / "metadata").write_text("[]")
    (folder / "commits" / "1").unlink()
    with pytest.raises(PgQueueError, match=r"metadata was not written by Spark"):
        Checkpoint.read(str(folder))


def test_a_copy_is_of_another_query_and_other_readers(tmp_path: Path):
    """And Spark takes it: no checksum is of what a file was before."""
    source = Checkpoint.read(str(written(tmp_path / "c", 3, 3)))
    query = source.fork(tmp_path / "d", {READER["reader"]: "another"})
    copy = Checkpoint.read(str(tmp_path / "d"))
    assert (copy.query_id, copy.last, copy.finished) == (query, 2, 2)
    assert query != source.query_id
    assert position_of(copy.offsets["0"]) == ("another", 9, 300)
    assert not list((tmp_path / "d" / "offsets").glob(".*"))
    assert Checkpoint.read(str(tmp_path / "c")) == source
    with pytest.raises(PgQueueError, match="already exists"):
        source.fork(tmp_path / "d", {})


def test_nothing_is_left_of_a_copy_of_a_query_that_went_on(tmp_path: Path):
    source = Checkpoint.read(str(written(tmp_path / "c", 3, 2)))
    (tmp_path / "c" / "commits" / "2").write_text("v1\n{}")
    with pytest.raises(PgQueueError, match="it made progress while"):
        source.fork(tmp_path / "d", {})
    assert not (tmp_path / "d").exists()
