"""The program `pgqueue`: its groups of commands, and its errors, each as a line and a hint."""

from __future__ import annotations

import io
import re
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any, NoReturn

import psycopg
import typer
from typer.core import TyperGroup

from spark_pgqueue import __version__, client, nearest
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.retrying import is_database_error
from spark_pgqueue.postgres.url import redact
from spark_pgqueue.printable import printable

EXIT_CODES = {
    0: "success; also after Ctrl-C or --wait ends `work`, or SIGTERM one that runs as a service",
    1: "an error, printed as one line and usually a hint; or a prompt was answered with no",
    2: "usage error; nothing was changed",
    3: "`receive --exit-code` received nothing (for sensors and shell loops)",
    130: "interrupted by Ctrl-C",
}

# Hints of the database that name SQL functions, and the commands to show instead.
_QUOTED = "('(?:[^']|'')*')"
_AS_COMMANDS = {
    rf"select pgqueue\.create_stream\({_QUOTED}\)": r"pgqueue stream create \1",
    rf"select pgqueue\.alter_stream\({_QUOTED}, '{{\"([^\"]*)\": \"([^\"]*)\"}}'\)": (
        r"pgqueue stream set \1 \2='\3'"
    ),
    rf"select pgqueue\.create_consumer\({_QUOTED}, {_QUOTED}\)": r"pgqueue consumer create \1 \2",
    rf"select pgqueue\.create_group\({_QUOTED}, {_QUOTED}\)": r"pgqueue group create \1 \2",
    rf"select pgqueue\.release\({_QUOTED}, {_QUOTED}\)": r"pgqueue release \1 \2",
    r"select pgqueue\.create_roles\(\); grant pgqueue_(\w+) to ": r"pgqueue grant \1 ",
    r"The view pgqueue\.captures lists": "pgqueue capture lists",
    r"The view pgqueue\.stream_archives lists": "pgqueue archive list lists",
    r"Call (recover|maintain)\(\)": r"Run pgqueue \1",
    r"call recover\(\)": "run pgqueue recover",
    r"Use seek,": "Run pgqueue consumer seek,",
    r"Use receive, or create_group with": "Use pgqueue receive, or pgqueue group create with",
    r"Use lease_partitions and read_partitions, or create_consumer with": (
        "Read it from a program with queue.group(...), or use pgqueue consumer create with"
    ),
    r"Pass an offset that read, read_to or start_offset returned": (
        "Pass an offset that pgqueue tail --no-follow printed"
    ),
    r"with alter_consumer": "with pgqueue consumer set",
    r"see create_consumer; if read by offset, see set_retention": (
        "see pgqueue consumer create; if read by offset, see pgqueue stream retention"
    ),
    r"see set_retention": "see pgqueue stream retention",
    r"see set_archive": "see pgqueue archive set",
    r"with alter_stream": "with pgqueue stream set",
    r"set replace": "pass --replace",
    r"Set if_not_exists": "Pass --if-not-exists",
    r"use alter_stream": "use pgqueue stream set",
    r"use alter_consumer": "use pgqueue consumer set",
    r"pass null to publish": "leave --consumer away to publish",
}


# The commands, in the order and under the headings of the help, with their modules in `commands`.
PANELS = {
    "Messages": {
        "send": "messages", "receive": "messages", "ack": "messages", "nack": "messages",
        "defer": "messages", "retry": "messages", "cancel": "messages", "postpone": "messages",
        "work": "work", "peek": "peeking", "tail": "messages", "explain": "seeing",
        "outcome": "outcomes", "history": "outcomes",
    },
    "Streams and consumers": {
        "stream": "streams", "consumer": "consumers seeing", "group": "groups",
        "schedule": "schedules", "capture": "tables", "release": "tables", "describe": "peeking",
        "claim": "peeking", "dead": "dead", "purge": "peeking",
    },
    "Seeing it": {
        "stats": "seeing", "top": "seeing", "web": "seeing", "metrics": "seeing",
        "checkpoint": "checkpoint",
    },
    "The database": {
        "up": "server", "down": "server", "install": "schema", "sql": "schema", "grant": "schema",
        "maintain": "upkeep", "deploy": "deploy", "archive": "archive", "recover": "upkeep",
        "doctor": "upkeep", "uninstall": "schema", "demo": "upkeep",
    },
}  # fmt: skip

MODULES = {name: which.split() for names in PANELS.values() for name, which in names.items()}

_ORDER = [*MODULES]


class _Commands(TyperGroup):
    """The commands, with errors as one line and a hint instead of a traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=lambda name: (*_ORDER, name).index(name))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        for panel, names in PANELS.items():
            if cmd_name in names:
                command.rich_help_panel = panel  # type: ignore[union-attr]
        return command

    def invoke(self, ctx: Any) -> Any:
        if sys.stdout is None:  # received messages would be acknowledged unseen
            fail("standard output is closed", hint="to discard the output, use > /dev/null")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # where it is not UTF-8
        try:
            return self._invoke(ctx)
        except PgQueueError as error:
            fail(error.message, error.hint)
        except psycopg.Error as error:
            fail(error.diag.message_primary or str(error), error.diag.message_hint)
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(0 if isinstance(interrupt, _Terminated) else 130) from None
        except BrokenPipeError:
            raise  # typer ends without a word
        except OSError as error:
            fail(str(error))
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if hasattr(error, "format_message") and hasattr(error, "message"):
                _clarify(error)
                raise
            from spark_pgqueue.worker.verdicts import trace  # for a user's hook, as a rule

            print(trace(error), file=sys.stderr)
            raise typer.Exit(1) from None

    def _invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception:
            if not _Terminated.came:
                raise
            raise _Terminated from None  # an error because of it, as of a statement that it ended


# No pretty exceptions: they show local variables, and a url may hold a password.
PLAIN: dict[str, Any] = {
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


_HELP = (
    "A message queue and stream in Postgres.\n\n"
    "A command takes its database from --url, else from PGQUEUE_URL, else from libpq's own "
    "environment (PGHOST, PGSERVICE, ...). Other users of the machine see a command line, and so a "
    "password in --url: keep it in PGQUEUE_URL, a password file (~/.pgpass, or PGPASSFILE) or a "
    "service."
)

_EPILOG = "Exit codes.\n\n" + "\n\n".join(f"{code}: {what}." for code, what in EXIT_CODES.items())


app: typer.Typer = typer.Typer(cls=_Commands, help=_HELP, epilog=_EPILOG, **PLAIN)


def sub_app(name: str, help: str) -> typer.Typer:
    """A group of commands: `pgqueue NAME ...`."""
    made = typer.Typer(help=help, **PLAIN)
    app.add_typer(made, name=name)
    return made


# Two modules have commands of this one.
consumer_app: typer.Typer = sub_app("consumer", "Create, change, move, drop and list consumers.")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pgqueue {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None: ...


def connect(url: str | None) -> client.Client:
    # No patience: a user who types a command should see immediately that Postgres is away.
    return client.connect(url, patience=0)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends all that Ctrl-C ends."""

    came = False


def end_at_sigterm() -> None:
    """Let SIGTERM end the program with code 0, also the first process of a container, for which
    Linux ignores signals that have no handler.
    """

    def end(*_: object) -> NoReturn:
        _Terminated.came = True
        raise _Terminated

    signal.signal(signal.SIGTERM, end)


def repeat(work: Callable[[], None], every: timedelta | None, passes: Callable[..., bool]) -> None:
    """Do something once; or at an interval until it is interrupted, also after errors that pass."""
    if every is not None:
        end_at_sigterm()
    while True:
        begun = time.monotonic()
        try:
            work()
        except Exception as error:
            is_known = isinstance(error, PgQueueError | OSError) or is_database_error(error)
            if every is None or _Terminated.came or not is_known or not passes(error):
                raise
            print(f"pgqueue: {redact(str(error))}", file=sys.stderr, flush=True)
        if every is None:
            return
        time.sleep(max(0.0, every.total_seconds() - (time.monotonic() - begun)))


def fail(message: str, hint: str | None = None) -> NoReturn:
    print("pgqueue:", one_line(message), file=sys.stderr)
    if hint:
        print("hint:", one_line(as_commands(hint)), file=sys.stderr)
    raise typer.Exit(1)


def as_commands(hint: str) -> str:
    """A hint with commands of this program instead of SQL functions."""
    for sql, command in _AS_COMMANDS.items():
        hint = re.sub(sql, command, hint)
    return hint


def _clarify(error: Any) -> None:
    """Clarify the message of an error about the command line itself."""
    # Of newer versions of Typer: "Input should be a valid integer", without the value.
    if type(error.__cause__).__name__ == "ValidationError":  # of Pydantic
        value = redact(repr(error.__cause__.errors()[0].get("input")), 100)
        text = error.message.removeprefix("Value error, ")
        error.message = text if value in text else f"{value}: {text[:1].lower()}{text[1:]}"
    # A url in the wrong place: "Got unexpected extra argument (postgresql://...)".
    error.message = printable(redact(error.message))
    context = getattr(error, "ctx", None)
    if context and context.command.name == "send" and "extra argument" in error.message:
        error.message += ": give the payload with --data"
    name = getattr(error, "option_name", None)
    if context and name and (hint := nearest.meant(name, names_of(context.command))):
        error.message, error.possibilities = f"{error.message}: {hint}", None


def names_of(command: Any) -> list[str]:
    """The options of a command, as they are typed, and its arguments, as its usage has them."""
    arguments = [each.metavar for each in command.params if each.param_type_name == "argument"]
    options = [max(each.opts, key=len) for each in command.params if each.opts]
    return [each for each in (*arguments, *options) if each and each.isascii()]


def one_line(text: str) -> str:
    return printable(redact(" ".join(text.split())))
