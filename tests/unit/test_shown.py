"""What a person sees who types the name of a thing, in a terminal and in a notebook."""

from __future__ import annotations

import pytest

import spark_pgqueue
from spark_pgqueue.client import Claim, Client, Message


@pytest.fixture
def claim(queue: Client) -> Claim:
    queue.send_batch("s", ["<b>", *map(str, range(29))], keys=["k", *[None] * 29])
    claim = queue.receive("s", "c", max_messages=30)
    assert claim is not None
    return claim


def test_a_client_names_its_database_and_no_password(queue: Client, url: str) -> None:
    assert repr(queue).startswith("<client of database 'pgqueue_test_")
    with spark_pgqueue.connect(f"{url}&password=secret") as other:
        assert "secret" not in repr(other)
    assert repr(other) == "<client of no connection>"


def test_a_claim_of_many_messages_is_one_line(claim: Claim) -> None:
    first = "<message 1: key='k', data='<b>', deliver_count=1>"
    assert repr(claim) == f"<claim {claim.claim_id} of {first} and 29 more>"


def test_a_long_payload_is_cut() -> None:
    assert len(repr(Message.for_test("x" * 10_000))) < 200
    assert len(repr(Message.for_test(b"x" * 10_000))) < 200


def test_a_notebook_shows_messages_as_a_table_whose_text_is_escaped(
    queue: Client, claim: Claim
) -> None:
    page = claim._repr_html_()
    assert page.count("<tr>") == 21
    assert "<td>&lt;b&gt;</td>" in page
    assert page.endswith("and 10 more")
    (batch,) = queue.read("s")
    assert "<td>&lt;b&gt;</td>" in batch._repr_html_()


def test_dir_has_the_public_names_alone() -> None:
    assert dir(spark_pgqueue) == sorted(spark_pgqueue.__all__)
