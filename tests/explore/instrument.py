"""Give each function of a test's database a pause before each of its statements.

A statement of PL/pgSQL is one step: it sees one snapshot, and what other sessions commit between
two steps is what a function has to bear. `instrument` rewrites the functions of one database, and
returns what each step reads, writes and locks (its `Footprint`), as its text says. Two steps whose
footprints have nothing in common may go in either order: `search` then tries only one of the two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import psycopg

from tests.sql.core import LOOK

# Inserts of these give numbers that order what others see, or fail where another has the same.
UNIQUE = frozenset({"publications", "dedup_keys", "consumers", "streams", "consumer_settings"})

# What each open transaction has; and which locks a look into pg_locks is about, by its text: else
# it is about all open transactions.
OPEN = "open"
LOOKED_AT = {
    "lock_class_publish": "lock publish",
    "lock_class_waiting": "lock waiting",
    "pgqueue.seq_": "lock seq",
}

# In each function, in place of its waits.
PAUSE = """
create schema explore;
create table explore.nothing (nothing int);
create function explore.pause(p_step int) returns void language plpgsql as $$
declare
    v_pipe text := current_setting('explore.pipe', true);
begin
    if v_pipe <> '' then
        execute format('copy (select %s) to %L', p_step, v_pipe || '.at');
        execute format('copy explore.nothing from %L', v_pipe || '.go');
    end if;
end $$;
create function explore.sleep(p_seconds float8) returns void language plpgsql as $$
begin
    if current_setting('explore.pipe', true) <> '' then
        perform explore.pause(0);
    else
        perform pg_sleep(p_seconds);
    end if;
end $$;
create function explore.sleep(p_time interval) returns void language sql
as 'select explore.sleep(extract(epoch from p_time)::float8)';
"""

FUNCTIONS = """
select p.oid, n.nspname || '.' || p.proname, l.lanname, p.provolatile, p.prosrc,
       pg_get_functiondef(p.oid)
from pg_proc p join pg_namespace n on n.oid = p.pronamespace join pg_language l on l.oid = p.prolang
where n.nspname in ('pgqueue', '_pgqueue') and p.prokind in ('f', 'p')
order by 1
"""
TABLES = """
select c.relname, case when c.relkind = 'v' then pg_get_viewdef(c.oid) end
from pg_class c where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'p', 'v')
"""
PARENTS = """
select c.conrelid::regclass::text, c.confrelid::regclass::text
from pg_constraint c where c.contype = 'f' and c.connamespace = 'pgqueue'::regnamespace
"""


@dataclass(frozen=True)
class Footprint:
    """What a step does, by the names of tables and locks."""

    reads: frozenset[str] = frozenset()
    inserts: frozenset[str] = frozenset()
    shares: frozenset[str] = frozenset()  # locks that several may have
    locks: frozenset[str] = frozenset()  # locks of one, also by an update or a delete
    ddl: frozenset[str] = frozenset()
    # What others see before a commit: sequences that it moves; those, and locks, that it looks at
    moves: frozenset[str] = frozenset()
    looks: frozenset[str] = frozenset()

    def __or__(self, other: Footprint) -> Footprint:
        return Footprint(
            *(getattr(self, name) | getattr(other, name) for name in self.__dataclass_fields__)
        )

    def __bool__(self) -> bool:
        return self != NOTHING

    @property
    def changes(self) -> frozenset[str]:
        """What a commit after this step shows to others, or lets go of."""
        return self.inserts | self.locks | self.ddl | self.shares

    @property
    def touches(self) -> frozenset[str]:
        return self.reads | self.changes | self.moves | self.looks

    def conflicts(self, other: Footprint) -> bool:
        """Whether two steps of open transactions may not change places."""
        return bool(
            self.locks & (other.locks | other.shares)
            or self.shares & other.locks
            or self.inserts & other.inserts & UNIQUE
            or self.ddl & other.touches
            or self.touches & other.ddl
            or self.moves & (other.moves | other.looks)
            or self.looks & (other.moves | other.locks | other.shares)
            or (self.locks | self.shares) & other.looks
        )


NOTHING = Footprint()


@dataclass
class Step:
    """A statement with a pause before it."""

    number: int
    function: str
    text: str
    footprint: Footprint


@dataclass
class Function:
    oid: int
    name: str
    definition: str
    source: str
    paused: bool  # has a pause before each statement
    head: str = ""  # what runs before the first pause
    statements: list[tuple[int, str]] = field(default_factory=list)  # where it begins, its text


TOKEN = re.compile(
    r"--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|\$(\w*)\$.*?\$\1\$|<<\w+>>|\w+|[();]|\s+|.", re.DOTALL
)
NO_STATEMENT = {"end", "elsif", "else", "exception", "when", "declare", "begin"}


def statements(source: str) -> tuple[str, list[tuple[int, str]]]:
    """The declarations of a body in PL/pgSQL, and each statement: where it begins, its text.

    The text of an `if` has its conditions, of a loop its head, with the comments behind.
    """
    tokens = [(m.start(), m.group()) for m in TOKEN.finditer(source)]
    found: list[list[Any]] = []
    ifs: list[int] = []  # the statements `if` that have not ended
    at: int | None = None  # the statement to which the tokens belong
    depth, cases, awaited, before = 0, 0, False, ""
    head = None
    for place, token in tokens:
        word = token.lower()
        if not token.isspace() and not token.startswith(("--", "/*")):
            if awaited and word not in NO_STATEMENT:
                at = len(found)
                if before.startswith("<<"):  # no pause comes between a label and its loop
                    at -= 1
                else:
                    found.append([place, ""])
                    head = place if head is None else head
                if word == "if":
                    ifs.append(at)
                awaited = token.startswith("<<")
            elif awaited:
                at = ifs[-1] if word == "elsif" else None
                awaited = False
            elif word == "if" and before == "end":
                ifs.pop()
            depth += (word == "(") - (word == ")")
            if word == "case":
                cases += 1
            elif word == "end" and cases:
                cases -= 1
            elif not depth and not cases and (head is not None or word == "begin"):
                awaited = awaited or word in {";", "then", "else", "loop", "begin"}
            before = word
        if at is not None:
            found[at][1] += token
        if "\n" in token and awaited:
            at = None  # (a comment on the same line is the statement's)
    return source[: head or len(source)], [(place, text) for place, text in found]


def words(text: str) -> str:
    """A text without comments, but for the names of locks, which comments give."""
    locks = re.findall(r"-- lock: ([\w ]+)", text)
    return re.sub(r"--[^\n]*", "", text) + "".join(f" §{lock.strip()}§" for lock in locks)


class Footprints:
    """What texts do, by the tables and the functions that they name."""

    def __init__(self, conn: psycopg.Connection, functions: list[Function]):
        tables = conn.execute(TABLES).fetchall()
        self.views = {name: view for name, view in tables if view is not None}
        self.tables = {name for name, view in tables if view is None}
        self.parents: dict[str, set[str]] = {}
        for child, parent in conn.execute(PARENTS).fetchall():
            self.parents.setdefault(plain(child), set()).add(plain(parent))
        self.functions: dict[str, list[Function]] = {}
        for function in functions:
            self.functions.setdefault(function.name, []).append(function)
        self.known: dict[str, Footprint] = {}

    def of(self, text: str) -> Footprint:
        found = self.direct(words(text))
        for name in re.findall(r"(_?pgqueue\.\w+)\s*\(", words(text)):
            found |= self.called(name)
        return found

    def called(self, name: str) -> Footprint:
        """What a call does before its first pause; all that it does, where it has none."""
        if name not in self.known:
            self.known[name] = NOTHING  # (a function that calls itself)
            found = NOTHING
            for function in self.functions.get(name, []):
                found |= self.of(function.head if function.paused else function.source)
            self.known[name] = found
        return self.known[name]

    def direct(self, text: str) -> Footprint:
        named = [
            name
            for before, name, behind in NAMED.findall(text)
            if before or not behind  # (a type, or a call)
        ]
        reads = {name for name in named if name in self.tables}
        for name in named:
            if name in self.views:
                reads |= self.of_view(name)
        inserts = set(re.findall(r"insert\s+into\s+pgqueue\.(\w+)", text)) & self.tables
        locks = set(re.findall(r"(?:update|delete\s+from)\s+(?:only\s+)?pgqueue\.(\w+)", text))
        locks &= self.tables
        shares: set[str] = set()
        for name in inserts:
            shares |= self.parents.get(name, set())
        if re.search(r"\bon conflict\b", text):
            locks |= inserts
        if re.search(r"\bfor (no key )?update\b", text):
            locks |= reads
        elif re.search(r"\bfor (key )?share\b", text):
            shares |= reads
        ddl: set[str] = set()
        moves = {sequence(about) for about in re.findall(r"\b(?:nextval|setval)\s*\((.*)", text)}
        looks = {sequence(about) for about in re.findall(r"\bpg_sequence_last_value\((.*)", text)}
        if "pg_locks" in text:
            looks |= {lock for sign, lock in LOOKED_AT.items() if sign in text} or {OPEN}
        if re.search(r"\bexecute\b|%I|%s", text) and re.search(r"messages|%s|%I", text):
            reads.add("messages")
            if re.search(r"insert into", text):
                inserts.add("messages")
        if re.match(r"execute\b", text) and re.search(r"\b(drop|alter|truncate)\b", text):
            # (a table that is created is known to nobody until it is attached)
            ddl |= (
                {"messages", "seq", "publication", "room"} if "sequence" in text else {"messages"}
            )
        for lock in re.findall(r"§([^§]+)§", text):
            if re.search(r"_shared\(", text):
                shares.add("lock " + lock)
            else:
                locks.add("lock " + lock)
        moves.discard("")
        looks.discard("")
        shares |= {f"lock {name}" for name in moves}  # Postgres locks a sequence that is moved
        return Footprint(
            *map(frozenset, (reads, inserts, shares - locks, locks, ddl, moves, looks - moves))
        )

    def of_view(self, name: str) -> set[str]:
        text = self.views[name]
        named = set(re.findall(r"\b(?:pgqueue\.)?(\w+)\b", text))
        return named & self.tables


NAMED = re.compile(
    r"(?:\b(from|join|into|update|using|only|table)\s+)?(?<!:)\bpgqueue\.(\w+)\b(\s*(?:\(|;|:=|\[))?"
)


def sequence(about: str) -> str:
    """Which sequence a text means whose value means something to others; else an empty text."""
    for name in ("publication", "room", "claim_numbers", "gap_numbers", "maintain_turns"):
        if name in about:
            return name if name in {"publication", "room"} else ""
    return "" if "reserved_" in about else "seq"


def plain(name: str) -> str:
    return name.rpartition(".")[2]


def read_functions(conn: psycopg.Connection) -> list[Function]:
    found = []
    for oid, name, language, volatility, source, definition in conn.execute(FUNCTIONS).fetchall():
        paused = language == "plpgsql" and volatility == "v"
        function = Function(oid, name, definition, source or "", paused)
        if paused:
            function.head, function.statements = statements(source)
        found.append(function)
    return found


def instrument(conn: psycopg.Connection) -> tuple[dict[int, Step], Footprints]:
    """Rewrite the functions of a database; returns the steps by number. Needs a superuser."""
    conn.execute((PAUSE + LOOK).encode())
    functions = read_functions(conn)
    footprints = Footprints(conn, functions)
    steps = {0: Step(0, "sleep", "pg_sleep", NOTHING)}
    for function in functions:
        if not function.paused:
            continue
        places: list[tuple[int, int]] = []
        for place, text in function.statements:
            footprint = footprints.of(text)
            if footprint:
                number = len(steps)
                steps[number] = Step(number, function.name, text, footprint)
                places.append((place, number))
        source = function.source
        for place, number in reversed(places):
            source = f"{source[:place]}perform explore.pause({number}); {source[place:]}"
        source = re.sub(r"(?<!\.)\bpg_sleep(_for)?\(", "explore.sleep(", source)
        if source != function.source:
            changed = function.definition.replace(function.source, source)
            assert changed != function.definition, function.name
            conn.execute(changed.encode())
    return steps, footprints
