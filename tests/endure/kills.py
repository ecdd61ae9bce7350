"""What is done to the world: each kind is a function, which says whether it found something."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

import psutil

from tests.endure.application import FAIL, NOTED
from tests.endure.world import World

BACKENDS = """
    select pid from pg_stat_activity where backend_type = 'client backend'
    and pid <> pg_backend_pid() and application_name <> 'endure'
"""

FARTHEST = 20.0  # seconds that the clock is ahead or behind
FULL = (3.0, 10.0)  # seconds that the disk is full


def end_backend(world: World) -> bool:
    """One connection, as an administrator ends it."""
    sql = f"select pg_terminate_backend(pid) from ({BACKENDS}) b order by random() limit 1"
    return bool(world.statements.rows(sql))


def end_all_backends(world: World) -> bool:
    return bool(world.statements.rows(f"select pg_terminate_backend(pid) from ({BACKENDS}) b"))


def kill_backend(world: World) -> bool:
    """kill -9 of a connection's process: the server ends all others, and recovers."""
    found = world.statements.rows(BACKENDS)
    with suppress(psutil.NoSuchProcess):
        if found:
            psutil.Process(random.choice(found)[0]).kill()
            return True
    return False


def crash_server(world: World) -> bool:
    world.pair.primary.restart("immediate")
    return True


def fail_over(world: World) -> bool:
    """kill -9 of the primary, and its standby takes over; the killed server begins anew."""
    world.pair.follow()
    world.pair.kill()
    world.pair.promote()
    world.pair.replace_standby()
    world.pair.synchronize()
    return True


def kill_of_spark(name: str, world: World) -> bool:
    """A process of the application, by a part of its command line."""
    with suppress(psutil.NoSuchProcess):
        if works(world) and (found := world.children["application"].descendants(name)):
            random.choice(found).kill()
            return True
    return False


def works(world: World) -> bool:
    """Whether the application has done something: else it might never get beyond its start."""
    application = world.children["application"]
    return application.process.poll() is None and NOTED in application.output


def kill_application(world: World) -> bool:
    return works(world) and kill_child("application", world)


def kill_child(name: str, world: World) -> bool:
    """A process and all of its descendants."""
    found = [child for known, child in world.children.items() if known.startswith(name)]
    running = [child for child in found if child.process.poll() is None]
    if running:
        random.choice(running).kill()
    return bool(running)


def restart_from_checkpoint(world: World) -> bool:
    """The application stops as it should, and begins again from its checkpoints."""
    return works(world) and world.end_application()


def fail_micro_batch(world: World) -> bool:
    """The next micro-batch without a consumer fails after its work, so that it is replayed."""
    if works(world):
        (world.checkpoints / FAIL).touch()
        return True
    return False


def step_clock(world: World) -> bool:
    """The time of all servers and processes jumps, forwards or back."""
    world.set_clock(random.uniform(-FARTHEST, FARTHEST))
    return True


def fill_disk(world: World) -> bool:
    """For some seconds nothing can be written to the log, or to tables."""
    with world.full_disk(random.choice(["pg_wal", "/base/"])):
        time.sleep(random.uniform(*FULL))
    return True


KINDS: dict[str, tuple[float, Callable[[World], bool]]] = {
    "connection ended": (6, end_backend),
    "all connections ended": (1, end_all_backends),
    "backend": (0.5, kill_backend),
    "server": (0.4, crash_server),
    "failover": (0.2, fail_over),
    # Also those that plan and commit, and the parents of workers.
    "Python worker of Spark": (3, partial(kill_of_spark, "pyspark.daemon")),
    "process of a source": (1.5, partial(kill_of_spark, "python_streaming_source_runner")),
    "executor": (1.5, partial(kill_of_spark, "CoarseGrainedExecutorBackend")),
    "JVM of the driver": (0.3, partial(kill_of_spark, "org.apache.spark.deploy.SparkSubmit")),
    "application": (0.3, kill_application),
    "restart from the checkpoint": (0.2, restart_from_checkpoint),
    "micro-batch": (1, fail_micro_batch),
    "worker": (4, partial(kill_child, "worker")),
    "worker of the group": (4, partial(kill_child, "group")),
    "producer": (2, partial(kill_child, "producer")),
    "step of the clock": (0.7, step_clock),
    "full disk": (0.2, fill_disk),
}
"""Each kind, how often it comes beside the others, and what does it: what is dear is rare."""

NEED_FAULTS = ("step of the clock", "full disk")

RENEWED = "new checkpoint"
"""The kind that comes between two rounds."""

ITSELF = "the run itself"
"""The kind that somebody else does, and the next run notices."""


class Killer:
    """Draws kinds of kills, so that all come in turn and the cheap ones often.

    Args:
        done: kinds that have been; those that have not been come first.
    """

    def __init__(self, world: World, seed: int, done: Collection[str] = ()):
        self._world = world
        self._random = random.Random(seed)
        self._missing = [
            kind for kind in KINDS
            if kind not in done and (world.has_faults or kind not in NEED_FAULTS)
        ]  # fmt: skip
        self._kinds = {
            kind: weight for kind, (weight, _) in KINDS.items()
            if world.has_faults or kind not in NEED_FAULTS
        }  # fmt: skip

    def kill(self) -> str | None:
        """Do something; returns its kind, or None if it found nothing to kill."""
        sooner = self._missing and self._random.random() < 0.2
        kinds = self._missing if sooner else [*self._kinds]
        (kind,) = self._random.choices(kinds, [self._kinds[kind] for kind in kinds])
        if not KINDS[kind][1](self._world):
            return None
        if kind in self._missing:
            self._missing.remove(kind)
        return kind
