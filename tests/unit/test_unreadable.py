"""What Python cannot hold: it fails for itself, and takes no other message with it."""

import json
from datetime import UTC, datetime

import pytest

DEEP = json.dumps({"a": 1}).replace("1", "[" * 3000 + "]" * 3000)
CONSUMER = {"ordering": "stream"}
LONG = json.dumps({"a": 1}).replace("1", "9" * 5000)


@pytest.mark.parametrize("headers", [DEEP, LONG])
def test_a_message_whose_headers_python_cannot_read_fails_alone(queue, conn, headers):
    queue.send("s", "before", headers={"good": "yes"})
    bad = queue.send("s", "bad")
    queue.send("s", "after")
    # Past the checks of what is sent and stored: it may be there from before them.
    conn.execute("update pgqueue.messages set headers = %s::jsonb where seq = %s", [headers, bad])
    claim = queue.receive("s", "c", 10)
    assert [m.data for m in claim.messages] == ["before", "bad", "after"]
    before, bad, after = claim.messages
    assert (before.headers, before.error, after.error) == ({"good": "yes"}, None, None)
    assert bad.headers == {}
    assert bad.error.startswith("its headers cannot be read: ")
    assert claim.dead_letter([bad]) == 1
    assert claim.ack() == 2
    (dead,) = queue.read_dead("s", "c")
    assert (dead.data, dead.headers, dead.error) == ("bad", {}, bad.error)


@pytest.mark.parametrize(
    ("inserted_at", "nearest"),
    [
        ("infinity", datetime.max.replace(tzinfo=UTC)),
        ("4000-01-01 00:00:00+00 BC", datetime.min.replace(tzinfo=UTC)),
    ],
)
def test_a_time_that_python_cannot_hold_is_the_nearest_that_it_can(
    queue, conn, inserted_at, nearest
):
    seqs = queue.send_batch("s", ["one", "two"])
    conn.execute(
        "update pgqueue.messages set inserted_at = %s where seq = %s", [inserted_at, seqs[0]]
    )
    conn.execute("update pgqueue.streams set created_at = %s", [inserted_at])
    (batch,) = queue.read("s")
    assert [m.inserted_at == nearest for m in batch.messages] == [True, False]
    claim = queue.receive("s", "c", 10)
    assert [m.data for m in claim.messages] == ["one", "two"]
    assert claim.messages[0].inserted_at == nearest
    assert abs((claim.messages[1].inserted_at - datetime.now(UTC)).total_seconds()) < 60
    assert [stream.created_at for stream in queue.streams()] == [nearest]
