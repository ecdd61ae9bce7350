"""What of a page in Markdown is prose, at the places where it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

MASKED = re.compile(
    r"""(?P<block>^(?P<fence>```+|~~~+).*?^(?P=fence)[ ]*$)   # code, as a block
    | (?P<code>`[^`]+`)                                       # and in a line: it counts as a word
    | (?P<tag><!--.*?-->|</?[a-zA-Z][^>]*>)
    | (?P<target>\]\([^()\s]*\)|\]\[[^\]]*\])                 # where a link leads
    | (?P<item>^[ ]*(?:[-*]|\d+\.)(?=[ ]))
    | (?P<sign>^\#+|^[ ]*>|!?\[|[*_]{1,3}(?=\S)|(?<=\S)[*]{1,3})
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
BREAK = re.compile(
    r"""\n[ ]*\n                    # an empty line
    | \|                            # a cell of a table, an item of a list
    | (?<=[.!?])\)?\s+(?=\S)        # the end of a sentence
    | (?<=[.!?])\s*$""",
    re.VERBOSE,
)
WORD = re.compile(r"[^\W_][\w'.,/-]*")


class Sentence(NamedTuple):
    """A sentence, an item, a heading or a cell: where it begins, and its text."""

    start: int
    text: str

    @property
    def words(self) -> int:
        return len(WORD.findall(self.text))


def prose_of(page: str) -> str:
    """The page with blanks in the place of all that is no prose; each word stays where it is."""
    return MASKED.sub(_blank, page)


def _blank(found: re.Match[str]) -> str:
    if found.lastgroup == "code":
        return "x" * len(found[0])
    if found.lastgroup == "item":
        return "|" * len(found[0])
    return re.sub(r"[^\n]", " ", found[0])


def sentences(prose: str) -> Iterator[Sentence]:
    """The sentences of a prose that `prose_of` gave."""
    start = 0
    for end in [*BREAK.finditer(prose), None]:
        text = prose[start : end.start() if end else len(prose)]
        if found := re.search(r"\S", text):
            begin = start + found.start()
            yield Sentence(begin, prose[begin : end.start() if end else len(prose)].rstrip())
        start = end.end() if end else len(prose)
