"""Figures for dashboards: OpenMetrics text, as its own parser reads it, and who may ask for it."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import psycopg
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import spark_pgqueue
import spark_pgqueue.client
from spark_pgqueue import metrics, openmetrics, serving
from spark_pgqueue.client import Client
from spark_pgqueue.client.calls import base
from spark_pgqueue.printable import printable

EVIL = 'a"b\\c\nd{e="f"} \u202e\x1b[2J'


CONSUMER = None


def parsed(text: str) -> dict[str, Any]:
    """The families by name; raises for what is not OpenMetrics."""
    return {family.name: family for family in text_string_to_metric_families(text)}


def samples(text: str, name: str) -> dict[tuple[str, ...], float]:
    """The samples of a metric, by the values of their labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in parsed(text).values()
        for sample in family.samples
        if sample.name == name
    }


@contextmanager
def serving_at(server: serving.Server) -> Iterator[Callable[..., tuple[int, dict[str, str], str]]]:
    """Ask a server; gives what asks it."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    port = server.server_address[1]

    def ask(
        path: str, method: str = "GET", body: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], str]:
        connection = HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request(
            method, path, body, {name.replace("_", "-"): value for name, value in headers.items()}
        )
        answer = connection.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read().decode()
        connection.close()
        return found

    try:
        yield ask
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_it_is_openmetrics_whatever_the_names_are(queue: Client) -> None:
    """Types, units and escapes, of all metrics."""
    queue.create_stream(EVIL)
    queue.create_consumer(EVIL, EVIL)
    queue.create_group(EVIL, "g", partitions=2)
    queue.send(EVIL, "x")
    text = metrics.look_at(queue)
    assert text.endswith("\n# EOF\n")
    families = parsed(text)
    for family in metrics.FAMILIES:
        found = families[family.name]
        assert (found.type, found.unit) == (family.type, family.unit)
        assert found.samples, f"no sample of {family.name}"
    assert printable(text, keep="\n") == text, "a terminal obeys none of it"
    shown = printable(EVIL, keep="\n")
    assert samples(text, "pgqueue_consumer_backlog")[shown, shown] == 1
    assert samples(text, "pgqueue_stream_sent_total") == {("s",): 0, (shown,): 1}
    assert samples(text, "pgqueue_up") == {(): 1}


@pytest.mark.promise("feature: metrics")
def test_the_figures_are_those_of_the_queue(queue: Client) -> None:
    queue.create_consumer("s", "c", start="earliest", ordering="key")
    queue.send_batch("s", ["x"] * 6, keys=list("aabbcc"))
    claim = queue.receive("s", "c", 5)
    assert claim is not None
    claim.ack(claim.messages[:1])
    claim.dead_letter(claim.messages[1:2])
    text = metrics.look_at(queue)
    by_state = samples(text, "pgqueue_consumer_messages")
    found = {state: n for (_, _, state), n in by_state.items() if n}
    assert found.pop("dead") == 1
    assert sum(found.values()) == 4
    assert found["claimed"] == 3
    assert samples(text, "pgqueue_consumer_settled_total") == {("s", "c"): 2}
    assert 0 < samples(text, "pgqueue_consumer_oldest_claim_seconds")["s", "c"] < 60
    assert samples(text, "pgqueue_consumer_claims") == {("s", "c"): 1}


def test_rates_are_told_by_two_looks(queue: Client) -> None:
    queue.create_consumer("s", "c")
    first = queue.look()
    assert spark_pgqueue.client.rates(None, first)["s", "c"] == (None, None, None)
    queue.send_batch("s", ["x"] * 100)
    claim = queue.receive("s", "c", 30)
    assert claim is not None
    claim.ack()
    second = queue.look()
    took = (second.at - first.at).total_seconds()
    rate = spark_pgqueue.client.rates(first, second)["s", "c"]
    assert rate.sent == pytest.approx(100 / took)
    assert rate.settled == pytest.approx(30 / took)
    assert rate.empty_in is None
    while claim := queue.receive("s", "c", 35):
        claim.ack()
        third = queue.look()
        if third.consumers[0].backlog:
            rate = spark_pgqueue.client.rates(second, third)["s", "c"]
            assert rate.empty_in is not None
    # made anew, so that its counters begin at 0
    queue.drop_consumer("s", "c")
    queue.create_consumer("s", "c")
    assert spark_pgqueue.client.rates(second, queue.look())["s", "c"].settled is None


def test_a_backlog_that_shrinks_is_empty_in_a_time_whatever_else_the_stream_gets(
    queue: Client,
) -> None:
    queue.create_consumer("s", "c")
    queue.create_consumer("s", "other")
    queue.send_batch("s", ["x"] * 30, consumers=["c"])
    first = queue.look()
    queue.send_batch("s", ["x"] * 1000, consumers=["other"])
    claim = queue.receive("s", "c", 20)
    assert claim is not None
    claim.ack()
    second = queue.look()
    took = (second.at - first.at).total_seconds()
    rates = spark_pgqueue.client.rates(first, second)
    assert rates["s", "c"].empty_in == pytest.approx(took / 2)  # 10 of 30 are left
    assert rates["s", "other"].empty_in is None


def test_it_is_served_to_who_may_ask(queue: Client) -> None:
    """Nobody's page may read it whose name was made to lead here (DNS rebinding)."""
    where = serving.Address("127.0.0.1", 0)
    with serving_at(metrics.serve(lambda: queue, where, ("mine.example",))) as ask:
        status, headers, body = ask("/metrics")
        assert (status, headers["Content-Type"]) == (200, openmetrics.KIND)
        assert samples(body, "pgqueue_up") == {(): 1}
        assert ask("/")[0] == 404
        assert ask("/metrics", "POST", "x")[0] == 404
        assert ask("/metrics", "POST", "x", Content_Length="9999999")[0] == 413
        assert ask("/metrics", "HEAD")[2] == ""
        for host in ("localhost:1", "127.0.0.1", "[::1]:80", "mine.example", "MINE.EXAMPLE.:9"):
            assert ask("/metrics", Host=host)[0] == 200, host
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil", "", "["):
            status, _, body = ask("/metrics", Host=host)
            assert (status, "pgqueue_up" in body) == (421, False), host


def test_many_who_ask_at_once_cost_one_look() -> None:
    calls: list[int] = []

    def call() -> int:
        time.sleep(0.05)
        calls.append(1)
        return len(calls)

    shared = serving.Shared(call, 10)
    threads = [threading.Thread(target=shared) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_a_database_that_is_away_is_a_figure_and_comes_back(
    queue: Client, url: str, conn: psycopg.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    with spark_pgqueue.connect(url, patience=0) as watcher:
        scrape = metrics._scrape
        assert samples(scrape(lambda: watcher), "pgqueue_up") == {(): 1}
        pid = watcher._value("select pg_backend_pid()")
        conn.execute("select pg_terminate_backend(%s, 10000)", [pid])
        away = scrape(lambda: watcher)
        assert samples(away, "pgqueue_up") == {(): 0}
        assert "pgqueue_consumer" not in away
        assert "lost" in capsys.readouterr().err
        assert samples(scrape(lambda: watcher), "pgqueue_up") == {(): 1}


def scrape_of(timeout: str | None) -> serving.Request:
    """A scrape, and the timeout that Prometheus sends with it."""
    name = "x-prometheus-scrape-timeout-seconds"
    headers = {} if timeout is None else {name: timeout}
    return serving.Request("GET", "/metrics", {}, headers, b"")


def test_a_scrape_is_answered_before_its_scraper_gives_up(queue: Client) -> None:
    """While the database hangs; and all wait for the one look that goes on."""
    answers, looks = threading.Event(), list[int]()

    def hanging() -> Client:
        looks.append(1)
        assert answers.wait(20)
        return queue

    scrape = metrics.scraping(hanging)
    for _ in range(2):
        found = scrape(scrape_of("0.25"))
        assert samples(found.body.decode(), "pgqueue_up") == {(): 0}
    answers.set()
    assert samples(scrape(scrape_of(None)).body.decode(), "pgqueue_up") == {(): 1}
    assert len(looks) == 1


def test_a_scrape_may_take_most_of_its_timeout() -> None:
    found = [metrics._patience(scrape_of(given)) for given in ("60", "0.5", None, "", "-1", "nan")]
    assert found == [48, 0.4, 8, 8, 8, 8]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9187", ("127.0.0.1", 9187)), (":80", ("127.0.0.1", 80)), ("", ("127.0.0.1", 1)),
        ("0.0.0.0:80", ("0.0.0.0", 80)), ("localhost", ("localhost", 1)),
        ("[::1]:80", ("::1", 80)), ("a-b.example:80", ("a-b.example", 80)),
    ],
)  # fmt: skip
def test_an_address_without_a_host_is_this_machine(text: str, address: tuple[str, int]) -> None:
    found = serving.address(text, 1)
    assert found == address
    assert found.is_local == (address[0] in ("127.0.0.1", "localhost", "::1"))


@pytest.mark.parametrize("text", ["a:b", "::1", "1:2:3", "host:99999", "x y", "http://a"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        serving.address(text, 1)


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    """Each query, and each has a place and a source that whoever looks at it chooses.

    The source is a variable: a provisioned dashboard has nobody who is asked for an input.
    """
    text = metrics.DASHBOARD.read_text()
    board = json.loads(text)
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert "__inputs" not in board
    assert {*re.findall(r"\$\{?([A-Za-z]\w*)", text)} <= {*variables}
    counters = {f"{each.name}_total" for each in metrics.FAMILIES if each.type == "counter"}
    known = {each.name for each in metrics.FAMILIES if each.type != "counter"} | counters
    known.add("pgqueue_up")
    asked: set[str] = set()
    for panel in board["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        for target in panel["targets"]:
            names = set(re.findall(r"\bpgqueue_\w+", target["expr"]))
            assert names, f"{panel['title']} asks for nothing"
            assert names <= known, f"{panel['title']}: there is no {names - known}"
            for name in names & counters:
                assert re.search(rf"(rate|increase)\({name}", target["expr"]), panel["title"]
            asked |= names
            # of now: the last of an hour would stay after scrapes have ended
            is_stat = panel["type"] == "stat"
            assert (target.get("instant", False), target["range"]) == (is_stat, not is_stat)
    for variable in board["templating"]["list"]:
        asked |= set(re.findall(r"\bpgqueue_\w+", json.dumps(variable)))
    assert asked <= known
    unasked = {name for name in known - asked if name.startswith("pgqueue_consumer_")}
    assert unasked == {"pgqueue_consumer_taken_total"}
    places = [tuple(panel["gridPos"][k] for k in "xywh") for panel in board["panels"]]
    assert all(x + w <= 24 for x, _, w, _ in places)
    assert len({place[:2] for place in places}) == len(places)


def test_figures_of_many_streams_come_from_several_statements(
    queue: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps locks of its streams only while it runs: the lock table of a server has a size."""
    for name in ("t", "u", "v", "w"):
        queue.create_stream(name)
        queue.create_consumer(name, "c")
        queue.create_consumer(name, "d")
    whole, health = queue.look(), queue.health()
    monkeypatch.setattr(base, "_STREAMS_AT_ONCE", 2)
    run, most = queue._statements.rows, list[int]()

    def note(sql: Any, parameters: Any = (), **others: Any) -> list[Any]:
        most.extend(len(each) for each in parameters if isinstance(each, list))
        return run(sql, parameters, **others)

    monkeypatch.setattr(queue._statements, "rows", note)
    found = queue.look()
    assert (found.streams, found.consumers) == (whole.streams, whole.consumers)
    assert queue.health() == health
    assert most == [2, 2, 1] * 3


def test_a_described_stream_is_the_only_one_that_is_looked_at(queue: Client) -> None:
    queue.create_stream("t")
    query = "select count(*) from pg_locks where relation = to_regclass(%s)"
    with queue.transaction():
        assert queue.describe_stream("s").stream.name == "s"
        found = [queue._value(query, f"pgqueue.seq_{number}") for number in (1, 2)]
    assert found == [1, 0]
