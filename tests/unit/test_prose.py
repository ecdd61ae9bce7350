"""The linter of the pages finds what it is for, where it stands, and leaves code alone."""

import pytest

from tests.prose.__main__ import findings
from tests.prose.markdown import prose_of, sentences
from tests.prose.rules import LONGEST

GOOD = """# A page

The claim ends after 30 s. `pgqueue.ack` acknowledges the [message](it.md#one).

- The worker sends `microbatch` as code:

```python
print("It was acked by whoever")
```

| column | what it does |
|---|---|
| `key` | the worker's own word; It |
"""


def rules_that_find(text: str) -> list[str]:
    return [finding.split(": ")[1] for finding in findings("page.md", text)]


def test_a_page_that_reads_well_is_left_alone():
    assert list(findings("page.md", GOOD)) == []


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("A microbatch is small.", "pgqueue.words"),
        ("The worker acked the message.", "pgqueue.words"),
        ("Whoever waits gets an error.", "pgqueue.openers"),
        ("The claim ends. So those are small.", "pgqueue.openers"),
        ("- Who waits gets an error.", "pgqueue.openers"),
        ("| x | Of a claim nothing is left. |", "pgqueue.openers"),
        ("This is an error for who waits.", "pgqueue.who"),
        ("The claim is is over.", "pgqueue.twice"),
        ("The worker " + "works and " * (LONGEST // 2) + "ends.", "pgqueue.long"),
    ],
)
def test_what_reads_badly_is_found(text: str, rule: str):
    assert rule in rules_that_find(f"# A page\n\n{text}\n")


def test_a_finding_says_where_it_is():
    (found,) = findings(
        "page.md", "# A page\n\nThe claim ends.\nThe `ack`\nis late. Who waits is late.\n"
    )
    assert found.startswith("page.md:5:10: pgqueue.openers: ")


def test_sentences_are_counted_by_words():
    text = "## Two words\n\nThe `ack of 3` is [one word](a.md). A cell:\n\n| a b | c |\n"
    assert [each.words for each in sentences(prose_of(text))] == [2, 5, 2, 2, 1]


def test_a_question_may_begin_with_what():
    assert rules_that_find("What happens when a worker dies?") == []
