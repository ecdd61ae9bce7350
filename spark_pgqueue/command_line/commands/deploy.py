"""`pgqueue deploy`: files to run a queue where applications run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from spark_pgqueue.command_line.app import app

FOLDER = Path(__file__).parents[2] / "deploy"


class Where(StrEnum):
    """The files."""

    systemd = "systemd"
    systemd_maintain = "systemd-maintain"
    kubernetes = "kubernetes"
    compose = "compose"
    roles = "roles"


@app.command("deploy")
def print_file(
    where: Annotated[Where, typer.Argument(show_default=False, help="Which file.")],
) -> None:
    """Print a template: a systemd unit, a manifest, a compose file, or the roles as SQL.

    Its comments say where to save it, what to adapt, and where to put passwords.
    """
    (file,) = FOLDER.glob(f"{where}.*")
    print(file.read_text(), end="")
