"""Programs in a terminal, as pictures: what they print, drawn by rich."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

WIDTH = 108
ELSEWHERE = re.compile(r"@font-face \{.*?\}", re.DOTALL)
"""Fonts that rich would take from the internet."""

REDRAWN = re.compile(r"(?:\r?\x1b\[\d*[AK])+")
"""Where rich goes back to the beginning of what it shows live, to show it again."""


def run(command: list[str], environment: dict[str, str], folder: Path) -> str:
    """Run a program in a terminal of its own; returns what it printed there."""
    master, slave = pty.openpty()
    terminal = {"TERM": "xterm-256color", "COLUMNS": str(WIDTH), "LINES": "30"}
    with subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={**os.environ, **environment, **terminal},
    ) as process:
        os.close(slave)
        printed = b""
        while part := _read(master):
            printed += part
        errors = process.stderr.read() if process.stderr else b""
    os.close(master)
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}: {errors.decode()}")
    return printed.decode().replace("\r\n", "\n")


def _read(master: int) -> bytes:
    try:
        return os.read(master, 65536)
    except OSError:  # the last program at the other end has ended
        return b""


def last_screen(printed: str) -> str:
    """What stands there in the end, of a program that shows something again and again."""
    return re.sub(r"\x1b\[\?25[hl]", "", REDRAWN.split(printed)[-1]).strip("\n")


def draw(screen: str, title: str, picture: Path) -> None:
    """Write a picture of a terminal."""
    texts = [Text.from_ansi(line) for line in screen.splitlines()]
    width = max(text.cell_len for text in texts)
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=width, file=nowhere)
        for text in texts:
            console.print(text, no_wrap=True)
    svg = console.export_svg(title=title, theme=MONOKAI, unique_id="terminal")
    picture.write_text(ELSEWHERE.sub("", svg))
