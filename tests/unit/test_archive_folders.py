"""What a process with credentials opens, because a database says that the archive is there."""

from pathlib import Path
from typing import Any

import pytest

from spark_pgqueue.archive.folders import ALLOW, check, folder, parse_prefix
from spark_pgqueue.postgres.errors import PgQueueError

OPTIONS = {"region": "eu"}


@pytest.mark.parametrize(
    ("uri", "prefix"),
    [
        ("s3://bucket/a", "s3://bucket/a"),
        ("s3://bucket/a", "s3://bucket/a/"),
        ("s3://bucket/a", "s3://bucket"),
        ("s3://bucket/a/b", "s3://bucket/a"),
        ("hdfs://host:8020/a", "hdfs://host:8020"),
        ("abfss://account.blob.core.windows.net/c/a", "abfss://account.blob.core.windows.net"),
        ("/srv/a", "/srv"),
        ("/srv/a", "/srv/"),
        ("/srv/a", "/"),
        ("file:///srv/a", "/srv"),
        ("/srv/a", "file:///srv/a"),
    ],
)
def test_what_is_below_a_prefix_is_allowed(uri: str, prefix: str) -> None:
    check(uri, None, ["s3://other", prefix])
    check(uri, OPTIONS, [prefix])


@pytest.mark.parametrize("options", [None, OPTIONS])
@pytest.mark.parametrize(
    ("uri", "prefix"),
    [
        ("s3://bucket/ab", "s3://bucket/a"),
        ("s3://bucket2/a", "s3://bucket"),
        ("s3://bucket", "s3://bucket/a"),
        ("s3://bucket/a/../b", "s3://bucket/a"),
        ("s3://bucket/a/%2e%2e/b", "s3://bucket/a"),
        ("s3://bucket/a/.%2E/b", "s3://bucket/a"),
        ("s3://bucket/%61", "s3://bucket/a"),
        ("gs://bucket/a", "s3://bucket/a"),
        ("/bucket/a", "s3://bucket/a"),
        ("file:///etc", "s3://bucket/a"),
        (
            "abfss://account.blob.core.windows.net.example/c",
            "abfss://account.blob.core.windows.net",
        ),
        (
            "abfss://account.blob.core.windows.net@example/c",
            "abfss://account.blob.core.windows.net",
        ),
        ("hdfs://host:80/a", "hdfs://host"),
        ("/srv2", "/srv"),
        ("/srv/../etc", "/srv"),
        ("file:///srv/../etc", "/srv"),
        ("/", "/srv"),
    ],
)
@pytest.mark.promise("archive: Prefixes")
def test_what_is_not_below_a_prefix_is_refused(uri: str, prefix: str, options: Any) -> None:
    with pytest.raises(PgQueueError, match=r"not below|has options, a user, or a step"):
        check(uri, options, [prefix])


def test_the_environment_allows_where_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """On executors, too, which read what the plan of the driver names."""
    monkeypatch.setenv(ALLOW, "s3://bucket/a  /srv")
    check("/srv/a", None, [])
    check("/etc", None, ["/etc"])
    with (
        pytest.raises(PgQueueError, match="/etc is not below s3://bucket/a or /srv") as failed,
        folder("/etc"),
    ):
        pass
    assert ALLOW in str(failed.value)


def test_a_link_below_a_prefix_does_not_lead_out_of_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    (tmp_path / "to_in").symlink_to(tmp_path / "in")
    check(f"{tmp_path}/to_in/a", None, [f"{tmp_path}/in"])
    with pytest.raises(PgQueueError, match="is not below"):
        check(f"{tmp_path}/in/link", None, [f"{tmp_path}/in"])


@pytest.mark.parametrize("uri", ["hdfs://host/a", "abfs://a@host/a", "abfss://a.example/a"])
def test_a_host_that_only_the_database_names_gets_no_credentials(uri: str) -> None:
    with pytest.raises(PgQueueError, match=r"names the host that would get|has options, a user"):
        check(uri, None, [])


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/a?endpoint_override=host.example&secret_key=s3cr3t",
        "s3://key:s3cr3t@bucket/a",
        "gs://bucket/a?endpoint_override=host.example&s3cr3t",
        "http://host.example/s3cr3t?s3cr3t",
        "mock:///a?s3cr3t",
    ],
)
def test_a_uri_that_says_more_than_where_it_is_is_not_opened(uri: str) -> None:
    """0.1.0 took options in a uri, and stored them."""
    with pytest.raises(PgQueueError, match="cannot be read or written") as failed, folder(uri):
        pass
    assert uri not in str(failed.value)


def test_options_of_a_uri_of_0_1_0_give_way_to_those_of_the_process() -> None:
    given = {"endpoint_override": "http://127.0.0.1:9", "region": "eu", "anonymous": True}
    with folder("s3://bucket/a?endpoint_override=host.example&region=x", given) as found:
        assert found.path == "bucket/a"
        assert found.system.region == "eu"


@pytest.mark.parametrize(
    "text", ["a", "", "http://host", "s3://b?c", "s3:///b", "s3://a@b", "file://x", "s3://"]
)
def test_a_prefix_that_no_archive_has_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"it is neither an absolute path|it has options"):
        parse_prefix(text)
