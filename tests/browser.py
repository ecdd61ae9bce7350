"""A headless Chromium, where the machine has one: for tests of pages, and for pictures of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HOW = "needs a browser: apt-get install -y chromium chromium-driver"


def found() -> bool:
    """Whether the machine has Chromium and its driver."""
    return all(_programs())


def _programs() -> tuple[str | None, str | None]:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    return browser, shutil.which("chromedriver")


@contextmanager
def headless(profile: Path) -> Iterator[Any]:
    """The browser with an empty profile in a folder; it asks nobody on the internet."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    binary, driver = _programs()
    if binary is None or driver is None:
        raise LookupError(HOW)
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in (
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run",
        "disable-background-networking", "disable-component-update", "disable-sync",
        "disable-dev-shm-usage", "window-size=1180,860", f"user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options, Service(driver))
    try:
        yield chrome
    finally:
        chrome.quit()
