"""What the settings of a consumer cost: who has one, and who has none beside others that do.

In processor time of the server, which what else runs on the machine disturbs less than the clock:
so a figure of one percent can be told from chance.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg

from tests.benchmarks.harness import Bench, Target, alternate, run
from tests.benchmarks.publish import drop_streams
from tests.benchmarks.server_cpu import nanoseconds

# Each as it is where it changes nothing: no limit is reached, no message fails or expires.
SETTINGS: dict[str, dict[str, Any]] = {
    "backoff": {"backoff": "exponential", "max_deliver_count": 5},
    "keep_history": {"keep_history": "1 day"},
    "max_backlog": {"max_backlog": 10_000_000},
    "max_in_flight": {"max_in_flight": 10_000_000},
    "rate_limit": {"rate_limit": 10_000_000, "rate_interval": "1 s"},
    "per_key_limit": {"per_key_limit": 1_000_000},
    "per_key_interval": {"per_key_interval": "1 s", "per_key_burst": 1_000_000},
    "per_key_capacity": {"per_key_capacity": 1_000_000},
    "fair": {"fair": True},
}
KEYS = 5000
SEND = """
select count(*) from pgqueue.send_batch(%s, array_fill('x'::text, array[%s]),
    (select array_agg('key ' || g %% {keys}) from generate_series(1, %s) g),
    p_expires_at => clock_timestamp() + %s::interval)
"""


@dataclass(frozen=True)
class Side:
    """A consumer that claims and acknowledges all of a stream.

    Attributes:
        stream: made for it.
        settings, topic, ordering: of the consumer.
        expires: after how long its messages do; None: never.
        others: the consumers beside it, and their settings.
    """

    stream: str
    settings: dict[str, Any] = field(default_factory=dict)
    topic: str | None = None
    ordering: str = "none"
    expires: str | None = None
    others: dict[str, dict[str, Any]] = field(default_factory=dict)

    def create(self, conn: psycopg.Connection) -> None:
        run(
            conn,
            "select pgqueue.create_stream(%s, p_settings => %s)",
            (self.stream, '{"notify": false}'),
        )
        create = """select pgqueue.create_consumer(%s, %s, p_settings => %s, p_topic => %s,
                                                   p_ordering => %s)"""
        run(conn, create, (self.stream, "c", json.dumps(self.settings), self.topic, self.ordering))
        for name, settings in self.others.items():
            run(conn, create, (self.stream, name, json.dumps(settings), None, "none"))

    def block(self, conn: psycopg.Connection, size: int, count: int) -> float:
        """Claim `count` messages, `size` at a time; returns the seconds of the server for one."""
        run(conn, SEND.format(keys=KEYS), (self.stream, count, count, self.expires))
        pid = conn.info.backend_pid
        began, got = nanoseconds(pid), 0
        receive = "select * from pgqueue.receive(%s, 'c', %s)"
        while got < count:
            rows = run(conn, receive, (self.stream, size))
            if not rows:
                raise RuntimeError(f"{self.stream}: {count - got} of {count} did not come")
            run(conn, "select pgqueue.ack(%s)", (rows[0][0],))
            got += len(rows)
        taken = (nanoseconds(pid) - began) / 1e9
        for name in self.others:
            claim = "select pgqueue.ack(claim_id) from pgqueue.claim(%s, %s, 1000000)"
            while run(conn, claim, (self.stream, name)):
                pass
        return taken / count


def settings(bench: Bench) -> None:
    """Run all of it. Linux only: elsewhere nobody says what a process has computed."""
    plain = Side("plain")
    sides = [
        plain,
        # twice the same: what the figures differ by for no reason
        Side("no setting, another time"),
        Side("no setting, in a stream whose other consumers have all", others=SETTINGS),
        *(Side(name, value) for name, value in SETTINGS.items()),
        Side("ordering=key, beside which to see limits of keys", ordering="key"),
        Side("a filter that all pass", topic="#"),
        Side("messages that will expire", expires="1 day"),
    ]
    with bench.connect() as conn:
        for side in sides:
            side.create(conn)
        for size, claims in {1: 100, 10: 50, 100: 20}.items():
            run(conn, "vacuum")
            block = {side.stream: partial(side.block, conn, size, size * claims) for side in sides}
            taken = alternate(block, 5 if bench.quick else 15, warm_up=2)
            for side in sides[1:]:
                bench.report.ratio(
                    f"settings: the server's work for a message, in claims of {size}, acknowledged;"
                    " against a consumer without any (1: it costs nothing)",
                    side.stream,
                    taken[side.stream],
                    taken[plain.stream],
                    "us",
                    target=Target(0.95) if side.stream.startswith("no setting") else None,
                )
        drop_streams(conn)
