"""The commands of an archive, and its files as other programs see them."""

import json
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyarrow import fs, parquet
from typer.testing import CliRunner

from spark_pgqueue.archive import layout
from spark_pgqueue.archive.folders import Folder
from spark_pgqueue.command_line import cli

PAGE = Path(__file__).parents[2] / "spark_pgqueue" / "guide" / "archive.md"

TYPES = {
    "int64": pa.int64(),
    "int32": pa.int32(),
    "string": pa.string(),
    "string; binary in a stream of kind `binary`": pa.string(),
    "map of string to string": pa.map_(pa.string(), pa.string()),
    "timestamp in µs, UTC": pa.timestamp("us", "UTC"),
    "list of string": pa.list_(pa.string()),
}
"""The words of the page for types."""

Run = Callable[..., str]


def lines(count: int) -> str:
    return "".join(f"{n}\n" for n in range(count))


@pytest.fixture
def folder(run: Run, tmp_path: Path) -> Path:
    """The archive of a stream with a closed segment of 40 messages, and 20 newer ones."""
    run("stream", "create", "s")
    run("stream", "retention", "s", "--messages", 16)
    run("archive", "set", "s", tmp_path / "archive", "--keep", "365d")
    run("send", "s", "--key", "k", "--header", "a=b", "--priority", 3, "--data", "first")
    run("send", "s", "--lines", stdin=lines(39))
    run("maintain")
    run("send", "s", "--lines", stdin=lines(20))
    run("maintain")
    return tmp_path / "archive"


def listed(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run("archive", "list", "--json").splitlines()]


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.parquet"))


@pytest.mark.promise("archive: The commands")
def test_the_commands_begin_fill_show_and_end_an_archive(run: Run, folder: Path) -> None:
    (before,) = listed(run)
    assert (before["stream"], before["uri"], before["messages"]) == ("s", str(folder), 0)
    assert before["waiting"] >= 1
    written = [json.loads(line) for line in run("archive", "run", "--json").splitlines()]
    assert written[0] == written[0] | {"stream": "s", "segment": 1, "messages": 40, "files": 1}
    assert run("archive", "run") == "", "there is nothing left to write"
    (after,) = listed(run)
    assert after["messages"] == sum(each["messages"] for each in written)
    assert (after["waiting"], after["attempts"]) == (0, 0)
    run("archive", "stop", "s")
    (stopped,) = listed(run)
    assert (stopped["uri"], stopped["messages"]) == (None, after["messages"])
    assert files_in(folder)
    assert "the files of its archive" in run("stream", "drop", "s", code=1)
    run("archive", "drop", "s", code=1)
    assert files_in(folder), "without --yes, and without a terminal, nothing is dropped"
    run("archive", "drop", "s", "--yes")
    run("maintain")
    run("archive", "run")
    assert "stream 's' has no archive" in run("archive", "drop", "s", "--yes", code=1)
    assert json.loads(run("archive", "drop", "s", "--if-exists", "--json"))["dropped"] is False
    assert listed(run) == []
    assert not files_in(folder)


def test_what_was_written_is_reported_beside_an_error(
    run: Run, folder: Path, conn: psycopg.Connection
) -> None:
    conn.execute(
        "insert into pgqueue.archive_attempts (attempt, stream_id, segment, uri, folder)"
        " select gen_random_uuid(), stream_id, 99, '/elsewhere', 'x/99' from pgqueue.streams"
    )
    done = CliRunner().invoke(cli.app, ["archive", "run", "--allow", str(folder)])
    assert done.exit_code == 1
    assert done.stdout.startswith("s: segment 1, 40 messages, ")
    assert "/elsewhere is not below" in done.stderr


def test_an_exporter_deletes_no_file_of_another(tmp_path: Path) -> None:
    """That one has the lock meanwhile: it deletes the same files, and writes its own."""
    segment = f"{uuid.uuid4()}/1"
    below = tmp_path / segment
    below.mkdir(parents=True)

    class Meanwhile(fs.LocalFileSystem):
        def delete_file(self, path: str) -> None:
            Path(path).unlink()
            (below / "b-1.parquet").touch()
            super().delete_file(path)  # it is gone

    for keep_folder in (False, True):
        (below / "a-1.parquet").touch()
        layout.delete(Folder(Meanwhile(), str(tmp_path)), segment, "a", keep_folder)
        assert [each.name for each in below.iterdir()] == ["b-1.parquet"]
    for keep_folder in (True, False):
        layout.delete(Folder(fs.LocalFileSystem(), str(tmp_path)), segment, "b", keep_folder)
        assert below.exists() == keep_folder


def test_bad_arguments_are_refused_without_repeating_a_secret(run: Run) -> None:
    run("stream", "create", "s")
    assert "JSON object" in run("archive", "run", "--options", '["s3cr3t"]', code=2)
    assert "s3cr3t" not in run("archive", "run", "--options", "s3cr3t", code=2)
    assert "absolute path" in run("archive", "set", "s", "archive", code=1)
    assert "s3cr3t" not in run("archive", "set", "s", "s3://k:s3cr3t@bucket/x", code=1)


def test_the_command_opens_what_it_may(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = run("archive", "run", "--allow", "/srv", "--allow", "s3://bucket", code=1)
    assert f"the archive {folder} is not below /srv or s3://bucket" in refused
    for bad in ("srv", "http://host", "s3://bucket?endpoint_override=host"):
        assert "--allow" in run("archive", "run", "--allow", bad, code=2)
    monkeypatch.setenv("PGQUEUE_ARCHIVE_ALLOW", "/srv s3://bucket")
    assert "is not below /srv or s3://bucket" in run("archive", "run", code=1)
    assert not folder.exists()
    monkeypatch.setenv("PGQUEUE_ARCHIVE_ALLOW", f"/srv {folder.parent}")
    assert run("archive", "run")
    assert len(files_in(folder)) == 2


@pytest.mark.promise("archive: The layout above")
def test_files_have_the_layout_that_the_page_describes(run: Run, folder: Path, url: str) -> None:
    run("archive", "run")
    file = files_in(folder)[0]
    incarnation, segment, name = file.relative_to(folder).parts
    with psycopg.connect(url) as conn:
        assert conn.execute("select incarnation from pgqueue.streams").fetchone() == (
            uuid.UUID(incarnation),
        )
    assert segment == "1"
    attempt, number = re.fullmatch(r"(.{36})-(\d+)\.parquet", name).groups()  # type: ignore[union-attr]
    assert (str(uuid.UUID(attempt)), number) == (attempt, "1")

    described = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (never|yes) \|", PAGE.read_text(), re.M)
    found = [(each.name, each.type, each.nullable) for each in parquet.read_schema(file)]
    assert found == [(name, TYPES[words], null == "yes") for name, words, null in described]
    group = parquet.read_metadata(file).row_group(0)
    assert group.column(0).compression == "ZSTD"
    assert [each.column_index for each in group.sorting_columns] == [0]
    assert "DELTA_BINARY_PACKED" in group.column(0).encodings
    columns = [group.column(i) for i in range(group.num_columns)]
    without = [each.path_in_schema for each in columns if not each.has_dictionary_page]
    assert without == ["seq", "data"]

    rows = parquet.read_table(file).to_pylist()
    assert [row["seq"] for row in rows] == sorted(row["seq"] for row in rows)
    assert [row["data"] for row in rows] == ["first", *lines(39).split()]
    first, second = rows[:2]
    assert (first["key"], first["headers"], first["priority"]) == ("k", [("a", "b")], 3)
    assert (second["key"], second["headers"], second["priority"]) == (None, None, 0)
    assert first["publication_id"] < second["publication_id"]
    assert first["consumers"] is None
