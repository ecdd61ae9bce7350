"""The rounds of the long run: send and kill, let all be worked off, judge, and add to the tally."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pyspark

from spark_pgqueue.postgres import connection
from tests.endure import judge, tally
from tests.endure.kills import ITSELF, RENEWED, Killer
from tests.endure.world import KEPT, Notes, World
from tests.sql import checker

PATIENCE = 600.0
"""Seconds in which nothing goes on; then the judge finds what is missing."""

RENEW_AFTER = 3
"""After so many rounds, the queries begin with new checkpoints."""

LEFT = 1000  # messages that a stream keeps between two rounds


class Run:
    """Rounds in a world.

    Args:
        world: the servers and processes.
        seconds: for which a round sends and kills.
        pause: the longest time between two kills, in seconds.
        seed: for the kinds of kills.
        file: of the tally.
        renew_after: rounds of a checkpoint.
    """

    def __init__(
        self,
        world: World,
        seconds: float,
        pause: float,
        seed: int,
        file: Path = tally.FILE,
        renew_after: int = RENEW_AFTER,
    ):
        self._world, self._seconds, self._pause, self._file = world, seconds, pause, file
        self._renew_after = renew_after
        self._notes = Notes(world.home / "kills")
        self._killer = Killer(world, seed, self._notes.kills)
        (postgres,) = world.statements.row("show server_version")
        self._about = tally.about(postgres.split()[0], pyspark.__version__)
        self._since = time.monotonic()
        self.kills = 0
        self.sent = 0
        if tally.has(world.name, self._number(), file):  # the run was killed just then
            self._clear(self._number())
        if world.was_killed:
            self._note(ITSELF)

    def round(self) -> judge.Judgement:
        """A round, and what the judge says of it."""
        self._since = time.monotonic()
        self._kill(time.monotonic() + self._seconds)
        self._world.stop_producers()
        self._world.set_clock(0)
        self._drain()
        judgement = self._judge()
        self._note()
        number = self._number()
        tally.add(
            self._about, self._world.name, number, judgement,
            self._notes.kills, self._notes.seconds, self._file,
        )  # fmt: skip
        self.sent += judgement.sent
        self._show(number, judgement)
        if judgement.ok:
            self._clear(number)
        return judgement

    def _number(self) -> int:
        return self._world.statements.row("select round from endure.state")[0]

    def _note(self, kind: str | None = None) -> None:
        now = time.monotonic()
        self._notes.add(now - self._since, kind)
        self._since = now
        self.kills += kind is not None

    def _kill(self, until: float) -> None:
        while (now := time.monotonic()) < until:
            self._world.keep_up()
            time.sleep(min(random.uniform(0, self._pause), until - now))
            if kind := self._killer.kill():
                self._note(kind)

    def _drain(self) -> None:
        """Let everything be worked off, as long as it goes on."""
        before, since = 0, time.monotonic()
        while time.monotonic() < since + PATIENCE:
            self._world.keep_up(producers=False)
            with connection.connect(self._world.url) as conn:
                left = judge.left(conn)
            if left == 0:
                return
            if left != before:
                before, since = left, time.monotonic()
            time.sleep(0.5)

    def _judge(self) -> judge.Judgement:
        with connection.connect(self._world.url) as conn:
            judge.read_outputs(conn)
            return judge.judge(conn)

    def _show(self, number: int, judgement: judge.Judgement) -> None:
        kills = sum(self._notes.kills.values())
        wrong = "" if judgement.ok else f": WRONG: {judgement}"
        print(
            f"round {number}: {judgement.sent:,} messages, {kills} kills,"
            f" {judgement.replayed} micro-batches replayed, {self._notes.seconds:.0f} s{wrong}",
            flush=True,
        )

    def _clear(self, number: int) -> None:
        """Forget the round, look whether the queue is as it must be, and begin the next."""
        self._world.keep(LEFT)
        with connection.connect(self._world.url) as conn:
            conn.execute("call pgqueue.maintain_all()")
            checker.check(conn)
            judge.begin_next_round(conn)
        self._notes.clear()
        self._world.keep(KEPT)
        if number % self._renew_after == 0:
            self._world.renew_checkpoints()
            self._note(RENEWED)


def put_aside(home: Path) -> Path:
    """Keep what a finding left, and let the next run begin anew; returns where it is."""
    number = 1
    while (place := home.with_name(f"{home.name}-finding-{number}")).exists():
        number += 1
    shutil.move(home, place)
    return place
