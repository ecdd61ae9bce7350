"""The page of `pgqueue web`, in a real browser; and what its server refuses.

Chromium and its driver are the machine's. Nothing is installed here; .ci/run does that.
"""

import base64
import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql

import spark_pgqueue
from spark_pgqueue import openmetrics, serving, web
from spark_pgqueue.client import Client
from spark_pgqueue.web import server
from tests import browser as browser_of_the_machine
from tests.processes import wait_until
from tests.sql import clock
from tests.sql.cost import cost
from tests.sql.queue import AT_ONCE
from tests.unit.test_metrics import samples, serving_at

EVIL = "<img src=x onerror=alert(1)> \u202e\x07 &lt; '\"/%TOKEN%"
SEEN = "return document.body.innerText"


@pytest.fixture
def queue(url: str, conn: psycopg.Connection) -> Iterator[Client]:
    with spark_pgqueue.connect(url) as client:
        client.create_stream("orders")
        client.create_consumer("orders", "billing", settings=AT_ONCE | {"max_deliver_count": 3})
        yield client


@pytest.fixture
def page(queue: Client, url: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server of the page, which allows actions if the test says so.

    Gives what asks it, with its url, its client, and the process that serves its connection.
    """
    where = serving.Address("127.0.0.1", 0)
    allow = getattr(request, "param", False)
    with spark_pgqueue.connect(url, patience=0) as client:
        serving_page = web.serve(client, where, title="dbname=test", allow_actions=allow)
        with serving_at(serving_page) as ask:
            ask.url = serving_page.url  # type: ignore[attr-defined]
            ask.client = client  # type: ignore[attr-defined]
            ask.pid = client._value("select pg_backend_pid()")  # type: ignore[attr-defined]
            yield ask


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    """The browser, which has nothing to complain about yet."""
    yield chromium
    chromium.get("about:blank")
    chromium.get_log("browser")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium with an empty profile, which asks nobody on the internet."""
    if not browser_of_the_machine.found():
        pytest.skip(browser_of_the_machine.HOW)
    with browser_of_the_machine.headless(tmp_path_factory.mktemp("chromium")) as chrome:
        yield chrome


def wait(browser: Any, wanted: Callable[[str], Any], what: str = SEEN) -> str:
    """Until the text of the page is as wanted; returns it."""
    from selenium.webdriver.support.ui import WebDriverWait

    try:
        WebDriverWait(browser, 20, 0.05).until(lambda b: wanted(b.execute_script(what) or ""))
    except Exception as error:
        raise AssertionError(f"{browser.execute_script(SEEN)}\n{complaints(browser)}") from error
    return browser.execute_script(what)


def complaints(browser: Any) -> list[str]:
    """What the browser had to say: errors of scripts, and what the page's policy kept out."""
    return [each["message"] for each in browser.get_log("browser") if each["level"] == "SEVERE"]


def row_of(browser: Any, table: str, holds: str) -> list[str]:
    """The cells of the first row of a table that holds a text."""
    rows = browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])]"
        ".map(r => [...r.cells].map(c => c.innerText))",
        f"#{table} tbody tr",
    )
    return next(row for row in rows if any(holds in cell for cell in row))


def figure(browser: Any, name: str) -> str | None:
    """The figure above these words."""
    return browser.execute_script(
        "return [...document.querySelectorAll('.tile')]"
        ".find(t => t.querySelector('small').innerText === arguments[0])"
        "?.querySelector('b').innerText",
        name,
    )


def press(browser: Any, label: str, sure: bool = False) -> None:
    """Click the button with this text; twice, where it asks whether one is sure."""
    from selenium.webdriver.common.by import By

    browser.find_element(By.XPATH, f"//button[.='{label}']").click()
    if sure:
        browser.find_element(By.XPATH, f"//button[.='{label}: sure?']").click()


def press_in(browser: Any, holds: str, label: str) -> None:
    """Click a button twice in the row of the failed messages that holds a text.

    In one script: between two, a refresh may replace the row.
    """
    browser.execute_script(
        "const row = [...document.querySelectorAll('#failed tbody tr')]"
        ".find(r => r.innerText.includes(arguments[0]));"
        "for (const words of [arguments[1], `${arguments[1]}: sure?`])"
        " [...row.querySelectorAll('button')].find(b => b.innerText === words).click()",
        *(holds, label),
    )


# In the browser


@pytest.mark.promise("feature: web page")
def test_it_shows_depth_rates_and_ages_live(browser: Any, page: Any, queue: Client) -> None:
    queue.send_batch("orders", ["x"] * 1234)
    claim = queue.receive("orders", "billing", 34)
    assert claim is not None
    browser.get(page.url)
    wait(browser, lambda text: "1,200" in text and "read-only" in text)
    row = row_of(browser, "consumers", "billing")
    assert (row[0], row[1], row[3], row[8]) == ("orders", "billing", "1,200", "34")
    assert re.fullmatch(r"\d+ (s|min)", row[7]), "the age of the oldest"
    claim.ack()
    # two looks later, without loading it again
    wait(browser, lambda text: "claimed" in text and row_of(browser, "consumers", "b")[8] == "0")
    wait(browser, lambda text: row_of(browser, "consumers", "b")[6] not in ("", "0"))
    assert row_of(browser, "streams", "orders")[2] == "1,234"
    assert complaints(browser) == []


FOCUSED = "return document.activeElement.innerText + ' ' + document.activeElement.tagName"
SELECTED = "return getSelection().toString()"


@pytest.mark.parametrize("where", ["", "#/orders/billing"])
def test_a_look_takes_away_neither_focus_nor_selection(
    browser: Any, page: Any, queue: Client, where: str
) -> None:
    """Also where the lines change their places."""
    queue.create_consumer("orders", "another")
    queue.send("orders", "x")
    queue.receive("orders", "billing")
    browser.get(f"{page.url}{where}")
    wait(browser, lambda text: "billing" in text and text.count("spark-pgqueue") == (where != ""))
    focus, select = ("button", "#health") if where else ("[data-consumer=another] a", ".tile small")
    browser.execute_script(
        "document.querySelector(arguments[0]).focus();"
        "getSelection().selectAllChildren(document.querySelector(arguments[1]))",
        *("form button" if where else focus, select),
    )
    before = browser.execute_script(FOCUSED), browser.execute_script(SELECTED)
    assert before[0] == ("Explain BUTTON" if where else "another A")
    assert before[1]
    for _ in range(2):
        looks = browser.execute_script("return looks.length")
        queue.send_batch("orders", ["x"] * 5)
        claim = queue.receive("orders", "another", 9)
        assert claim is not None
        claim.ack()
        look = "return refresh().then(() => String(looks.length))"
        wait(browser, lambda now, n=looks: int(now) > n, look)
    assert (browser.execute_script(FOCUSED), browser.execute_script(SELECTED)) == before
    assert complaints(browser) == []


def test_consumers_are_found_by_name(browser: Any, page: Any, queue: Client) -> None:
    """Among many; what is typed stays, and the tiles are of all."""
    queue.create_stream("mails")
    for n in range(30):
        queue.create_consumer("mails", f"sender {n}")
    queue.send("orders", "x")
    browser.get(page.url)
    wait(browser, lambda text: "Consumers 31" in text)
    browser.find_element("id", "search").send_keys("SENDER 2")
    wait(browser, lambda text: "Consumers 11 of 31" in text)
    assert row_of(browser, "consumers", "sender 29")[0] == "mails"
    assert figure(browser, "backlog") == "1"
    looks = browser.execute_script("return looks.length")
    wait(browser, lambda _: browser.execute_script("return looks.length") > looks)
    assert browser.execute_script("return document.activeElement.value") == "SENDER 2"
    assert (
        browser.execute_script("return document.querySelectorAll('#consumers tbody tr').length")
        == 11
    )
    browser.find_element("id", "search").send_keys("x")
    wait(browser, lambda text: "No consumer matches this name." in text)
    assert complaints(browser) == []


def test_a_consumers_page_shows_claims_and_explains_messages(
    browser: Any, page: Any, queue: Client
) -> None:
    queue.send_batch("orders", ["x"] * 3)
    claim = queue.receive("orders", "billing", 2, visibility_timeout=timedelta(hours=1))
    assert claim is not None
    browser.get(page.url)
    wait(browser, lambda text: "billing" in text)
    browser.execute_script("document.querySelector('#consumers a').click()")
    wait(browser, lambda text: str(claim.claim_id) in text)
    row = row_of(browser, "claims", str(claim.claim_id))
    assert row[-3:] == ["2", "2", "1"]
    assert "Actions" not in browser.execute_script(SEEN), "it is read-only"
    field = browser.find_element("name", "seq")
    field.send_keys("1")
    field.submit()
    wait(browser, lambda text: "claimed: held by" in text and f"claim {claim.claim_id}" in text)
    # what is typed stays while figures change
    field.send_keys("2")
    queue.send("orders", "x")
    wait(browser, lambda text: figure(browser, "new") == "1")
    assert field.get_attribute("value") == "12"
    assert complaints(browser) == []


def kill(
    queue: Client, *payloads: str | bytes, consumer: str = "billing", stream: str = "orders"
) -> None:
    """Messages that a worker gives up."""
    queue.send_batch(stream, payloads, keys=["k"] * len(payloads))
    claim = queue.receive(stream, consumer, len(payloads))
    assert claim is not None
    assert claim.dead_letter(reason="no such customer") == len(payloads)


@pytest.mark.parametrize("page", [True], indirect=True)
def test_dead_letters_are_shown_with_what_they_hold_and_delivered_again(
    browser: Any, page: Any, queue: Client
) -> None:
    kill(queue, *(f"order {n}" for n in range(60)), "long " + "x" * 5000)
    browser.get(f"{page.url}#/orders/billing")
    wait(browser, lambda text: "order 49" in text and "order 50" not in text)
    row = row_of(browser, "dead", "order 7")
    assert row[:4] == ["8", "no such customer", "1", "spark-pgqueue"]
    assert row[5:7] == ["k", "order 7"]
    press(browser, "Next")
    wait(browser, lambda text: "order 59" in text and "order 49" not in text)
    assert "truncated, 5.0 kB in all" in browser.execute_script(SEEN)
    press(browser, "First page")
    wait(browser, lambda text: "order 49" in text)
    press(browser, "Redeliver", sure=True)
    wait(browser, lambda text: "dead letters redriven: 1" in text)
    wait(browser, lambda text: "order 50" in text and "order 0" not in text)
    press(browser, "Redeliver up to 1,000", sure=True)
    wait(browser, lambda text: "dead letters redriven: 60" in text and "None." in text)
    claim = queue.receive("orders", "billing", 100)
    assert claim is not None
    assert len(claim.messages) == 61
    assert claim.nack(delay=timedelta(hours=1)) == 61
    wait(browser, lambda text: figure(browser, "delayed") == "61")
    press(browser, "Retry all now", sure=True)
    wait(browser, lambda text: "messages to be retried now: 61" in text)
    claim = queue.receive("orders", "billing", 100)
    assert claim is not None
    assert len(claim.messages) == 61
    assert complaints(browser) == []


@pytest.mark.parametrize("page", [True], indirect=True)
def test_what_a_failed_message_does_is_on_one_screen(
    browser: Any, page: Any, queue: Client
) -> None:
    """Its deliveries, errors and next try; and it is tried now, later or never."""
    seqs = queue.send_batch("orders", ["a", "b", "c"])
    for each in seqs:
        claim = queue.receive("orders", "billing")
        assert claim is not None
        claim.nack(reason=f"no answer {each}", delay=timedelta(minutes=each))
    queue.send("orders", "deferred, which is no failure")
    claim = queue.receive("orders", "billing")
    assert claim is not None
    claim.defer(delay=timedelta(hours=2))
    browser.get(f"{page.url}#/orders/billing")
    wait(browser, lambda text: "no answer 3" in text)
    cells = (
        "return [...document.querySelectorAll('#failed tbody tr')].map(r => r.cells[0].innerText)"
    )
    assert browser.execute_script(cells) == ["1", "2", "3"]
    assert row_of(browser, "failed", "no answer 2")[1:4] == ["delayed", "1", "no answer 2"]
    field = browser.find_element("name", "seq")
    field.send_keys("2")
    field.submit()
    wait(browser, lambda text: "spark-pgqueue: no answer 2" in text)
    press(browser, "Now", sure=True)  # of the message that is explained, the first on the page
    wait(browser, lambda text: "messages to be retried now: 1" in text)
    claim = queue.receive("orders", "billing")
    assert claim is not None
    assert [each.seq for each in claim.messages] == [2]
    wait(browser, lambda text: len(browser.execute_script(cells)) == 2)
    press_in(browser, "no answer 1", "In an hour")
    wait(browser, lambda text: "messages postponed by an hour: 1" in text)
    assert [each.seq for each in queue.peek("orders", "billing")] == [3, 1, 4]
    press_in(browser, "no answer 3", "Never")
    wait(browser, lambda text: "messages cancelled: 1" in text)
    assert [each.seq for each in queue.peek("orders", "billing")] == [1, 4]
    assert complaints(browser) == []


def test_who_needs_somebody_comes_first_with_the_reason(
    browser: Any, page: Any, queue: Client
) -> None:
    browser.get(page.url)
    needs = "return document.querySelector('#needs')?.innerText"
    wait(browser, lambda text: "Nothing." in text, needs)
    queue.create_consumer("orders", "full", settings={"max_backlog": 3})
    kill(queue, "order 1")
    queue.send_batch("orders", ["x"] * 2)
    text = wait(browser, lambda text: "billing" in text and "full" in text, needs)
    assert re.search(r"full\s+orders / full\s+3 messages .*\s+failing\s+orders / billing", text)


@pytest.mark.parametrize("width", [360, 800, 1280])
def test_it_is_as_wide_as_the_screen(browser: Any, page: Any, queue: Client, width: int) -> None:
    """On a phone, a row is a card: all of it is seen without moving it to the side."""
    kill(queue, "order " + "x" * 300)
    sized = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 640}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sized)
    try:
        for path in ("", "#/orders/billing"):
            browser.get("about:blank")
            browser.get(f"{page.url}{path}")
            wait(browser, lambda text: "billing" in text)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
            if width < 640:
                fits = "c => c.scrollWidth <= c.clientWidth"
                cards = f"return [...document.querySelectorAll('.card')].every({fits})"
                assert browser.execute_script(cards), path
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_names_and_payloads_are_text_and_nothing_else(
    browser: Any, page: Any, queue: Client
) -> None:
    """No HTML, no script, no control characters that turn the page around."""
    queue.create_stream(EVIL)
    queue.create_consumer(EVIL, EVIL)
    kill(queue, EVIL, consumer=EVIL, stream=EVIL)
    browser.get(page.url)
    wait(browser, lambda text: "onerror=alert(1)" in text)
    assert "\\u{202e}\\u{7}" in row_of(browser, "consumers", "onerror")[1]
    browser.execute_script(
        "[...document.querySelectorAll('#consumers a')].find(a => a.innerText.includes('img'))"
        ".click()"
    )
    wait(browser, lambda text: "Dead letters" in text and "no such customer" in text)
    assert "<img src=x" in row_of(browser, "dead", "no such customer")[6]
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    assert complaints(browser) == []


def test_a_database_that_is_away_is_said_and_comes_back(
    browser: Any, page: Any, queue: Client, conn: psycopg.Connection
) -> None:
    browser.get(page.url)
    wait(browser, lambda text: "billing" in text)
    conn.execute("select pg_terminate_backend(%s, 10000)", [page.pid])
    wait(browser, lambda text: "the connection to Postgres was lost" in text)
    wait(browser, lambda text: "billing" in text and "lost" not in text)


@pytest.mark.parametrize("page", [True], indirect=True)
@pytest.mark.promise("feature: web page with actions")
def test_actions_are_done_where_they_are_allowed(browser: Any, page: Any, queue: Client) -> None:
    queue.send_batch("orders", ["x"] * 5)
    browser.get(f"{page.url}#/orders/billing")
    wait(browser, lambda text: "Pause" in text and "paused" not in text)
    press(browser, "Pause")
    assert not queue.consumers()[0].paused, "it is asked for twice"
    press(browser, "Pause: sure?")
    wait(browser, lambda text: "paused, with" in text)
    assert queue.consumers()[0].paused
    press(browser, "Resume", sure=True)
    wait(browser, lambda text: "paused, with" not in text)
    browser.find_element("name", "to").send_keys("latest")
    press(browser, "Move to position", sure=True)
    wait(browser, lambda text: "messages discarded: 5" in text)
    assert queue.stats()[0].backlog == 0
    browser.find_element("name", "to").clear()
    browser.find_element("name", "to").send_keys("tomorrow, maybe")
    press(browser, "Move to position", sure=True)
    wait(browser, lambda text: "not 'tomorrow, maybe'" in text)
    assert browser.execute_script(f"return refresh().then(() => {{ {SEEN} }})").count("tomorrow"), (
        "the figures that come after it do not take the answer away"
    )


POSITIONS = {
    "2026-12-01": "2026-11-30T15:00:00Z",
    "2026-12-01 10:00": "2026-12-01T01:00:00Z",
    " 2026-12-01T10:00:30.123456 ": "2026-12-01T01:00:30.123456Z",
    **{
        each: each
        for each in (
            "earliest", "latest", "now", "seq 41", "seq x", '{"next": 1}', "2026-12-01 10:00+01",
            "2026-12-01T10:00:30.5-03:30", "1 Dec 2026 10:00 UTC",
        )
    },
}  # fmt: skip
"""What is typed in Tokyo, and the position that the database gets."""


@pytest.mark.parametrize("page", [True], indirect=True)
def test_a_typed_time_is_of_the_browsers_time_zone_as_those_on_the_page(
    browser: Any, page: Any, queue: Client, conn: psycopg.Connection
) -> None:
    """Whatever the database's is."""
    name = sql.Identifier(conn.info.dbname)
    conn.execute(sql.SQL("alter database {} set timezone to 'UTC'").format(name))
    queue.send("orders", "A")
    clock.pass_time(conn, timedelta(hours=1))
    queue.send("orders", "B")
    browser.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "Asia/Tokyo"})
    try:
        browser.get(f"{page.url}#/orders/billing")
        wait(browser, lambda text: "Move to position" in text)
        between = "return time(new Date(Date.now() - 1800e3).toISOString())"
        shown = browser.execute_script(between)
        assert shown.endswith("+09")
        for typed in (shown, shown.removesuffix("+09")):
            queue.seek("orders", "billing", "earliest")
            field = browser.find_element("name", "to")
            field.clear()
            field.send_keys(typed)
            press(browser, "Move to position", sure=True)
            to = browser.execute_script("return positionOf(arguments[0])", typed)
            wait(browser, lambda text, to=to: f"moved to {to}; messages discarded: 1" in text)
            assert [each.data for each in queue.peek("orders", "billing")] == ["B"]
        each = "t => { try { return positionOf(t) } catch (error) { return error.message } }"
        read = f"return arguments[0].map({each})"
        assert browser.execute_script(read, [*POSITIONS]) == [*POSITIONS.values()]
        refused = ["yesterday", "2026-02-30", "1 Dec 2026 10:00", "20261201 10:00", "1-Dec-2026"]
        for typed, said in zip(refused, browser.execute_script(read, refused), strict=True):
            assert said.endswith(f"not '{typed}'")
    finally:
        browser.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": ""})
    assert complaints(browser) == []


HOLD = """
window.held = []; const real = fetch;
window.fetch = (path, ...more) =>
  path.startsWith("api/message") ? new Promise(go => held.push(go)) : real(path, ...more)"""
ANSWER = """
const found = { state: "new", because: `the answer ${arguments[0]}`, until: null, failures: [] };
held[arguments[0]]({ ok: true, json: async () => found });
return new Promise(done => setTimeout(() => done(document.querySelector("#explained").innerText)))
"""


@pytest.mark.parametrize("page", [True], indirect=True)
def test_the_buttons_of_an_explanation_act_on_the_message_that_was_asked_for(
    browser: Any, page: Any, queue: Client
) -> None:
    """Whatever was typed before its answer came; and only the answer to the last question shows."""
    queue.send_batch("orders", ["x"] * 4)
    browser.get(f"{page.url}#/orders/billing")
    wait(browser, lambda text: "Find a message" in text)
    browser.execute_script(HOLD)
    field = browser.find_element("name", "seq")
    for typed in ("4", "1"):
        field.clear()
        field.send_keys(typed)
        field.submit()
    field.clear()
    field.send_keys("2")
    assert "the answer 1" in browser.execute_script(ANSWER, 1)
    assert "the answer 1" in browser.execute_script(ANSWER, 0), "that of 4 came late"
    press(browser, "Never", sure=True)
    wait(browser, lambda text: "messages cancelled: 1" in text)
    assert [each.seq for each in queue.peek("orders", "billing")] == [2, 3, 4]
    assert complaints(browser) == []


def test_a_counter_that_is_unknown_for_a_moment_makes_no_rate(browser: Any, page: Any) -> None:
    browser.get(page.url)
    wait(browser, lambda text: "billing" in text)
    rates = (
        "const before = looks; try { return arguments[0].map(counts => {"
        " looks = counts.map((sent, i) => ({ at: `2026-12-01T10:00:0${i}Z`,"
        " streams: [{ name: 'orders', sent }] })); return sentOf('orders') }) }"
        " finally { looks = before }"
    )
    counts = [[None, 10**6, 10**6], [None, 10**6], [10**6, None], [0, None], [5, None, 25]]
    assert browser.execute_script(rates, counts) == [0, None, None, None, 10]


def test_a_consumer_that_is_created_again_has_its_page_again(
    browser: Any, page: Any, queue: Client
) -> None:
    browser.get(f"{page.url}#/orders/billing")
    wait(browser, lambda text: "Find a message" in text)
    look = f"return refresh().then(() => {{ {SEEN} }})"
    queue.drop_consumer("orders", "billing")
    wait(browser, lambda text: "This consumer does not exist." in text, look)
    queue.create_consumer("orders", "billing")
    wait(browser, lambda text: "Find a message" in text and "does not exist" not in text, look)
    assert all("status of 400" in each for each in complaints(browser)), (
        "a look may be a second old"
    )


# What the server reads, and what it waits for


def test_the_beginning_of_a_large_payload_is_all_that_is_read(
    queue: Client, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.create_stream("files", "binary")
    queue.create_consumer("files", "copying")
    kill(queue, b"x" * 2000, b"x" * 2001, consumer="copying", stream="files")
    cut = [(each["bytes"], each["cut"]) for each in server._dead(queue, "files", "copying", 0)]
    assert cut == [(2000, False), (2001, True)]
    large = base64.b64encode(os.urandom(3 << 20)).decode()  # which Postgres cannot compress
    kill(queue, "é" * 2000, "é" * 2001, *[large] * 4)
    asked: list[tuple[Any, list[Any]]] = []
    rows = queue._statements.rows
    monkeypatch.setattr(queue._statements, "rows", lambda *what: asked.append(what) or rows(*what))
    listed = server._dead(queue, "orders", "billing", 0)
    found = [(each["bytes"], each["cut"], len(each["data"])) for each in listed]
    assert found == [(4000, False, 2000), (4002, True, 2000), *[(4 << 20, True, 2000)] * 4]
    ((statement, given),) = asked
    _, blocks = (cost(conn, statement, *given) for _ in range(2))  # the first reads the catalogue
    assert blocks < 500, "all of them are 2,000 blocks"


@pytest.mark.parametrize("page", [True], indirect=True)
def test_a_call_that_waits_or_takes_long_delays_no_look(
    page: Any, queue: Client, conn: psycopg.Connection
) -> None:
    kill(queue, "order 1")
    names = "stream=orders&consumer=billing"
    body = json.dumps({"action": "redrive", "stream": "orders", "consumer": "billing"})
    headers = {"Content_Type": "application/json", "X_Pgqueue_Token": token_of(page)}
    waits = (
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and query ~ 'pgqueue.redrive[(]' and pid <> pg_backend_pid()"
    )
    with ThreadPoolExecutor() as threads:
        with conn.transaction():
            conn.execute("select _pgqueue.lock_consumer(consumer_id) from pgqueue.consumers")
            acted = threads.submit(page, "/api/action", "POST", body, **headers)
            wait_until(lambda: queue._value(waits))
            for path in ("/api/look", f"/api/consumer?{names}", "/metrics"):
                assert page(path)[0] == 200, path
            assert not acted.done()
        assert json.loads(acted.result()[2]) == {"done": "dead letters redriven: 1"}
    with page.client._statements.turn:  # the looks' connection is busy
        assert json.loads(page(f"/api/message?{names}&seq=1")[2])["state"] == "ready"


# What the server refuses


def token_of(page: Any) -> str:
    return re.findall(r'name="token" content="(.*?)"', page("/")[2])[0]


def act(page: Any, **headers: str) -> tuple[int, str]:
    body = json.dumps({"action": "pause", "stream": "orders", "consumer": "billing"})
    given = {"Content_Type": "application/json", "X_Pgqueue_Token": token_of(page), **headers}
    status, _, answer = page("/api/action", "POST", body, **given)
    return status, answer


@pytest.mark.parametrize("page", [True], indirect=True)
def test_another_page_cannot_act(page: Any, queue: Client) -> None:
    """Without the token, from elsewhere, or as a form would."""
    for headers in (
        {"X_Pgqueue_Token": ""},
        {"X_Pgqueue_Token": "x" * 43},
        {"X_Pgqueue_Token": "é"},
        {"Origin": "http://evil.example"},
        {"Origin": "https://evil.example"},
        {"Origin": "http://localhost"},
        {"Origin": "null"},
        {"Content_Type": "text/plain"},
        {"Content_Type": "application/x-www-form-urlencoded"},
    ):
        assert act(page, **headers)[0] == 403, headers
    assert act(page, Host="evil.example")[0] == 421
    assert not queue.consumers()[0].paused
    for scheme in ("http", "https"):  # a proxy in front may add TLS
        headers = {"Host": "localhost:1", "Origin": f"{scheme}://localhost:1"}
        assert act(page, **headers)[0] == 200, headers
    assert act(page)[0] == 200
    assert queue.consumers()[0].paused


def test_a_read_only_page_has_no_token_and_does_nothing(page: Any, queue: Client) -> None:
    assert token_of(page) == ""
    status, said = act(page)
    assert status == 403
    assert "--allow-actions" in said
    assert not queue.consumers()[0].paused


def test_nobody_elses_page_can_read(page: Any) -> None:
    """By a name that was made to lead here; and no other page may hold it in a frame."""
    for path in ("/", "/api/look", "/api/consumer?stream=orders&consumer=billing"):
        assert page(path, Host="evil.example:9188")[0] == 421
        status, headers, _ = page(path)
        assert status == 200
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("page", [True], indirect=True)
def test_a_request_that_makes_no_sense_is_an_answer(page: Any) -> None:
    headers = {"Content_Type": "application/json", "X_Pgqueue_Token": token_of(page)}
    for path, body, status in (
        ("/nowhere", None, 404), ("/../server.py", None, 404), ("/api/action", None, 404),
        ("/api/consumer", None, 400), ("/api/consumer?stream=orders&consumer=nope", None, 400),
        ("/api/consumer?stream=nope&consumer=billing", None, 409),
        ("/api/message?stream=orders&consumer=billing&seq=x", None, 400),
        ("/api/message?stream=orders&consumer=billing&seq=0", None, 409),
        ("/api/action", "{", 400), ("/api/action", "[]", 400), ("/api/action", "{}", 400),
        ("/api/action", '{"action": "drop_stream"}', 400),
        ("/api/action", '{"action": "pause", "stream": 7, "consumer": "billing"}', 409),
    ):  # fmt: skip
        found = page(path, "POST" if body else "GET", body, **headers)
        assert found[0] == status, (path, found[2])
        assert json.loads(found[2])["error"], path


def test_an_observer_sees_and_is_told_what_it_may_not_do(
    queue: Client, new_role: Callable[..., str]
) -> None:
    kill(queue, "secret order")
    queue.send("orders", "x")
    with spark_pgqueue.connect(new_role("observer")) as viewer:
        theirs = web.serve(viewer, serving.Address("127.0.0.1", 0), title="", allow_actions=True)
        with serving_at(theirs) as ask:
            assert json.loads(ask("/api/look")[2])["consumers"][0]["new"] == 1
            names = "stream=orders&consumer=billing"
            (dead,) = json.loads(ask(f"/api/consumer?{names}")[2])["dead"]
            assert dead["data"] == "secret order"
            assert json.loads(ask(f"/api/message?{names}&seq=2")[2])["state"] == "new"
            status, said = act(ask)
            assert (status, "permission denied" in said) == (409, True)


def test_metrics_are_beside_the_page(page: Any, queue: Client) -> None:
    """For Prometheus: what `pgqueue metrics --listen` serves."""
    queue.send("orders", "x")
    status, headers, text = page("/metrics")
    assert (status, headers["Content-Type"]) == (200, openmetrics.KIND)
    assert samples(text, "pgqueue_consumer_backlog") == {("orders", "billing"): 1}
    assert page("/metrics", "POST", "{}")[0] == 404


def test_nothing_of_it_is_elsewhere() -> None:
    """No script, style, font or picture is loaded from anywhere: it works without the internet."""
    text = server.PAGE.read_text()
    assert re.findall(r"https?://[^\"'\s]+", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
