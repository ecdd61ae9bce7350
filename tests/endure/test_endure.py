"""The judge of the long run finds what is wrong, the tally counts a round once, and a short run."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from tests.endure import judge, tally
from tests.endure.actors import DELIVERED
from tests.endure.kills import ITSELF, RENEWED
from tests.endure.run import Run
from tests.endure.world import LEDGER, QUEUE, Notes, World
from tests.processes import Child, wait_until

NUMBERS = list(range(1, 41))
ABOUT = {"date": "2026-01-31", "commit": "c", "postgres": "18.0", "pyspark": "4.3.0"}


@pytest.fixture
def round_(conn: psycopg.Connection) -> psycopg.Connection:
    """A round in which all went well: two keys, read by everybody, and a batch tried twice."""
    with conn.transaction():
        conn.execute(LEDGER.read_bytes())
        conn.execute("set local search_path to default")
        conn.execute(QUEUE.encode())
    conn.execute("reset search_path")
    keys = [f"k{n % 2}" for n in NUMBERS]
    conn.execute(
        "insert into endure.sent select * from unnest(%s::int8[], %s::text[])", [NUMBERS, keys]
    )
    for stream in ("plain", "keyed"):
        conn.execute(
            "select pgqueue.send_batch(%s, %s::text[], %s::text[])",
            [stream, [*map(str, NUMBERS)], keys],
        )
    for who in ("workers", "group"):
        conn.execute(DELIVERED, [who, NUMBERS, keys])
    for batch, part in [(0, NUMBERS[:20]), (0, NUMBERS[:20]), (1, NUMBERS[20:])]:
        note(conn, batch, part)
    judge.read_outputs(conn)
    return conn


def note(conn: psycopg.Connection, batch: int, numbers: list[int]) -> None:
    insert = "insert into endure.batches (checkpoint, batch, n) values (1, %s, %s)"
    conn.execute(insert, [batch, numbers])


def test_the_judge_has_nothing_to_say_of_a_round_in_which_all_went_well(round_) -> None:
    found = judge.judge(round_)
    assert found.ok
    assert (found.sent, found.replayed, found.changed) == (40, 1, 0)
    assert {verdict.who: verdict.delivered for verdict in found.verdicts} == dict.fromkeys(
        ["cursor", "group", "keyed", "plain", "workers"], 40
    )


@pytest.mark.parametrize("who", ["plain", "keyed", "workers", "group"])
def test_the_judge_finds_a_message_that_is_lost_or_twice_or_was_never_sent(round_, who) -> None:
    faults = {
        "lost": "delete from endure.delivered where who = %s and n = 7",
        "twice": "insert into endure.delivered (who, n, key) values (%s, 39, 'k1')",
        "unsent": "insert into endure.delivered (who, n, key) values (%s, 41, 'k1')",
    }
    for fault in faults.values():
        round_.execute(fault, [who])
    verdicts = judge.judge(round_).verdicts
    wrong = [verdict for verdict in verdicts if not verdict.ok]
    assert wrong == [judge.Verdict(who, 41, lost=1, twice=1, unsent=1, disordered=0)]


@pytest.mark.parametrize("who", ["plain", "keyed", "workers", "group"])
def test_the_judge_finds_two_messages_of_a_key_that_changed_places(round_, who) -> None:
    round_.execute(
        "update endure.delivered set n = 14 - n where who = %s and n in (5, 9)", [who]
    )  # of one key, with 7 between them
    wrong = [verdict for verdict in judge.judge(round_).verdicts if not verdict.ok]
    if who == "plain":  # it has no order
        assert wrong == []
    else:
        assert wrong == [judge.Verdict(who, 40, lost=0, twice=0, unsent=0, disordered=2)]


@pytest.mark.parametrize(
    ("batch", "numbers", "wrong"),
    [
        (0, NUMBERS[:19], {"changed": 1}),
        (2, [40], {"twice": 1}),
        (2, [41], {"unsent": 1}),
    ],
)
def test_the_judge_finds_a_micro_batch_that_is_another_when_it_is_replayed(
    round_, batch, numbers, wrong
) -> None:
    note(round_, batch, numbers)
    found = judge.judge(round_)
    (cursor,) = [verdict for verdict in found.verdicts if verdict.who == "cursor"]
    seen = {"changed": found.changed, "twice": cursor.twice, "unsent": cursor.unsent}
    assert {name: count for name, count in seen.items() if count} == wrong
    assert not found.ok


def test_a_micro_batch_that_never_came_is_lost(round_) -> None:
    round_.execute("delete from endure.batches where batch = 1")
    assert [v.lost for v in judge.judge(round_).verdicts if not v.ok] == [20]


def test_the_next_round_knows_the_last_micro_batch_when_it_is_replayed(round_) -> None:
    judge.begin_next_round(round_)
    assert judge.judge(round_).ok
    note(round_, 1, NUMBERS[20:])
    found = judge.judge(round_)
    assert (found.ok, found.replayed) == (True, 1)
    note(round_, 1, NUMBERS[20:39])
    assert judge.judge(round_).changed == 1


def test_the_tally_counts_each_round_once_and_says_what_was_wrong(round_, tmp_path) -> None:
    file = tmp_path / "tally.json"
    found = judge.judge(round_)
    for number in (1, 1, 2):
        tally.add(ABOUT, "q", number, found, {"server": 3}, 10.4, file)
    round_.execute("delete from endure.delivered where n = 7")
    tally.add(ABOUT, "another", 1, judge.judge(round_), {"server": 1, "worker": 1}, 1, file)
    (entry,) = tally.load(file)
    assert (entry["rounds"], entry["sent"], entry["lost"]) == (3, 120, 4)
    assert entry["kills"] == {"server": 7, "worker": 1}
    assert entry["delivered"]["plain"] == 119
    assert "| 120 | 596 | 8 | 4 | 0 | 0 | 3 |" in tally.text([entry])
    tally.add({**ABOUT, "date": "2026-02-01"}, "another", 2, found, {}, 1, file)
    assert len(tally.load(file)) == 2
    assert "| all | 160 |" in tally.text(tally.load(file))


BEGUN = """
    import sys
    from pathlib import Path
    from tests.endure.run import Run
    from tests.endure.world import World
    home, file, master = sys.argv[1:]
    Run(World(Path(home), master, 2000), 300, 1, 3, Path(file)).round()
"""

MASTER, BACKLOG = "local[2,4]", 2000


@pytest.mark.longer
@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_a_short_run_loses_nothing_and_a_killed_one_is_gone_on_with(
    tmp_path: Path, servers_home: Path
) -> None:
    """The second run finds what the first has left, and its queries begin anew in the end."""
    home, file = servers_home / "endure", tmp_path / "tally.json"
    servers_home.chmod(0o755)
    with Child(BEGUN, str(home), str(file), MASTER) as begun:
        notes = home / "kills"
        wait_until(lambda: notes.exists() or begun.process.poll() is not None, 300)
        assert begun.process.poll() is None, begun.output
        begun.kill_alone()
    before = Notes(notes).kills
    assert before
    world = World(home, MASTER, BACKLOG)
    try:
        run = Run(world, 10, 2, 7, file, renew_after=1)
        rounds = [run.round(), run.round()]
        assert [found for found in rounds if not found.ok or found.sent < 1000] == []
    finally:
        world.close()
    (entry,) = tally.load(file)
    assert entry["sent"] == sum(found.sent for found in rounds)
    assert (entry["kills"][ITSELF], entry["kills"][RENEWED]) == (1, 1)
    assert sum(entry["kills"].values()) > sum(before.values()) + 5
