"""The first run of a newcomer with this queue, procrastinate and pgmq's client, timed.

    python -m tests.benchmarks.first_run

Each side is what its own first page shows, and ours also one script, as pgmq's is. All is typed
into an empty folder, against an empty database of one server: a job that handles two messages, of
which the second fails. `.[compare]` has the three packages. What counts is what is typed, lines of
Python and commands, and how long the commands run: of each command the shortest time of some rounds
in turns, because others use the machine too, and the first round finds nothing in a cache.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from rich.console import Console
from rich.table import Table

from spark_pgqueue import embedded


@dataclass
class Side:
    """What a newcomer types.

    Attributes:
        files: the text of each file.
        commands: what prepares, sends, and handles "billed 7" before a failure, "unlucky".
        failure: the command that shows why the second message failed; none: there is no such.
    """

    name: str
    files: dict[str, str]
    commands: list[str]
    failure: str | None = None
    env: dict[str, str] = field(default_factory=dict)


ROUNDS = 8

JOB = """
def bill(order: int):
    print("billed", order)
    if order == 13:
        raise ValueError("unlucky")
"""

OURS = Side(
    "spark-pgqueue",
    {
        "jobs.py": "from spark_pgqueue import handler\n\n"
        f'@handler("orders", "billing", keywords=True){JOB}'
    },
    [
        "pgqueue install",
        r"""printf '{"order": 7}\n{"order": 13}\n' | pgqueue send orders --create --lines""",
        "pgqueue work jobs --create --wait 0",
    ],
    "pgqueue explain orders billing 2",
)

SCRIPT = Side(
    "spark-pgqueue, a script",
    {
        "jobs.py": "import json\nimport os\nfrom datetime import timedelta\n"
        "from spark_pgqueue import Consumer, connect\n\n"
        'url = os.environ["PGQUEUE_URL"]\n' + JOB + "\nwith connect(url) as queue:\n"
        '    queue.create_stream("orders")\n'
        '    queue.create_consumer("orders", "billing")\n'
        """    queue.send_batch("orders", ['{"order": 7}', '{"order": 13}'])\n"""
        'Consumer(url, "orders", "billing").run(\n'
        "    lambda message: bill(**json.loads(message.data)), wait=timedelta(0)\n)\n"
    },
    ["pgqueue install", "python jobs.py"],
    "pgqueue explain orders billing 2",
)

PROCRASTINATE = Side(
    "procrastinate",
    {
        "jobs.py": "import os\nimport procrastinate\n\n"
        "app = procrastinate.App(\n"
        '    connector=procrastinate.PsycopgConnector(conninfo=os.environ["PGQUEUE_URL"])\n)\n\n'
        f'@app.task(queue="orders"){JOB}'
    },
    [
        "procrastinate --app=jobs.app schema --apply",
        """procrastinate --app=jobs.app defer jobs.bill '{"order": 7}'""",
        """procrastinate --app=jobs.app defer jobs.bill '{"order": 13}'""",
        "procrastinate --app=jobs.app worker --one-shot",
    ],
    env={"PYTHONPATH": "."},
)

PGMQ = Side(
    "pgmq",
    {
        "start.py": "import os\nimport psycopg\n"
        "from pgmq.install import get_embedded_install_sql\n\n"
        'with psycopg.connect(os.environ["PGQUEUE_URL"], autocommit=True) as conn:\n'
        "    conn.execute(get_embedded_install_sql())\n",
        "jobs.py": "import os\nfrom pgmq import PGMQueue\n"
        + JOB
        + '\nqueue = PGMQueue(conn_string=os.environ["PGQUEUE_URL"], init_extension=False)\n'
        'queue.create_queue("orders")\n'
        'queue.send("orders", {"order": 7})\n'
        'queue.send("orders", {"order": 13})\n'
        'while message := queue.read("orders", vt=30):\n'
        "    try:\n"
        "        bill(**message.message)\n"
        '        queue.delete("orders", message.msg_id)\n'
        "    except ValueError as error:\n"
        '        print("failed", error)\n',
    },
    ["python start.py", "python jobs.py"],
)


def first_run(side: Side, url: str) -> tuple[list[float], str]:
    """Type it all.

    Returns:
        the seconds of each command, and what it says of the failure when it is asked.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PGQUEUE_URL": url, "PYTHONUNBUFFERED": "1", **side.env}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # pip has compiled the packages of the others
    with tempfile.TemporaryDirectory() as folder:
        for name, text in side.files.items():
            Path(folder, name).write_text(text)

        def run(command: str) -> str:
            done = subprocess.run(command, shell=True, cwd=folder, env=env, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
            return done.stdout

        said, seconds = "", []
        for command in side.commands:
            begin = time.perf_counter()
            said = run(command)
            seconds.append(time.perf_counter() - begin)
        assert "billed 7" in said, said
        assert "unlucky" in said, said
        return seconds, run(side.failure) if side.failure else ""


def main() -> None:
    sides = (OURS, SCRIPT, PROCRASTINATE, PGMQ)
    best = {side.name: [float("inf")] * len(side.commands) for side in sides}
    with (
        tempfile.TemporaryDirectory(prefix="pgqueue-first-") as folder,
        embedded.start(Path(folder) / "data") as server,
        psycopg.connect(server.url, autocommit=True) as conn,
    ):
        for round_ in range(ROUNDS):
            for side in sides:
                database = re.sub(r"\W+", "_", f"{side.name} {round_}")
                conn.execute(f"create database {database}".encode())
                url = make_conninfo(**{**conninfo_to_dict(server.url), "dbname": database})
                seconds, said = first_run(side, url)
                assert not side.failure or "ValueError: unlucky" in said, said
                best[side.name] = list(map(min, best[side.name], seconds))
    table = Table("side", "lines of Python", "commands", "seconds", "shows the failure")
    for side in sides:
        lines = sum(bool(line.strip()) for t in side.files.values() for line in t.splitlines())
        counts = str(lines), str(len(side.commands)), f"{sum(best[side.name]):.2f}"
        table.add_row(side.name, *counts, side.failure or "no")
    Console().print(table)


if __name__ == "__main__":
    main()
