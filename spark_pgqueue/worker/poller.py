"""The poller of a worker: it makes, extends and settles claims, and returns the rest at the end.

One thread has the connection. The threads that call the handler only take jobs from the queue and
put reports there, so a message needs no statement of its own. Every few milliseconds the poller
settles the reported outcomes, by claim. A claim whose messages are all done is acknowledged by the
statement that makes the next claim. After such a statement has failed, the next acknowledgements
are separate statements: an error that prevents a claim must not prevent acknowledgements.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import psycopg

from spark_pgqueue.client.client import Client, make_statements
from spark_pgqueue.client.long_poll import ASK_AFTER, ASK_AGAIN, LongPoll
from spark_pgqueue.client.messages import Claim
from spark_pgqueue.postgres import clock
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.retrying import is_worth_a_retry
from spark_pgqueue.postgres.time_limit import SHORT
from spark_pgqueue.postgres.wake_event import WakeEvent
from spark_pgqueue.printable import counted
from spark_pgqueue.worker.attempts import name_of
from spark_pgqueue.worker.executor import Executor
from spark_pgqueue.worker.failure_log import FailureLog
from spark_pgqueue.worker.health import STARTING, Pulse
from spark_pgqueue.worker.in_flight import InFlightClaim
from spark_pgqueue.worker.job_queue import Job, JobQueue
from spark_pgqueue.worker.log import warn
from spark_pgqueue.worker.meter import Meter
from spark_pgqueue.worker.options import Options
from spark_pgqueue.worker.verdicts import DeliveryState

SETTLE_EVERY = 0.005
"""Seconds between two settlings. If the worker is killed, messages that were handled and not yet
settled are delivered again."""

AHEAD = 0.1
"""Seconds. The poller claims as many messages ahead as the slots will begin within this time."""

_SOON = 0.01  # seconds until the next claim, after one with fewer messages than wanted
_NEVER = float("inf")


class Poller:
    """The thread that has the connection, by its `run`.

    Args:
        url: the database.
        stream: the stream's name.
        consumer: the consumer's name.
        options: the worker's options.
        of: the stream and the consumer, for the log.
        queue: holds the jobs and reports.
        wake: wakes the poller; set by the queue, among others.
        patience: seconds to try for the first connection. Later connections are tried without end.
        meter: counts what the handler does.
    """

    def __init__(
        self,
        url: str | None,
        stream: str,
        consumer: str,
        options: Options,
        of: str,
        queue: JobQueue,
        wake: WakeEvent,
        patience: float,
        meter: Meter,
    ):
        self.handled: int = 0
        self.pulse: Pulse = Pulse()
        self._meter = meter
        self._failures = FailureLog(stream, consumer)
        self._url = url
        self._stream = stream
        self._consumer = consumer
        self._options = options
        self._of = of
        self._queue = queue
        self._wake = wake
        self._patience = patience
        self._is_stopped = False  # an Event's lock would block a signal handler
        self._grace = options.grace.total_seconds()
        self._claims: set[InFlightClaim] = set()
        self._jobs: set[Job] = set()  # jobs that are not over
        self._suspect: InFlightClaim | None = None  # runs alone: it may kill the worker
        self._aside: list[Job] = []  # its jobs, until all other claims are settled
        self._mean_bytes = 0.0  # mean length of the data of a message, by the last claims
        self._call_takes: float | None = None  # mean duration of a call, in seconds
        self._settle_at = self._look_at = 0.0
        self._ask_at = _NEVER  # when to ask until when there is nothing to claim
        self._acks_alone = False  # the next acknowledgements are separate statements
        self._is_short = False  # the last claim had fewer messages than wanted
        self._is_dry = False  # the last claim found nothing
        self._has_heard = True
        self._is_last_resort = False  # the next claim is the one that is made each second
        self._idle_since = 0.0
        self._stop_by = _NEVER

    def stop(self, grace: float | None = None) -> None:
        """Begin no more messages. Called from another thread or from a signal handler."""
        if grace is not None:
            self._grace = grace
        self._is_stopped = self.pulse.is_stopping = True
        self._wake.set()

    def run(self, executor: Executor) -> None:
        """Work until `stop`, or until no message came for the time of option wait.

        Raises:
            PgQueueError: the first connection could not be made; or an error that is not about the
                connection. The messages in flight are then returned, if possible.
        """
        self._executor = executor
        self._statements = make_statements(url=self._url, patience=0, limit=SHORT)
        try:
            self._begin()
            self._poll()
        finally:
            self._meter.note_in_flight(self, 0)
            self._queue.close()
            executor.end()
            self._statements.close()

    def _begin(self) -> None:
        began, pause = clock.now(), 0.1
        while True:
            try:
                self._client = Client(self._statements.connection(), _statements=self._statements)
                self._long_poll = LongPoll(self._statements, self._wake)
                self._ordering, timeout, self._keeps_results = self._statements.row(
                    "select ordering, visibility_timeout, keeps_history"
                    " from pgqueue.open_consumer(%s::text, %s::text)",
                    [self._stream, self._consumer],
                )
                break
            except (PgQueueError, psycopg.Error) as error:
                late = clock.now() > began + self._patience
                if late or self._is_stopped or not is_worth_a_retry(error):
                    raise
                self._wait_for_postgres(error, pause)
                pause = min(2 * pause, 2.0)
        self._due = partial(self._client._due, self._stream, self._consumer)
        self._timeout = (self._options.visibility_timeout or timeout).total_seconds()
        self._slots = 1 if self._ordering == "stream" else self._options.slots
        self.pulse.status = STARTING
        self._executor.start()
        self._idle_since = clock.now()
        self.pulse.status = "working"

    def _poll(self) -> None:
        pause = 0.1
        while not self._is_over():
            try:
                self.pulse.beat()
                self._step()
                self.pulse.status = "working"
                pause = 0.1
            except (PgQueueError, psycopg.Error) as error:
                if not is_worth_a_retry(error):
                    self._give_all_back()
                    raise
                if clock.now() > self._stop_by:
                    warn("could not settle, Postgres is unavailable: %s", error)
                    return
                self._acks_alone, self._settle_at = True, 0.0
                self._wait_for_postgres(error, pause)
                pause = min(2 * pause, 2.0)
            except BaseException:  # a defect: the claims must not wait for their timeout
                self._give_all_back()
                raise
        with suppress(PgQueueError, psycopg.Error):  # all messages are settled
            self._failures.write(self._client, _NEVER)

    def _wait_for_postgres(self, error: Exception, pause: float) -> None:
        self.pulse.status = "waiting for Postgres"
        if pause == 0.1:
            warn("%s; trying again", error)
        for in_flight in self._claims:  # after the outage, extending finds the lost claims
            in_flight.extend_at = 0.0
        self._wake.clear()
        self._wake.wait(min(pause, max(self._stop_by - clock.now(), 0.0)))

    def _is_over(self) -> bool:
        """Whether the worker was stopped, and all claims are settled."""
        return self._stop_by < _NEVER and not self._claims

    def _step(self) -> None:
        """Do the work that is due, and wait until more is."""
        self._collect()
        now = clock.now()
        self._stop_if_due(now)
        self._give_up_overdue(now)
        self._extend(now)
        self._settle_and_claim(now)
        self._failures.write(self._client, now)
        self._look_after_suspect(now)
        self._meter.note_in_flight(self, sum(each.open_count for each in self._claims))
        if not self._is_over():
            self._rest()

    def _collect(self) -> None:
        """Record the outcomes that the slots report."""
        reports = self._queue.reports
        seconds, calls = 0.0, 0
        while reports:
            report = reports.popleft()
            self.handled += report.job.claim.note(report.messages, report.outcome)
            if report.seconds is not None:
                seconds += report.seconds
                calls += 1
                self._meter.note_call(report.messages, report.outcome, report.seconds)
            if report.has_ended:
                self._jobs.discard(report.job)
        if calls:
            mean = seconds / calls
            before = self._call_takes
            self._call_takes = mean if before is None else 0.7 * before + 0.3 * mean

    def _stop_if_due(self, now: float) -> None:
        """Begin to stop, or end the stop when the grace of the running calls is over."""
        wait = self._options.wait
        if self._claims:
            self._idle_since, is_over = now, False
        else:
            is_over = wait is not None and now - self._idle_since >= wait.total_seconds()
        if is_over and self._is_dry and self._look_at > now:  # the last claim was not long ago
            self._is_stopped = True
        if not self._is_stopped:
            return
        if self._stop_by == _NEVER:
            self._stop_by = now + self._grace
            self._queue.close()
            self._take_back(self._queue.take_back() + self._aside)
            self._aside = []
        # A second signal may have shortened the grace.
        self._stop_by = min(self._stop_by, now + self._grace)
        if now >= self._stop_by and self._jobs:
            calls = counted(len(self._jobs), "call", "calls")
            said = "%s did not finish within grace (%s s): the messages go back"
            warn(said, calls, f"{self._grace:g}")
            self._jobs.clear()
            for in_flight in self._claims:
                in_flight.give_up()

    def _take_back(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._jobs.discard(job)
            for messages in job.calls:
                job.claim.note(messages, DeliveryState.unstarted)

    def _give_up_overdue(self, now: float) -> None:
        for job, messages, verdict in self._executor.give_up(now):
            warn("%s: %s", name_of(self._of, messages), verdict.reason)
            job.note_failure(messages, verdict)
            self._jobs.discard(job)

    def _extend(self, now: float) -> None:
        """Extend the claims for which a third of the visibility timeout has passed."""
        for in_flight in [in_flight for in_flight in self._claims if in_flight.extend_at <= now]:
            if now - in_flight.claimed_at >= self._timeout / 3 and (
                waiting := self._queue.take_back(in_flight)
            ):
                # These messages should have begun by now. Another worker may be faster.
                self._take_back(waiting)
                self._call_takes = max(self._call_takes or 0.0, self._timeout / 3)
            if self._client.extend(in_flight.claim_id, self._options.visibility_timeout) > 0:
                in_flight.hold(now, self._timeout)
                continue
            warn("claim %s was taken over by another worker", in_flight.claim_id)
            self._take_back(self._queue.take_back(in_flight))
            in_flight.forget()
            self._claims.discard(in_flight)

    def _settle_and_claim(self, now: float) -> None:
        left = {in_flight for in_flight in self._claims if not in_flight.is_over}
        if left != self._claims:  # transactional handlers have settled them
            self._look_at = now
        self._claims = left
        news = [in_flight for in_flight in self._claims if in_flight.has_news]
        done = None
        if not self._acks_alone:
            done = next((in_flight for in_flight in news if in_flight.is_done), None)
        settles = bool(news) and (now >= self._settle_at or self._is_stopped)
        if settles and (self._is_short or self._ordering != "none" or any(
            in_flight.has_returns for in_flight in news
        )):  # fmt: skip
            self._look_at = now  # settling may have freed messages to claim
            self._has_heard = True
        wanted = self._wanted(settles and done is not None)
        if wanted > 0 and self._ask_at <= now < self._look_at:
            self._ask_at = _NEVER  # first: if this fails, the next step settles
            until = self._long_poll.until_due(self._stream, self._due)
            now = clock.now()  # from the answer on: an earlier claim would find nothing
            self._look_at, self._is_last_resort = now + until, until >= ASK_AGAIN
        looks = wanted > 0 and now >= self._look_at
        if settles:
            for in_flight in news:
                if in_flight is not done or not looks:
                    in_flight.settle(self._client, self._failures.note)
            self._claims = {in_flight for in_flight in self._claims if not in_flight.is_over}
            self._settle_at = clock.now() + SETTLE_EVERY
            self._acks_alone = False
        if looks:
            self._claim(wanted, done)

    def _look_after_suspect(self, now: float) -> None:
        """Begin the suspected claim when no other claim is left; resume when it is settled."""
        if self._suspect is None:
            return
        if self._suspect not in self._claims:
            self._take_back(self._aside)
            self._suspect, self._aside, self._look_at = None, [], now
        elif self._aside and self._claims == {self._suspect}:
            self._queue.put(self._aside)
            self._aside = []
            self._executor.feed()

    def _wanted(self, acks: bool = False) -> int:
        """How many messages to claim now; 0 or less for none.

        Args:
            acks: whether the claim saves a statement, because it acknowledges another claim.
        """
        if self._is_stopped or self._suspect is not None:
            return 0
        each = self._options.batch or 1
        ahead, share = 0, 1 / 2
        if self._call_takes is not None:
            soon = self._slots * AHEAD / max(self._call_takes, 1e-6)
            most = self._options.prefetch / each
            ahead = int(min(soon, most))
            if soon <= most:  # there is time to wait for a claim that is done soon
                share = 1 / 3 if acks else 2 / 3
        bytes_each = max(self._mean_bytes, 1.0) * each
        ahead = min(ahead, int(self._options.prefetch_bytes / bytes_each))
        idle = self._slots - len(self._jobs)
        if self._options.batch is not None:
            return each if idle + ahead > 0 else 0
        room = self._slots + ahead - sum(in_flight.open_count for in_flight in self._claims)
        if idle <= 0 and room <= ahead * share:
            return 0  # a later, larger claim is cheaper than many small ones
        return max(room, idle)

    def _claim(self, wanted: int, done: InFlightClaim | None) -> None:
        """Claim messages, and acknowledge a finished claim in the same statement."""
        self._long_poll.forget(self._stream)
        now = clock.now()
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
        self._is_dry, self._ask_at = claim is None, _NEVER
        if claim is None:
            now = clock.now()
            self._ask_at, self._look_at = now + ASK_AFTER, now + ASK_AGAIN
            self._is_short, self._is_last_resort = False, True
            return
        in_flight = InFlightClaim(
            claim,
            now,
            is_batch=self._options.batch is not None,
            is_undone=self._options.transactional,
            keeps_results=self._keeps_results,
        )
        in_flight.hold(now, self._timeout)
        mean = sum(len(each.data) for each in claim.messages) / len(claim.messages)
        self._mean_bytes = max(mean, 0.7 * self._mean_bytes + 0.3 * mean)
        jobs = [Job(in_flight, calls) for calls in in_flight.calls(self._ordering)]
        self._claims.add(in_flight)
        self._jobs.update(jobs)
        # It counts as suspected until the answer, also if Postgres goes away now.
        self._suspect, self._aside = in_flight, jobs
        if not self._is_suspected(claim):
            self._suspect, self._aside = None, []
            self._queue.put(jobs)
            self._executor.feed()
        self._is_short = self._ordering == "none" and len(claim.messages) < wanted
        self._look_at = now + (_SOON if self._is_short else 0.0)
        self._long_poll.note_messages(self._stream)
        if not self._has_heard:
            self._has_heard = True
            self._long_poll.doubt(self._stream)

    def _is_suspected(self, claim: Claim) -> bool:
        """Whether the claim may kill the worker. If it runs alone, no other claim in flight is
        suspected then.
        """
        if all(message.deliver_count == 1 for message in claim.messages):
            return False
        (suspected,) = self._statements.row("select pgqueue.is_suspected(%s)", [claim.claim_id])
        return suspected

    def _rest(self) -> None:
        """Wait until there is something to do."""
        now = clock.now()
        has_news = any(in_flight.has_news for in_flight in self._claims)
        wanted = self._wanted()
        times = [in_flight.extend_at for in_flight in self._claims]
        times += [self._settle_at] if has_news else []
        times += [self._look_at, self._ask_at] if wanted > 0 else []
        times += [timeout] if (timeout := self._executor.next_timeout()) is not None else []
        times += [self._stop_by] if self._jobs else []
        times += [self._failures.due_at]
        wait = self._options.wait
        if wait is not None and self._is_dry and not self._claims:
            times.append(self._idle_since + wait.total_seconds())
        seconds = min(times, default=_NEVER) - now
        few = -1
        if wanted <= 0 and len(self._queue.todo) > 1:
            few = len(self._queue.todo) // 2
        if seconds > 0 and self._queue.arm(few, not has_news):
            seconds = min(seconds, ASK_AGAIN)
            is_dry = wanted > 0 and not self._is_short
            if is_dry and self._look_at > now:
                if self._long_poll.pause(self._stream, seconds):
                    self._look_at = 0.0
                elif self._is_last_resort and clock.now() >= self._look_at:
                    self._has_heard = False  # no notification came for messages found now
            else:
                self._wake.wait(seconds)
        self._queue.disarm()
        self._wake.clear()

    def _give_all_back(self) -> None:
        """Return the messages in flight, if possible."""
        self._queue.close()
        self._collect()
        for in_flight in self._claims:
            in_flight.give_up()
            try:
                in_flight.settle(self._client)
            except Exception as error:
                warn("could not return claim %s: %s", in_flight.claim_id, error)
