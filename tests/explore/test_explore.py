"""Every interleaving of small cases keeps the promises; and a fault that is planted is found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Server, _database
from tests.explore.calls import CALLS as CALLS_THERE
from tests.explore.calls import PROGRAMS
from tests.explore.cases import ORDERINGS, Case
from tests.explore.explorer import Explorer, all_cases, summary
from tests.explore.mutants import MUTANTS, Mutant

pytestmark = [pytest.mark.longer, pytest.mark.timeout(400)]

# Of two sessions each makes one of these calls. `make explore` has all calls.
CALLS = ("send", "receive", "receive_all", "ack", "ack_one", "nack", "seek_latest", "maintain")
OF_A_PAIR = 2  # schedules, at most

# A worker beside a worker, a producer, and an operator. `make explore` goes to the last schedule.
DEEP = [
    Case(("receive", "receive"), "none"),
    Case(("receive", "receive"), "key"),
    Case(("receive+ack", "send"), "key"),
    Case(("ack", "receive"), "none", "expiry"),
    Case(("ack_one", "receive"), "key", "expiry"),
    # claims that lock the consumer
    *(
        Case((call, "receive"), ordering, "expiry", limited=True)
        for ordering, call in zip(
            ("none", "stream") * 2, ("ack", "ack_one", "nack", "extend"), strict=True
        )
    ),
    Case(("send", "receive", "send"), "none"),
    Case(("nack", "receive_all"), "key"),
    Case(("receive", "drop_stream"), "key"),
    Case(("send", "create_latest"), "none"),
    Case(("receive", "alter_fair"), "none"),
    Case(("send", "receive"), "key", "retention"),
    Case(("receive", "receive"), "none", "kill"),
    Case(("reader_claim+reader_resume+reader_ack", "receive"), "none"),
    Case(("reader_ack", "reader_next"), "key", "expiry"),
    Case(("reader_release", "receive"), "key"),
    Case(("publish_staged", "publish_staged"), "none"),
    Case(("publish_staged", "maintain_staged"), "none"),
    Case(("settle_messages", "reader_ack"), "none"),
    Case(("write_captured", "capture"), "none"),
    Case(("read", "send"), "none"),
    Case(("commit_offset", "lease_partitions"), "none", "expiry"),
    Case(("read_partitions+commit_offset", "send"), "none"),
]
OF_A_DEEP_CASE = 14
OF_A_CASE_OF_ONES = 4


@pytest.fixture(scope="module")
def explorer(server: Server, template: str) -> Iterator[Explorer]:
    """One for all cases: to make it, and to plan in its sessions, takes longer than a case."""
    for url in _database(server, template):
        explorer = Explorer(url)
        yield explorer
        explorer.close()


@pytest.mark.parametrize(
    ("ordering", "beside"),
    [*((ordering, "") for ordering in ORDERINGS), ("none", "rollback"), ("key", "expiry")],
)
def test_every_pair_of_calls_keeps_the_promises(explorer: Explorer, ordering: str, beside: str):
    results = [explorer.explore(case, OF_A_PAIR) for case in all_cases(CALLS, [beside], [ordering])]
    print(summary(results))
    assert [str(result) for result in results if result.failure is not None] == []


@pytest.mark.parametrize("case", DEEP, ids=str)
def test_a_case_keeps_the_promises_in_every_schedule(explorer: Explorer, case: Case):
    result = explorer.explore(case, OF_A_DEEP_CASE)
    print(result)
    assert result.failure is None, str(result)


def test_all_cases_keep_the_promises_with_limits_of_one(url: str):
    """Each statement takes one message, publication or range."""
    explorer = Explorer(url, limits=1)
    results = [explorer.explore(case, OF_A_CASE_OF_ONES) for case in DEEP]
    explorer.close()
    print(summary(results))
    assert [str(result) for result in results if result.failure is not None] == []


def test_a_call_alone_is_not_refused(explorer: Explorer):
    """A call that always fails would explore nothing."""
    found = []
    for calls in [*CALLS_THERE, *PROGRAMS]:
        refused = []
        for case in (Case((calls,), "none"), Case((calls,), "key")):
            result = explorer.explore(case, 1)
            found += [str(result)] if result.failure is not None else []
            refused.append(case.ledger.refused)
            if not case.ledger.refused:
                break
        if all(refused):
            found += refused[0]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_is_found(url: str, mutant: Mutant):
    explorer = Explorer(url, mutant)
    try:
        result = explorer.explore(mutant.case, 200)
    finally:
        explorer.close()
    print(result)
    assert result.failure is not None, f"{result.schedules} schedules found nothing"
