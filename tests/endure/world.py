"""What the long run is about: two servers, a queue, and the processes that send and consume.

Everything is in a folder, and a run that begins with a folder goes on with what is there.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import psycopg

from spark_pgqueue import java
from spark_pgqueue.postgres import connection
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.statements import Statements
from tests.failover import SETTINGS, Pair
from tests.processes import Child
from tests.sessions import quick_start

LEDGER = Path(__file__).with_name("ledger.sql")
FAULTS = Path(__file__).parents[1] / "disk_faults.c"
CLOCK = Path(__file__).with_name("clock.c")

MARK = "PGQUEUE_ENDURE"
"""A variable of all processes but the servers: the folder, by which the next run finds them."""

ACTOR = "from tests.endure.{} import {} as act; import sys; act(*sys.argv[1:])"

KEPT = 5_000_000  # messages of a stream in a round; after it, nearly none

QUEUE = """
    select pgqueue.create_stream(s) from unnest('{in,plain,keyed}'::text[]) s;
    select pgqueue.create_consumer('in', name, 'earliest', ordering, p_settings =>
        '{"max_deliver_count": 1000000, "backoff_base": "0 s", "visibility_timeout": "5 s"}')
    from (values ('c', 'none'), ('k', 'key'), ('w', 'key')) c (name, ordering);
    select pgqueue.create_group('in', 'g', 4, 'earliest');
    update endure.state set begin_at = pgqueue.start_offset('in', 'earliest');
"""


class World:
    """The servers, the queue and the processes.

    Args:
        home: the folder.
        master: where the tasks of the Spark application run.
        backlog: of messages; producers wait while a consumer has more.

    Attributes:
        home: the folder.
        checkpoints: the folder of the queries' checkpoints.
        name: of the queue, which a new folder gives anew.
        pair: the servers.
        statements: to the one that takes writes; they wait for it, and repeat themselves.
        has_faults: whether the disk may be full and the clock step: there is a compiler.
        children: the running processes, by name.
        was_killed: whether the run before was killed, and left its processes.
    """

    def __init__(self, home: Path, master: str, backlog: int):
        self.home, self._master, self._backlog = home, master, backlog
        self.checkpoints = home / "checkpoints"
        home.mkdir(mode=0o755, exist_ok=True, parents=True)
        home.chmod(0o755)  # the servers' user reads the libraries
        self._lock = (home / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another run uses {home}") from None
        self.was_killed = self._end_left_processes()
        self.children: dict[str, Child] = {}
        self._compile()
        self.pair = Pair(home, {**SETTINGS, "wal_retrieve_retry_interval": "200ms"})
        self.url = self.pair.url
        self.statements = Statements(
            f"{self.url}&application_name=endure", patience=120, repeat=True
        )
        self._make_queue()
        self.pair.synchronize()
        java.ensure_java_home()
        self._quick = quick_start()
        self._over = threading.Event()
        self._upkeep = threading.Thread(target=self._maintain, daemon=True)
        self._upkeep.start()

    def _end_left_processes(self) -> bool:
        """What a killed run has left, if anything: all its processes have its mark."""
        found = False
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.home):
                    process.kill()
                    found = True
        return found

    def _compile(self) -> None:
        """Preload what makes disks full and clocks step, where there is a compiler."""
        self.has_faults = shutil.which("gcc") is not None
        self._faults, self._step = self.home / "faults", self.home / "step"
        self._faults.unlink(missing_ok=True)
        if not self.has_faults:
            return
        for source in (FAULTS, CLOCK):
            library = self.home / f"{source.stem}.so"
            command = ["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"]
            subprocess.run(command, check=True)
        if not self._step.exists():  # else servers may have it mapped
            self._step.write_bytes(bytes(8))
            self._step.chmod(0o644)
        self.set_clock(0)
        libraries = f"{self.home / FAULTS.stem}.so {self.home / CLOCK.stem}.so"
        # Servers get the environment of this process, which itself was started without.
        os.environ |= {
            "LD_PRELOAD": libraries, "FAULTS": str(self._faults), "CLOCK": str(self._step),
        }  # fmt: skip

    def _make_queue(self) -> None:
        with connection.connect(self.url) as conn:
            if conn.execute("select to_regnamespace('endure')").fetchone() == (None,):
                with conn.transaction():
                    conn.execute(LEDGER.read_bytes())
                    conn.execute("set local search_path to default")
                    conn.execute(QUEUE.encode())
        name = self.home / "name"
        if not name.exists():
            name.write_text(uuid.uuid4().hex[:8])
        self.name = name.read_text()
        self.keep(KEPT)

    def keep(self, messages: int) -> None:
        """Let streams keep so many messages, from the next `maintain()` on."""
        for stream in ("in", "plain", "keyed"):
            self.statements.rows(
                "select pgqueue.set_retention(%s, p_messages => %s)", [stream, messages]
            )

    def _maintain(self) -> None:
        while not self._over.wait(5):
            with suppress(psycopg.Error, PgQueueError), connection.connect(self.url) as conn:
                conn.execute("select * from pgqueue.maintain()")

    # Processes

    def keep_up(self, producers: bool = True) -> None:
        """Start what does not run."""
        wanted = [*(["producer a", "producer b"] if producers else [])]
        wanted += ["worker 1", "worker 2", "group 1", "group 2", "application"]
        for name in wanted:
            child = self.children.get(name)
            if child is None or child.process.poll() is not None:
                if child is not None:
                    self._log(name, child)
                    child.kill()  # what it left behind
                self.children[name] = self._start(name)

    def _start(self, name: str) -> Child:
        kind, _, number = name.partition(" ")
        arguments: tuple[object, ...] = (self.url,)
        if kind == "producer":
            arguments = (self.url, self._next_start(), number, self._backlog)
        elif kind == "application":
            checkpoint, begin_at = self.statements.row(
                "select checkpoint, begin_at::text from endure.state"
            )
            arguments = (self.url, self.checkpoints, checkpoint, begin_at, self._master)
        environment = {MARK: str(self.home), "PYSPARK_PYTHON": sys.executable, **self._quick}
        if self.has_faults:
            environment["LD_PRELOAD"] = f"{self.home / CLOCK.stem}.so"
        module = "application" if kind == "application" else "actors"
        return Child(ACTOR.format(module, kind), *map(str, arguments), environment=environment)

    def _next_start(self) -> int:
        """A number that no other process of this queue gets."""
        note = self.home / "starts"
        number = int(note.read_text()) + 1 if note.exists() else 1
        replace(note, str(number))
        return number

    def _log(self, name: str, child: Child) -> None:
        """Keep the end of what a process has said."""
        with (self.home / "log").open("a") as log:
            log.write(f"--- {name} ended: {child.process.poll()}\n{child.output[-3000:]}\n")

    def stop_producers(self) -> None:
        """Kill them, and wait until their last transactions have ended."""
        for name in [name for name in self.children if name.startswith("producer")]:
            self.children.pop(name).kill()
        open_ = "select count(*) from pg_stat_activity where application_name like 'producer-%%'"
        while self.statements.row(open_)[0]:
            self._over.wait(0.1)

    def end_application(self) -> bool:
        """Let it end by itself, and kill it if it does not."""
        child = self.children.get("application")
        if child is None or child.process.poll() is not None:
            return False
        child.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(20)
        child.kill()
        return True

    def renew_checkpoints(self) -> None:
        """Let the queries begin with new checkpoints, where nothing is left to do."""
        self.end_application()
        self.statements.row(
            "update endure.state set checkpoint = checkpoint + 1, judged_batch = -1,"
            " begin_at = pgqueue.start_offset('in', 'latest') returning checkpoint"
        )

    # Faults

    @contextmanager
    def full_disk(self, files: str) -> Iterator[None]:
        """No server can write to files with such a part in their path."""
        new = self.home / "faults.new"
        new.write_text(f"write 28 {files}")
        new.chmod(0o644)
        new.rename(self._faults)
        try:
            yield
        finally:
            self.mend()

    def mend(self) -> None:
        """End the fault, and start the servers that have given up."""
        self._faults.unlink(missing_ok=True)
        try:
            with connection.connect(self.pair.primary.url) as conn:
                conn.execute("checkpoint")
        except (psycopg.Error, PgQueueError):
            self.pair.primary.restart("immediate")
        if not self.pair.standby.is_running():
            self.pair.standby.restart("immediate")
        self.pair.synchronize()

    def set_clock(self, seconds: float) -> None:
        """Let the clock of all processes be that much ahead of the machine's."""
        with self._step.open("r+b") as file:
            file.write(struct.pack("q", int(seconds * 1_000_000)))

    # The end

    def close(self) -> None:
        """End all processes; the folder stays, for the next run."""
        self._over.set()
        for child in self.children.values():
            child.kill()
        self._upkeep.join(30)
        self.statements.close()
        self.pair.close()
        self._lock.close()


class Notes:
    """The kills since the last judgement, in a file, so that a killed run has not forgotten them.

    Attributes:
        kills: how often each kind of kill was done.
        seconds: that the rounds took.
    """

    def __init__(self, file: Path):
        self._file = file
        kept = json.loads(file.read_text()) if file.exists() else {"kills": {}, "seconds": 0.0}
        self.kills: dict[str, int] = kept["kills"]
        self.seconds: float = kept["seconds"]

    def add(self, seconds: float, kind: str | None = None) -> None:
        self.seconds += seconds
        if kind is not None:
            self.kills[kind] = self.kills.get(kind, 0) + 1
        replace(self._file, json.dumps({"kills": self.kills, "seconds": self.seconds}))

    def clear(self) -> None:
        self.kills, self.seconds = {}, 0.0
        self._file.unlink(missing_ok=True)


def replace(file: Path, text: str) -> None:
    """Write a file so that it is there whole, or as before."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(text)
    new.rename(file)
