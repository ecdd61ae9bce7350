"""The rules: the field's words, sentences that are read once, and what proselint knows besides."""

from __future__ import annotations

import re
from collections.abc import Iterator

from proselint.checks import __register__ as OF_PROSELINT
from proselint.registry.checks import Check, CheckResult
from proselint.registry.checks.types import PreferredForms

from tests.prose.markdown import sentences

LONGEST = 35
"""Words of a sentence, at most; code in a line is a word."""

FORMS = {
    r"(?:micro ?|mini-?)batch(?:es)?": "micro-batch",
    r"deadletters?": "dead letter",
    r"acknowledgments?": "acknowledgement",
    r"(?:un-?)?ack(?:ed|'d|s|ing)": "acknowledge",
    r"nack(?:ed|'d|s|ing)": "return",
    r"re-?queue[sd]?": "return",
    r"back-?pressure": "back pressure",
    r"check point(?:s|ed)?": "checkpoint",
    r"time-outs?": "timeout",
    r"visibility times?": "visibility timeout",
    r"data frames?": "DataFrame",
    r"(?:un)?sift(?:s|ed|ing)?": "filter",
    r"staged blocks?": "staged chunk",
    r"subscribers?": "consumer",
    r"enqueue[sd]?": "send",
    r"dequeue[sd]?": "receive",
}
"""What a page does not say, as a pattern, and the word of this project."""

FOR_PEOPLE = re.compile(r"\b(?:for|of|to|by|from|with|but|than) who\b|\bwhoever\b")
"""`who` where a noun belongs."""

OPENER = re.compile(
    r"""(?:(?:So|But|And|Then|Also|Here|There|Yet|Else|Otherwise),?[ ])?
    (?: Who | Whoever | Whatever | Those
      | One\ (?:is|was|has|may|can|that|which|who|whose|with|of|to|in)
      | Of\ (?:an?|the|it|them|each|these|those|what)
    )\b(?!-)""",
    re.VERBOSE | re.IGNORECASE,
)
"""How a sentence does not begin: nobody knows yet what it speaks of."""


def long_sentences(text: str, check: Check) -> Iterator[CheckResult]:
    for sentence in sentences(text):
        if sentence.words > LONGEST:
            yield _found(check, sentence.start, sentence.text[:30], str(sentence.words))


def vague_openers(text: str, check: Check) -> Iterator[CheckResult]:
    for sentence in sentences(text):
        found = OPENER.match(sentence.text)
        if found and sentence.text[0].isupper() and sentence.text.endswith((".", ":")):
            yield _found(check, sentence.start, found[0], found[0])


def repeated_words(text: str, check: Check) -> Iterator[CheckResult]:
    for found in re.finditer(r"\b(?!x+\b)([a-z]+) *\n? *(?<=[ \n])\1\b", text):
        yield _found(check, found.start(), found[0], found[1])


def who_is_for_people(text: str, check: Check) -> Iterator[CheckResult]:
    for found in FOR_PEOPLE.finditer(text):
        yield _found(check, found.start(), found[0], found[0].strip())


def _found(check: Check, start: int, shown: str, name: str) -> CheckResult:
    return CheckResult(check.path, check.message.format(name), (start, start + len(shown)), None)


OF_THE_PROJECT = (
    Check(
        PreferredForms({rf"(?:{form})": word for form, word in FORMS.items()}),
        path="pgqueue.words",
        message="The project says {0}, not {1}.",
    ),
    Check(
        long_sentences,
        path="pgqueue.long",
        message=f"A sentence of {{0}} words; {LONGEST} at most: a fact a sentence.",
    ),
    Check(vague_openers, path="pgqueue.openers", message="Name the subject in place of '{0}'."),
    Check(repeated_words, path="pgqueue.twice", message="The word '{0}' twice."),
    Check(who_is_for_people, path="pgqueue.who", message="Name the subject in place of '{0}'."),
)

LEFT_OUT = {
    "restricted",  # to the thousand most frequent words
    "typography",  # quotes and dots stay as a keyboard has them
    "misc.phrasal_adjectives",
    "lexical_illusions",  # also between a heading and its text: see `repeated_words`
}
"""Checks of proselint that this project does not follow."""

ALL = (
    *OF_THE_PROJECT,
    *(each for each in OF_PROSELINT if not any(each.matches_partial(out) for out in LEFT_OUT)),
)
