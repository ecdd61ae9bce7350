"""The server behind the page: figures as JSON, and, where allowed, a few actions.

It has no users and no passwords. So it serves only this machine by default, and everyone who can
connect sees what the role of its connection may see. It prevents attacks by other pages in the same
browser: DNS rebinding (it checks Host), and cross-site request forgery (it checks Origin, and a
token that only its own page has).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg

from spark_pgqueue import metrics, serving
from spark_pgqueue.client import Client
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.serving import Answer, Request, as_json

PORT = 9188
PAGE = Path(__file__).with_name("page.html")
LISTED = 50  # the number of claims and dead letters on the page
SHOWN = 2000  # the number of characters or bytes of a payload on the page

Actions = dict[str, Callable[[Client, dict[str, Any]], str]]


def serve(
    queue: Client,
    where: serving.Address,
    *,
    title: str,
    names: tuple[str, ...] = (),
    allow_actions: bool = False,
) -> serving.Server:
    """A server of the page; call its `serve_forever`.

    Args:
        queue: the client, which threads share.
        where: the address to listen on.
        title: the name of the database, without a password.
        names: see `serving.Server`.
        allow_actions: whether the page may change something; the role of `queue` needs the rights,
            too.

    Raises:
        PgQueueError: the extra `web` is not installed.
        OSError: the server cannot listen there.
    """
    page = Page(queue, title, allow_actions)
    return serving.Server(where, page.answer, names=names, headers=page.headers)


class Page:
    """Answers the requests of the page.

    Args:
        queue, title, allow_actions: see `serve`.
    """

    def __init__(self, queue: Client, title: str, allow_actions: bool):
        self._queue = queue
        self._allow_actions = allow_actions
        self._token = secrets.token_urlsafe(32)
        self._look = serving.Shared(queue.look)
        self._scrape = metrics.scraping(lambda: queue)
        text = PAGE.read_text()
        # The page holds its script and its style; the policy lets no others in.
        self.headers: dict[str, str] = {
            "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:;"
            f" script-src {_hash_of(text, 'script')}; style-src {_hash_of(text, 'style')};"
            " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        filled = {
            "TITLE": title,
            "TOKEN": self._token if allow_actions else "",
            "MODE": "actions" if allow_actions else "read-only",
        }
        for name, value in filled.items():
            text = text.replace(f"%{name}%", html.escape(value))
        self._page = Answer(text.encode(), "text/html; charset=utf-8")

    def answer(self, request: Request) -> Answer:
        """The page, its figures, or the result of an action."""
        if request.method == "GET" and request.path == "/":
            return self._page
        paths = {
            ("GET", "/metrics"): self._scrape,
            ("GET", "/api/look"): self._answer_look,
            ("GET", "/api/consumer"): self._answer_consumer,
            ("GET", "/api/message"): self._answer_message,
            ("POST", "/api/action"): self._answer_action,
        }
        found = paths.get((request.method, request.path))
        if found is None:
            return as_json({"error": "page not found"}, 404)
        try:
            return found(request)
        except PgQueueError as error:
            return as_json({"error": error.message, "hint": error.hint}, 409)
        except psycopg.Error as error:
            text = error.diag.message_primary or "database error"
            return as_json({"error": text, "hint": error.diag.message_hint}, 409)
        except (KeyError, ValueError, TypeError) as error:
            return as_json({"error": f"invalid request: {error!r}"}, 400)

    def _answer_look(self, _: Request) -> Answer:
        look = self._look()
        partitions = [
            {"stream": stream, "group": group, **asdict(each)}
            for stream, group, each in look.partitions
        ]
        return as_json(asdict(look) | {"partitions": partitions})

    def _answer_consumer(self, request: Request) -> Answer:
        stream, consumer = request.query["stream"], request.query["consumer"]
        (health,) = [h for h in self._queue.health(stream) if h.consumer == consumer]
        claims = self._queue.open_claims(stream, consumer, limit=LISTED)
        return as_json(
            {
                "health": asdict(health),
                "claims": [asdict(each) | {"claim_id": str(each.claim_id)} for each in claims],
                "failed": _failed(self._queue, stream, consumer),
                "dead": _dead(self._queue, stream, consumer, int(request.query.get("after", 0))),
                "listed": LISTED,
            }
        )

    def _answer_message(self, request: Request) -> Answer:
        where = request.query["stream"], request.query["consumer"], int(request.query["seq"])
        with self._another() as queue:
            failures = [asdict(each) for each in queue.failures(*where)]
            return as_json(asdict(queue.explain(*where)) | {"failures": failures})

    def _answer_action(self, request: Request) -> Answer:
        if not self._allow_actions:
            error = "this page is read-only"
            return as_json({"error": error, "hint": "start it with --allow-actions"}, 403)
        given = request.headers.get("x-pgqueue-token", "")
        host, origin = request.headers.get("host"), request.headers.get("origin")
        if (
            not secrets.compare_digest(given.encode(), self._token.encode())
            or origin not in (None, f"http://{host}", f"https://{host}")  # a proxy adds TLS
            or request.headers.get("content-type") != "application/json"
        ):
            error = "actions are accepted only from this server's own page"
            return as_json({"error": error, "hint": "reload it: the server was restarted"}, 403)
        asked = json.loads(request.body)
        action = ACTIONS[asked["action"]]
        with self._another() as queue:
            return as_json({"done": action(queue, asked)})

    @contextmanager
    def _another(self) -> Iterator[Client]:
        """A client for a call that may take long, or wait a minute for a lock.

        The looks of all tabs and the metrics would wait behind it on their connection. The caller's
        own connection has no second one.
        """
        if not self._queue._statements.can_wait:
            yield self._queue
            return
        statements = self._queue._statements.another(repeat=False)
        with Client(statements.connection(), _statements=statements) as queue:
            yield queue


def _pause(queue: Client, asked: dict[str, Any]) -> str:
    queue.pause(asked["stream"], asked["consumer"])
    return "paused: no messages are claimed until it is resumed"


def _resume(queue: Client, asked: dict[str, Any]) -> str:
    queue.resume(asked["stream"], asked["consumer"])
    return "resumed"


def _seek(queue: Client, asked: dict[str, Any]) -> str:
    count = queue.seek(asked["stream"], asked["consumer"], asked["to"])
    return f"moved to {asked['to']}; messages discarded: {count}"


def _retry(queue: Client, asked: dict[str, Any]) -> str:
    count = queue.retry(asked["stream"], asked["consumer"], asked.get("seqs"))
    return f"messages to be retried now: {count}"


def _postpone(queue: Client, asked: dict[str, Any]) -> str:
    until = datetime.now(UTC) + timedelta(hours=1)
    count = queue.postpone(asked["stream"], asked["consumer"], asked["seqs"], until)
    return f"messages postponed by an hour: {count}"


def _cancel(queue: Client, asked: dict[str, Any]) -> str:
    count = queue.cancel(asked["stream"], asked["consumer"], asked["seqs"])
    return f"messages cancelled: {count}"


def _redrive(queue: Client, asked: dict[str, Any]) -> str:
    count = queue.redrive(asked["stream"], asked["consumer"], asked.get("seqs"))
    return f"dead letters redriven: {count}"


ACTIONS: Actions = {
    "pause": _pause,
    "resume": _resume,
    "seek": _seek,
    "retry": _retry,
    "postpone": _postpone,
    "cancel": _cancel,
    "redrive": _redrive,
}


def _failed(queue: Client, stream: str, consumer: str) -> list[dict[str, Any]]:
    """Some messages that have failed and are delivered again, those with the next try first.

    The inner limit bounds what a consumer costs all of whose messages have failed.
    """
    names = ("seq", "state", "deliver_count", "not_visible_until", "last_error")
    rows = queue._statements.rows(
        "select * from (select seq, state, deliver_count, not_visible_until,"
        " left(last_error, %s::int) from pgqueue.message_states"
        " where stream = %s and consumer = %s and deliver_count > 0"
        " and state in ('ready', 'delayed', 'waiting') limit 1000) m"
        " order by not_visible_until nulls first, seq limit %s",
        [SHOWN, stream, consumer, LISTED],
    )
    return [dict(zip(names, row, strict=True)) for row in rows]


def _dead(queue: Client, stream: str, consumer: str, after: int) -> list[dict[str, Any]]:
    """Some dead letters, with the beginnings of their content.

    The size of a payload in bytes is stored beside it; its length in characters reads all of it.
    """
    names = (
        "seq", "key", "data", "hex", "bytes", "cut", "headers", "reason", "error",
        "deliver_count", "owner", "died_at",
    )  # fmt: skip
    rows = queue._statements.rows(
        "select seq, key, left(data, %s::int), encode(substring(data_bytes for %s), 'hex'),"
        " coalesce(octet_length(data), octet_length(data_bytes)),"
        " coalesce(case when octet_length(data) > 4 * %s then true else length(data) > %s end,"
        " octet_length(data_bytes) > %s), left(headers::text, %s::int),"
        " reason, error, deliver_count, owner, died_at"
        " from pgqueue.read_dead(%s::text, %s::text, p_max => %s, p_after => %s::bigint)",
        [*[SHOWN] * 6, stream, consumer, LISTED, after],
    )
    return [dict(zip(names, row, strict=True)) for row in rows]


def _hash_of(page: str, tag: str) -> str:
    """The hash of the page's only script or style, for the Content-Security-Policy."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
