"""Let sessions go on by one step at a time, in an order that somebody else chooses.

Each session has a thread and a connection. Before each step (see `instrument`) its backend writes
the step's number into one pipe, and waits for the end of another: so a step costs no polling. A
session that neither comes to its next step nor ends its call waits for a lock, as `pg_locks` says.
Then others go on; the session goes on by itself when it gets the lock.
"""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row

from spark_pgqueue.postgres import connection
from tests.explore.instrument import NOTHING, OPEN, Footprint, Footprints, Step

PATIENCE = 20.0  # seconds until a session that says nothing is taken for stuck


@dataclass(frozen=True)
class Call:
    """A call of a session: its SQL, and the placeholders' values at that moment."""

    name: str
    text: str
    values: Callable[[], list[Any]] = list
    note: Callable[[list[Any]], None] | None = None  # told of the rows, once they are committed


@dataclass(frozen=True)
class Transaction:
    """Calls that a session makes in one transaction, and how the transaction ends."""

    calls: tuple[Call, ...]
    end: str = "commit"  # or rollback, or kill: its backend is ended


@dataclass(frozen=True)
class Event:
    """A step that a session took."""

    actor: int
    what: str
    footprint: Footprint
    ends: str = ""  # how a transaction ended with this step

    def depends(self, other: Event) -> bool:
        """Whether the order of two steps of two sessions can change what either sees."""
        if self.ends and other.ends:
            return False
        if self.ends or other.ends:
            end, step = (self, other) if self.ends else (other, self)
            held, by = end.footprint, step.footprint
            if held.locks & (by.locks | by.shares | by.looks):
                return True
            if held.shares & (by.locks | by.looks):
                return True
            if held.ddl & by.touches or held.inserts & by.ddl:
                return True
            shown = held.inserts | held.locks | held.ddl
            return end.ends == "commit" and bool(
                shown & (by.reads | by.locks) or held.inserts & by.inserts & UNIQUE_INSERTS
            )
        return self.footprint.conflicts(other.footprint)


UNIQUE_INSERTS = frozenset({"dedup_keys", "consumers", "streams", "consumer_settings"})


@dataclass
class Outcome:
    """How a call ended."""

    actor: int
    name: str
    rows: list[Any] | None = None
    error: psycopg.Error | None = None


@dataclass
class Actor:
    """A session, and where it is."""

    number: int
    pipe: Path
    url: str
    jobs: queue.Queue[Callable[[], Any] | None] = field(default_factory=queue.Queue)
    state: str = "idle"  # paused, running, blocked, idle (between two calls), finished
    step: int = 0  # before which it is paused
    slept: bool = False  # it waits for others by trying again
    program: list[Any] = field(default_factory=list)  # what is left: calls, and ends
    held: Footprint = NOTHING  # what its transaction did
    item: Any = None  # of the program, at which it is
    failed: bool = False
    outcome: Any = None
    notes: list[Callable[[], None]] = field(default_factory=list)

    def open(self, wake: int) -> None:
        for name in (".at", ".go"):
            path = self.pipe.with_suffix(name)
            os.mkfifo(path)
            path.chmod(0o666)  # (the server may be another user's)
        self.at = os.open(f"{self.pipe}.at", os.O_RDWR | os.O_NONBLOCK)
        self.wake = wake
        self.connect()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def go(self) -> None:
        """Let the session leave its pause."""
        with self.pipe.with_suffix(".go").open("w"):
            pass

    def connect(self) -> None:
        self.conn = connection.connect(self.url)
        self.conn.execute(
            "select set_config('explore.pipe', %s, false), set_config('deadlock_timeout', '30ms',"
            " false), set_config('lock_timeout', '0', false), setseed(0.5)",
            [str(self.pipe)],
        )
        self.pid = self.conn.info.backend_pid

    def work(self) -> None:
        while job := self.jobs.get():
            try:
                self.outcome = job()
            except psycopg.Error as error:
                self.outcome = error
            os.write(self.wake, bytes([self.number]))

    def close(self) -> None:
        self.jobs.put(None)
        self.conn.close()
        os.close(self.at)


class Scheduler:
    """Sessions of one database, of which one goes on at a time."""

    def __init__(
        self, url: str, folder: Path, actors: int, steps: dict[int, Step], footprints: Footprints
    ):
        self.steps, self.footprints = steps, footprints
        self.watcher = connection.connect(url)
        self.awake, wake = os.pipe()
        os.set_blocking(self.awake, False)
        self.actors = [Actor(n, folder / f"session{n}", url) for n in range(actors)]
        for actor in self.actors:
            actor.open(wake)
        self.wake = wake
        self.taken = 0  # steps in all

    def close(self) -> None:
        for actor in self.actors:
            actor.close()
        self.watcher.close()
        os.close(self.awake)
        os.close(self.wake)

    def run(
        self,
        programs: list[list[Transaction]],
        choose: Callable[[list[Event], int], int],
        committed: Callable[[Outcome], None],
        after_end: Callable[[], None],
    ) -> list[Event]:
        """Run programs, one step at a time. `choose` gets the next event of each enabled session
        and says the position of its choice; `committed` gets each call that was committed or
        failed; `after_end` is called after each end of a transaction.
        """
        trace: list[Event] = []
        for actor in self.actors:
            actor.program, actor.state, actor.held = [], "finished", NOTHING
            actor.failed, actor.slept, actor.notes = False, False, []
        for actor, program in zip(self.actors, programs, strict=False):
            for transaction in program:
                actor.program += [*transaction.calls, transaction.end]
            actor.state = "idle"
        while True:
            awake = [a for a in self.actors if a.state in {"paused", "idle"}]
            able = [a for a in awake if not a.slept] or awake
            if not able:
                if not any(a.state == "blocked" for a in self.actors):
                    return trace
                self.settle(await_blocked=True)  # a deadlock: Postgres ends it
                continue
            events = [self.next_event(a) for a in able]
            place = choose(events, len(trace))
            event, actor = events[place], able[place]
            trace.append(event)
            self.taken += 1
            self.take(actor, committed)
            if event.ends:
                for other in self.actors:
                    other.slept = False
                after_end()

    def next_event(self, actor: Actor) -> Event:
        if actor.state == "paused":
            step = self.steps[actor.step]
            return Event(actor.number, f"{step.function}:{step.number}", step.footprint)
        item = actor.program[0]
        if isinstance(item, str):
            return Event(actor.number, item, actor.held, "rollback" if actor.failed else item)
        return Event(actor.number, item.name, self.footprint(item))

    def footprint(self, call: Call) -> Footprint:
        """What a call does before its first pause."""
        return self.footprints.of(call.text) | Footprint(shares=frozenset({OPEN}))

    def take(self, actor: Actor, committed: Callable[[Outcome], None]) -> None:
        self.committed = committed
        if actor.state == "paused":
            actor.held |= self.steps[actor.step].footprint
            actor.slept = actor.step == 0
            actor.state = "running"
            actor.go()
        else:
            item = actor.program.pop(0)
            actor.item = item
            actor.state = "running"
            if isinstance(item, str):
                actor.jobs.put(lambda: self.end(actor, item))
            else:
                actor.held |= self.footprint(item)
                actor.jobs.put(lambda: self.call(actor, item))
        self.settle()

    def call(self, actor: Actor, call: Call) -> list[Any]:
        if actor.conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
            actor.conn.execute("begin")
        cursor = actor.conn.cursor(row_factory=namedtuple_row)
        cursor.execute(call.text.encode(), call.values())
        return [] if cursor.description is None else cursor.fetchall()

    def end(self, actor: Actor, how: str) -> None:
        if how == "kill":
            self.kill(actor)
        else:
            actor.conn.execute(b"rollback" if actor.failed else how.encode())

    def kill(self, actor: Actor) -> None:
        with connection.connect(actor.url) as conn:
            conn.execute("select pg_terminate_backend(%s, 5000)", [actor.pid])
        actor.conn.close()
        actor.connect()

    def stop(self) -> None:
        """End what sessions are at, whatever it is."""
        for actor in self.actors:
            while actor.state in {"paused", "running", "blocked"}:
                if actor.state == "paused":
                    self.watcher.execute("select pg_cancel_backend(%s)", [actor.pid])
                    actor.state = "running"
                    actor.go()
                self.hear(0.01)
                if actor.state == "blocked":
                    self.watcher.execute("select pg_cancel_backend(%s)", [actor.pid])
                    actor.state = "running"
            actor.conn.rollback()
            actor.state, actor.program = "finished", []

    def settle(self, await_blocked: bool = False) -> None:
        """Wait until each session is at its next step, idle, or blocked."""
        end = time.monotonic() + PATIENCE
        while True:
            blocked = [a for a in self.actors if a.state == "blocked"]
            if blocked:
                waiting = self.waiting(blocked)
                for actor in blocked:
                    if actor.pid not in waiting:
                        actor.state = "running"
            running = [a for a in self.actors if a.state == "running"]
            if not running and not (await_blocked and blocked):
                return
            heard = self.hear(0.003)
            await_blocked = await_blocked and not heard
            if not heard and running:
                waiting = self.waiting(running)
                for actor in running:
                    if actor.pid in waiting and not self.hear(0):
                        actor.state = "blocked"
            assert time.monotonic() < end, [(a.state, a.step, a.program) for a in self.actors]

    def waiting(self, actors: list[Actor]) -> set[int]:
        """The backends that wait for a lock."""
        rows = self.watcher.execute(
            "select distinct pid from pg_locks where not granted and pid = any(%s)",
            [[a.pid for a in actors]],
        )
        return {pid for (pid,) in rows}

    def hear(self, seconds: float) -> bool:
        """Note what sessions say within some time; whether any said something."""
        files = [self.awake, *(a.at for a in self.actors)]
        ready, _, _ = select.select(files, [], [], seconds)
        for file in ready:
            if file == self.awake:
                for number in os.read(file, 100):
                    self.ended(self.actors[number])
                continue
            actor = next(a for a in self.actors if a.at == file)
            actor.step = int(os.read(file, 100))
            actor.state = "paused"
        return bool(ready)

    def ended(self, actor: Actor) -> None:
        """A call of a session, or its transaction, is over."""
        item, outcome, notes = actor.item, actor.outcome, actor.notes
        error = outcome if isinstance(outcome, psycopg.Error) else None
        if isinstance(item, str):
            if item != "commit" or actor.failed or error is not None:
                notes = []
            actor.notes, actor.held, actor.failed = [], NOTHING, False
        else:
            if error is not None:
                actor.failed = True
                while not isinstance(actor.program[0], str):
                    actor.program.pop(0)
            elif item.note is not None:
                actor.notes.append(lambda: item.note(outcome))
            notes = []
        actor.state = "idle" if actor.program else "finished"
        if error is not None:
            self.committed(Outcome(actor.number, str(getattr(item, "name", item)), error=error))
        for note in notes:
            note()
