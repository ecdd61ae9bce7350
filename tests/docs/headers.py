"""The comments above functions in `sql/`, taken apart.

Such a header says in sentences what the function does; then, indented by three, its arguments, one
to a line with its text behind two blanks or more; then in sentences what it returns, which errors
it raises and what it locks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FUNCTION = re.compile(
    r"((?:^--.*\n)+)create (?:or replace )?(?:function|procedure) pgqueue\.(\w+)\(", re.MULTILINE
)

# Where a sentence begins that says something else than what the function does.
_SECTION = re.compile(r"(?<=[.)] )(?=(?:Returns|Errors|Locks|Arguments)\b)")


@dataclass(frozen=True)
class Item:
    """A line of a list, with those that go on with it.

    Attributes:
        name: an argument, a column or a value; several with commas between them.
        text: what it is.
        parts: a list of its own.
    """

    name: str
    text: str
    parts: tuple[Item, ...] = ()


@dataclass(frozen=True)
class Code:
    """A line to be typed."""

    text: str


Block = str | Code | tuple[Item, ...]
"""A sentence or more, an example, or a list."""


@dataclass(frozen=True)
class Header:
    """What a header says.

    Attributes:
        file: that the function is in, from the folder `sql`.
        about: what the function does.
        arguments: its arguments, as far as they need to be explained.
        rest: what it returns, raises and locks: each a block, or more with a list behind it.
    """

    file: str
    about: tuple[Block, ...]
    arguments: tuple[Item, ...]
    rest: tuple[Block, ...]


def headers_in(folder: Path) -> dict[str, Header]:
    """The headers of all functions of the files in `folder` and below, by the function's name."""
    found = {}
    for file in sorted(folder.rglob("*.sql")):
        for comment, name in _FUNCTION.findall(file.read_text()):
            found[name] = parse(str(file.relative_to(folder)), comment)
    return found


def parse(file: str, comment: str) -> Header:
    """A header, from its comment as it is written."""
    about: list[Block] = []
    arguments: list[Item] = []
    rest: list[Block] = []
    for block in _blocks([line.removeprefix("--") for line in comment.splitlines()]):
        if isinstance(block, tuple):
            if rest or arguments:
                rest.append(block)
            else:
                arguments += block
        elif isinstance(block, Code):
            (rest or about).append(block)
        else:
            # The first sentence says what it does, whatever word it begins with.
            first, *others = _SECTION.split(block)
            if about and re.match(r"(Returns|Errors|Locks|Arguments)\b", first):
                rest.append(first)
            elif rest or arguments:
                _go_on(rest, first)
            else:
                about.append(first)
            rest += others
    return Header(file, tuple(about), tuple(arguments), tuple(rest))


def _go_on(rest: list[Block], text: str) -> None:
    """A sentence behind arguments, or behind what is returned, goes on with that."""
    if rest and isinstance(rest[-1], str):
        rest[-1] += f" {text}"
    else:
        rest.append(text)


def _blocks(lines: list[str]) -> list[Block]:
    blocks: list[Block] = []
    sentences: list[str] = []
    items: list[str] = []

    def end() -> None:
        if sentences:
            blocks.append(" ".join(sentences))
        if items:
            blocks.append(_items(items))
        sentences.clear()
        items.clear()

    for line in lines:
        indent = len(line) - len(line.lstrip())
        if indent <= 1:
            if items:
                end()
            sentences.append(line.strip())
        elif indent == 3 or items:
            if sentences:
                end()
            items.append(line)
        else:
            end()
            blocks.append(Code(line.strip()))
    end()
    return blocks


def _items(lines: list[str]) -> tuple[Item, ...]:
    """A list: what is indented as its first line begins an item, what is further in goes on."""
    depth = len(lines[0]) - len(lines[0].lstrip())
    groups: list[list[str]] = []
    for line in lines:
        if len(line) - len(line.lstrip()) == depth:
            groups.append([line])
        else:
            groups[-1].append(line)
    return tuple(_item(group) for group in groups)


def _item(lines: list[str]) -> Item:
    name, _, text = re.sub(r"(\S)\s{2,}(?=\S)", r"\1\0", lines[0].strip(), count=1).partition("\0")
    parts = [line for line in lines[1:] if re.search(r"\S {3,}\S", line.strip())]
    if parts:  # from the first of them on
        at = lines.index(parts[0])
        lines, nested = lines[:at], _items(lines[at:])
    else:
        nested = ()
    return Item(name, " ".join([text, *(line.strip() for line in lines[1:])]).strip(), nested)
