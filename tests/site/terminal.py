"""Programs in a terminal, as pictures: what they print, drawn by rich, in the time it took."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

WIDTH = 108
ELSEWHERE = re.compile(r"@font-face \{.*?\}", re.DOTALL)
"""Fonts that rich would take from the internet."""

REDRAWN = re.compile(r"(?:\r?\x1b\[\d*[AK])+")
"""Where rich goes back to the beginning of what it shows live, to show it again."""


class Shown(NamedTuple):
    """A line on the screen, and when it came, in seconds."""

    text: str
    at: float


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


def draw(lines: list[Shown], title: str, picture: Path) -> None:
    """Write a picture of a terminal, in which each line comes when it came."""
    texts = [Text.from_ansi(line.text) for line in lines]
    width = max(text.cell_len for text in texts)
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=width, file=nowhere)
        for text in texts:
            console.print(text, no_wrap=True)
    svg = console.export_svg(title=title, theme=MONOKAI, unique_id="terminal")
    picture.write_text(_moving(ELSEWHERE.sub("", svg), [line.at for line in lines]))


def _moving(svg: str, times: list[float]) -> str:
    """A picture whose lines come one after the other, where the reader lets pictures move."""
    if not any(times):
        return svg
    rules = "".join(
        f'[clip-path="url(#terminal-line-{number})"] {{ animation-delay: {at:.1f}s }}\n'
        for number, at in enumerate(times)
    )
    style = f"""
    @keyframes come {{ from {{ opacity: 0 }} to {{ opacity: 1 }} }}
    @media (prefers-reduced-motion: no-preference) {{
    [clip-path^="url(#terminal-line-"] {{ animation: come 0.01s both }}
    {rules}}}
    </style>"""
    return svg.replace("</style>", style, 1)


def typed(commands: list[str], environment: dict[str, str], folder: Path) -> list[Shown]:
    """Commands that a reader types into one shell, with what they print."""
    lines, clock = [], 0.5
    kept = folder / ".exported"
    for command in commands:
        clock += 0.6
        lines.append(Shown(f"\x1b[1;32m$\x1b[0m {command}", clock))
        begun = time.monotonic()
        script = f"[ ! -e {kept} ] || . {kept}; {command}\nexport -p > {kept}"
        printed = run(["bash", "-c", script], environment, folder)
        clock += min(time.monotonic() - begun, 1.5)
        lines += [Shown(line, clock) for line in printed.splitlines()]
    return lines
