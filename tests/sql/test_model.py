"""Any history of sends, claims and settlements does what a small model of the queue says.

PGQUEUE_MODEL_EXAMPLES chooses how many histories are tried: by default 7, and 4 where the limits
are the usual ones, which so short a history seldom reaches. PGQUEUE_MODEL_SHRINK=1 looks for the
shortest one that fails, which takes minutes.
"""

from __future__ import annotations

import os
import time
from typing import LiteralString

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from spark_pgqueue.postgres import connection
from tests.sql import limits
from tests.sql.model import QueueMachine
from tests.sql.model_faults import FAULTS, Fault

EXAMPLES = os.environ.get("PGQUEUE_MODEL_EXAMPLES")


@pytest.mark.small_limits
@pytest.mark.timeout(600)  # hypothesis takes up to 300 s to make a history that fails shorter
@pytest.mark.parametrize(
    ("ordering", "what"),
    [
        ("none", ""),
        ("key", ""),
        pytest.param("stream", "", marks=pytest.mark.longer),
        *(
            pytest.param(ordering, what, marks=pytest.mark.longer)
            for what in ("limited", "latest")
            for ordering in ("none", "key")
        ),
    ],
)
def test_any_history_follows_the_model(
    url: str, ordering: str, what: str, has_small_limits: bool
) -> None:
    # With an order, a claim serves what it finds before it takes, and may hold less than there is.
    examples = int(EXAMPLES or (7 if has_small_limits else 4))
    explore(url, ordering, what, has_small_limits or ordering != "none", examples)


def test_the_limits_that_are_set_to_3_are_there(conn: psycopg.Connection) -> None:
    """A limit that is renamed would be 2, and histories would meet other states."""
    assert {f"limit_{name}" for name in limits.THREE} < set(limits.shrink(conn))


@pytest.mark.longer
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(url: str, fault: Fault) -> None:
    """Whatever the core is: the fault is in a function that people call."""
    with connection.connect(url) as conn:
        fault.plant(conn)
    began = time.monotonic()
    with pytest.raises((AssertionError, Flaky)) as found:
        explore(url, fault.ordering, fault.what, fault.ordering == "key", 200)
    print(f"{fault.name}: {time.monotonic() - began:.0f} s, {found.value!r:.120}")


def explore(url: str, ordering: str, what: str, bounded: bool, examples: int) -> None:
    """Try so many histories; raises what the model finds."""

    class Machine(QueueMachine):
        pass

    Machine.url, Machine.ordering, Machine.bounded = url, ordering, bounded
    Machine.limited, Machine.latest = what == "limited", what == "latest"
    with connection.connect(url) as conn:  # a history that fails leaves its stream behind
        reset: LiteralString = "select pgqueue.drop_stream(name) from pgqueue.streams"

        class Clean(Machine):
            def __init__(self) -> None:
                conn.execute(reset)
                super().__init__()

        run_state_machine_as_test(
            Clean,
            settings=settings(
                max_examples=examples,
                stateful_step_count=40,
                deadline=None,
                derandomize=EXAMPLES is None,
                database=None,
                phases=[Phase.generate] + [Phase.shrink] * ("PGQUEUE_MODEL_SHRINK" in os.environ),
                suppress_health_check=[*HealthCheck],  # pyright: ignore[reportArgumentType]
            ),
        )
