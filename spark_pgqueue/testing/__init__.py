"""Tests of your own code: a database for each test, handlers run at once, and time that moves.

pytest finds the fixtures by itself (extra `testing`):

    def test_an_order_is_billed(pgqueue):
        pgqueue.client.send("orders", {"order": 1})
        assert pgqueue.drain(bill).handled == 1
        assert pgqueue.outcomes("orders", "billing") == {1: "done"}

    pgqueue         a `QueueTester` on a database of the test's own
    pgqueue_url     the url of that database
    pgqueue_setup   override it, to prepare the database that all others are copies of
    pgqueue_server  the server: a private one, or that of the option --pgqueue-url

Without pytest, or on a connection of your own whose transaction you roll back: `QueueTester(url)`,
`QueueTester(connection)`.
"""

from spark_pgqueue.testing.tester import Drained, QueueTester

__all__ = ["Drained", "QueueTester"]
