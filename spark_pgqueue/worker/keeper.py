"""Keeps a worker's claims: makes, extends and settles them, and gives back what is left.

One thread has the connection. Whoever calls the handler only takes jobs from the board and puts
reports there, so that a message costs no statement of its own: what was done is settled every few
milliseconds, by claim; and a claim that is done as a whole is acknowledged by the call that makes
the next one.
"""

from __future__ import annotations

import time
from functools import partial
from threading import Event

import psycopg

from spark_pgqueue.client.client import Client, make_statements
from spark_pgqueue.client.results import Claim
from spark_pgqueue.client.waiting import ASK_AGAIN, Waiting
from spark_pgqueue.postgres.errors import PgQueueError, sqlstate_of
from spark_pgqueue.postgres.retrying import is_passing
from spark_pgqueue.postgres.wake import Wake
from spark_pgqueue.printable import warn
from spark_pgqueue.worker.attempts import Hooks
from spark_pgqueue.worker.board import Board, Job
from spark_pgqueue.worker.crew import Crew
from spark_pgqueue.worker.hand import Held
from spark_pgqueue.worker.options import Options
from spark_pgqueue.worker.verdicts import Fate, Retry

SETTLE_EVERY = 0.005
"""Seconds from one settling to the next: what was handled and is not settled is handled again if
the worker is killed."""

AHEAD = 0.1
"""Seconds: as many messages are claimed ahead as will be begun within this time."""

_SOON = 0.01  # seconds until it looks again where it found less than it wanted
_NEVER = float("inf")
_LOGGER = "spark_pgqueue.worker"

# Somebody kept a lock for long, a deadlock: of one statement.
_ONCE_MORE = ("55P03", "40P01", "40001")


def _passes(error: Exception) -> bool:
    """Whether it makes sense to try again."""
    return is_passing(error) or sqlstate_of(error) in _ONCE_MORE


class Keeper:
    """The thread that has the connection, by its `run`.

    Args:
        url: the database.
        stream: the stream's name.
        consumer: the consumer's name.
        options: those of the worker.
        hooks: called for what was given up.
        board: where the jobs and reports are.
        wake: what wakes it, by the board among others.
        patience: seconds to go on trying to connect for at first; later it does not end.
    """

    def __init__(
        self,
        url: str | None,
        stream: str,
        consumer: str,
        options: Options,
        hooks: Hooks,
        board: Board,
        wake: Wake,
        patience: float,
    ):
        self.handled: int = 0
        self._url = url
        self._stream = stream
        self._consumer = consumer
        self._options = options
        self._hooks = hooks
        self._board = board
        self._wake = wake
        self._patience = patience
        self._stopped = Event()
        self._grace = options.grace.total_seconds()
        self._claims: set[Held] = set()
        self._jobs: set[Job] = set()  # that are not over
        self._suspect: Held | None = None  # nothing is worked on beside this claim ...
        self._aside: list[Job] = []  # ... whose jobs wait until that is so
        self._call_takes: float | None = None  # seconds
        self._settle_at = self._look_at = 0.0
        self._is_short = False  # the last look found less than it wanted
        self._has_heard = True
        self._is_last_resort = False  # the next look is that of each second
        self._idle_since = 0.0
        self._stop_by = _NEVER

    def stop(self, grace: float | None = None) -> None:
        """Begin nothing more, from another thread or a handler of a signal."""
        if grace is not None:
            self._grace = grace
        self._stopped.set()
        self._wake.set()

    def run(self, crew: Crew) -> None:
        """Work until it is stopped, or has waited long enough.

        Raises:
            PgQueueError: the first connection could not be made, or something else is wrong than
                the connection. What is in hand is then given back, if that is possible.
        """
        self._crew = crew
        self._statements = make_statements(url=self._url, patience=0)
        try:
            self._begin()
            self._keep_on()
        finally:
            self._board.close()
            crew.end()
            self._statements.close()

    def _begin(self) -> None:
        began, pause = time.monotonic(), 0.1
        while True:
            try:
                self._client = Client(self._statements.connection(), _statements=self._statements)
                self._waiting = Waiting(self._statements, self._wake)
                self._ordering, timeout, self._keeps_results = self._statements.row(
                    "select ordering, visibility_timeout, keeps_history"
                    " from pgqueue.open_consumer(%s::text, %s::text)",
                    [self._stream, self._consumer],
                )
                break
            except (PgQueueError, psycopg.Error) as error:
                late = time.monotonic() > began + self._patience
                if late or self._stopped.is_set() or not _passes(error):
                    raise
                self._wait_for_postgres(error, pause)
                pause = min(2 * pause, 2.0)
        self._due = partial(self._client._due, self._stream, self._consumer)
        self._timeout = (self._options.visibility_timeout or timeout).total_seconds()
        self._slots = 1 if self._ordering == "stream" else self._options.slots
        self._crew.start()
        if self._options.on_start is not None:
            self._options.on_start()
        self._idle_since = time.monotonic()

    def _keep_on(self) -> None:
        pause = 0.1
        while not self._is_over():
            try:
                self._step()
                pause = 0.1
            except (PgQueueError, psycopg.Error) as error:
                if not _passes(error):
                    self._give_all_back()
                    raise
                if time.monotonic() > self._stop_by:
                    warn("not settled, Postgres is away: %s", error, logger=_LOGGER)
                    return
                self._wait_for_postgres(error, pause)
                pause = min(2 * pause, 2.0)

    def _wait_for_postgres(self, error: Exception, pause: float) -> None:
        if pause == 0.1:
            warn("%s; trying again", getattr(error, "message", error), logger=_LOGGER)
        for held in self._claims:  # what the outage has left of them is told first
            held.extend_at = 0.0
        self._wake.clear()
        self._wake.wait(min(pause, max(self._stop_by - time.monotonic(), 0.0)))

    def _is_over(self) -> bool:
        """Whether it was stopped, and everything is settled."""
        return self._stop_by < _NEVER and not self._claims

    def _step(self) -> None:
        """Do what is due, and wait for the next thing to do."""
        self._collect()
        now = time.monotonic()
        self._stop_if_due(now)
        self._give_up_overdue(now)
        self._extend(now)
        self._settle_and_claim(now)
        self._look_after_suspect(now)
        if not self._is_over():
            self._rest()

    def _collect(self) -> None:
        """Take note of what the slots report."""
        reports = self._board.reports
        seconds, calls = 0.0, 0
        while reports:
            report = reports.popleft()
            self.handled += report.job.claim.note(report.messages, report.outcome)
            if report.seconds is not None:
                seconds += report.seconds
                calls += 1
            if report.has_ended:
                self._jobs.discard(report.job)
        if calls:
            mean = seconds / calls
            before = self._call_takes
            self._call_takes = mean if before is None else 0.7 * before + 0.3 * mean

    def _stop_if_due(self, now: float) -> None:
        """Begin to stop, or end it when the running calls have had their time."""
        if self._claims:
            self._idle_since = now
        wait = self._options.wait
        is_over = wait is not None and now - self._idle_since >= wait.total_seconds()
        if is_over and self._look_at > now:  # a look found nothing, not long ago
            self._stopped.set()
        if not self._stopped.is_set():
            return
        if self._stop_by == _NEVER:
            self._stop_by = now + self._grace
            self._board.close()
            self._take_back(self._board.take_back() + self._aside)
            self._aside = []
        self._stop_by = min(self._stop_by, now + self._grace)  # it may be less by now
        if now >= self._stop_by and self._jobs:
            warn("%s calls of the handler were not over", len(self._jobs), logger=_LOGGER)
            self._jobs.clear()
            for held in self._claims:
                held.give_up()

    def _take_back(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._jobs.discard(job)
            for messages in job.calls:
                job.claim.note(messages, Fate.unstarted)

    def _give_up_overdue(self, now: float) -> None:
        for job, messages in self._crew.give_up(now):
            verdict = Retry(reason=f"timed out after {self._options.timeout}")
            self.handled += job.claim.note(messages, verdict)
            self._hooks.after(messages, verdict, verdict)
            self._jobs.discard(job)
            for rest in job.calls:  # which the queue takes back with it
                job.claim.note(rest, Fate.gone)

    def _extend(self, now: float) -> None:
        """Extend the claims of which a third of the time is over."""
        for held in [held for held in self._claims if held.extend_at <= now]:
            if now - held.claimed_at >= self._timeout / 3 and (
                waiting := self._board.take_back(held)
            ):
                # Claimed to be begun at once; while calls here take so long, others may do that.
                self._take_back(waiting)
                self._call_takes = max(self._call_takes or 0.0, self._timeout / 3)
            if self._client.extend(held.claim_id, self._options.visibility_timeout) > 0:
                held.hold(now, self._timeout)
                continue
            warn("claim %s is another worker's now", held.claim_id, logger=_LOGGER)
            self._take_back(self._board.take_back(held))
            held.forget()
            self._claims.discard(held)

    def _settle_and_claim(self, now: float) -> None:
        left = {held for held in self._claims if not held.is_over}
        if left != self._claims:  # settled by the transactions of the calls
            self._look_at = now
        self._claims = left
        news = [held for held in self._claims if held.has_news]
        settles = bool(news) and (now >= self._settle_at or self._stopped.is_set())
        wanted = self._wanted()
        if settles and (self._is_short or self._ordering != "none" or any(
            held.has_returns for held in news
        )):  # fmt: skip
            self._look_at = now  # what is settled may let something be claimed
            self._has_heard = True
        looks = wanted > 0 and now >= self._look_at
        done: Held | None = None
        if settles:
            done = next((held for held in news if held.is_done), None) if looks else None
            for held in news:
                if held is not done:
                    held.settle(self._client)
            self._claims = {held for held in self._claims if not held.is_over}
            self._settle_at = time.monotonic() + SETTLE_EVERY
        if looks:
            self._claim(wanted, done)

    def _look_after_suspect(self, now: float) -> None:
        """Begin a claim that may kill the worker when there is no other one, and then go on."""
        if self._suspect is None:
            return
        if self._suspect not in self._claims:
            self._take_back(self._aside)
            self._suspect, self._aside, self._look_at = None, [], now
        elif self._aside and self._claims == {self._suspect}:
            self._board.put(self._aside)
            self._aside = []
            self._crew.feed()

    def _wanted(self) -> int:
        """How many messages to claim now; at most 0 for none."""
        if self._stopped.is_set() or self._suspect is not None:
            return 0
        each = self._options.batch or 1
        ahead = 0
        if self._call_takes is not None:
            soon = self._slots * AHEAD / max(self._call_takes, 1e-6)
            ahead = int(min(soon, self._options.prefetch / each))
        idle = self._slots - len(self._jobs)
        if self._options.batch is not None:
            return each if idle + ahead > 0 else 0
        room = self._slots + ahead - sum(held.open_count for held in self._claims)
        if idle <= 0 and room <= ahead / 2:
            return 0  # not many small claims
        return max(room, idle)

    def _claim(self, wanted: int, done: Held | None) -> None:
        """Claim messages, and acknowledge a claim that is done in the same statement."""
        self._waiting.forget(self._stream)
        now = time.monotonic()
        claim = self._client.receive(
            self._stream,
            self._consumer,
            wanted,
            visibility_timeout=self._options.visibility_timeout,
            ack=None if done is None else done.claim_id,
        )
        if done is not None:
            done.forget()
            self._claims.discard(done)
        if claim is None:
            until = self._waiting.until_due(self._stream, self._due)
            self._look_at = time.monotonic() + until
            self._is_short, self._is_last_resort = False, until >= ASK_AGAIN
            return
        held = Held(
            claim,
            now,
            is_batch=self._options.batch is not None,
            is_undone=self._options.transactional,
            keeps_results=self._keeps_results,
        )
        held.hold(now, self._timeout)
        jobs = [Job(held, calls) for calls in held.calls(self._ordering)]
        self._claims.add(held)
        self._jobs.update(jobs)
        self._suspect, self._aside = held, jobs  # until it is known; also if Postgres goes away now
        if not self._is_suspected(claim):
            self._suspect, self._aside = None, []
            self._board.put(jobs)
            self._crew.feed()
        self._is_short = self._ordering == "none" and len(claim.messages) < wanted
        self._look_at = now + (_SOON if self._is_short else 0.0)
        self._waiting.note_messages(self._stream)
        if not self._has_heard:
            self._has_heard = True
            self._waiting.doubt(self._stream)

    def _is_suspected(self, claim: Claim) -> bool:
        """Whether it may kill the worker: then all that is in hand would look as if it had."""
        if all(message.deliver_count == 1 for message in claim.messages):
            return False
        (suspected,) = self._statements.row("select pgqueue.is_suspected(%s)", [claim.claim_id])
        return suspected

    def _rest(self) -> None:
        """Wait until there is something to do."""
        now = time.monotonic()
        has_news = any(held.has_news for held in self._claims)
        wanted = self._wanted()
        times = [held.extend_at for held in self._claims]
        times += [self._settle_at] if has_news else []
        times += [self._look_at] if wanted > 0 else []
        times += [timeout] if (timeout := self._crew.next_timeout()) is not None else []
        times += [self._stop_by] if self._jobs else []
        wait = self._options.wait
        times += (
            [self._idle_since + wait.total_seconds()]
            if wait is not None and not self._claims
            else []
        )
        seconds = min(times, default=_NEVER) - now
        few = -1
        if wanted <= 0 and len(self._board.todo) > 1:
            few = len(self._board.todo) // 2
        if seconds > 0 and self._board.arm(few, not has_news):
            seconds = min(seconds, ASK_AGAIN)
            is_dry = wanted > 0 and not self._is_short
            if is_dry and self._look_at > now:
                if self._waiting.pause(self._stream, seconds):
                    self._look_at = 0.0
                elif self._is_last_resort and time.monotonic() >= self._look_at:
                    self._has_heard = False  # what is found now should have been notified
            else:
                self._wake.wait(seconds)
        self._board.disarm()
        self._wake.clear()

    def _give_all_back(self) -> None:
        """Give back what is in hand, if that is possible."""
        self._board.close()
        self._collect()
        for held in self._claims:
            held.give_up()
            try:
                held.settle(self._client)
            except (PgQueueError, psycopg.Error) as error:
                warn("claim %s is not given back: %s", held.claim_id, error, logger=_LOGGER)
