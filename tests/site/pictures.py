"""Makes the pictures of the pages, from programs that run.

`python -m tests.site.pictures` makes all of them, or those whose names it is given, each from a
Postgres with work in it. There is none of Grafana, which is in no registry that the project uses.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from PIL import Image
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

import spark_pgqueue
from spark_pgqueue import serving, web
from spark_pgqueue.postgres import embedded
from tests.browser import headless
from tests.pages import ROOT
from tests.site import terminal

PICTURES = ROOT / "spark_pgqueue/guide/pictures"
LOOKED_AT = ROOT / "build/pictures"
"""Pictures of the page for a person who looks whether a change has broken it."""
WIDTHS = (360, 800, 1280)

WATCHED = """
import os
import spark_pgqueue
from tests.sessions import session

spark = session()
orders = spark.readStream.format("pgqueue").option("url", os.environ["PGQUEUE_URL"])
orders = orders.option("stream", "orders").option("consumer", "reports")
orders = orders.option("maxMessagesPerTrigger", 20000).load()
query = orders.writeStream.format("noop").option("checkpointLocation", "checkpoint").start()
while not query.recentProgress:
    pass
spark_pgqueue.watch(query, seconds=8)
query.stop()
"""


@contextmanager
def working(folder: Path) -> Iterator[str]:
    """A queue at work: one that sends, two that receive, dead letters; gives its url."""
    with embedded.start(folder / "data") as server, spark_pgqueue.connect(server.url) as queue:
        queue.install()
        queue.create_stream("orders")
        queue.create_stream("invoices")
        for consumer in ("billing", "shipping", "reports"):
            settings = {"max_deliver_count": 1} if consumer == "shipping" else {}
            queue.create_consumer("orders", consumer, ordering="key", settings=settings)
        queue.create_consumer("invoices", "mail")
        queue.send_batch("orders", ['{"total": 12}'] * 300_000)
        queue.send_batch("invoices", ["invoice"] * 120)
        ended = threading.Event()
        workers = [
            threading.Thread(target=work, args=(server.url, ended)) for work in (_send, _receive)
        ]
        for worker in workers:
            worker.start()
        try:
            yield server.url
        finally:
            ended.set()
            for worker in workers:
                worker.join()


def _send(url: str, ended: threading.Event) -> None:
    with spark_pgqueue.connect(url) as queue:
        while not ended.wait(0.05):
            keys = [f"customer {number}" for number in range(100)]
            queue.send_batch("orders", ['{"total": 12}'] * 100, keys=keys)


def _receive(url: str, ended: threading.Event) -> None:
    with spark_pgqueue.connect(url) as queue:
        while not ended.wait(0.02):
            if claim := queue.receive("orders", "billing", max_messages=900):
                claim.ack()
            if claim := queue.receive("orders", "shipping", max_messages=400):
                claim.dead_letter(claim.messages[:1], reason="no such address")
                claim.ack()


def top(folder: Path) -> None:
    """`pgqueue top`, after three looks."""
    with working(folder) as url:
        command = [str(Path(sys.executable).with_name("pgqueue")), "top", "--count", "4"]
        printed = terminal.run([*command, "--interval", "1"], {"PGQUEUE_URL": url}, folder)
    terminal.draw(terminal.last_screen(printed), "pgqueue top", PICTURES / "top.svg")


def watch(folder: Path) -> None:
    """`spark_pgqueue.watch` of a query."""
    (folder / "watched.py").write_text(WATCHED)
    with working(folder) as url:
        python = {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
        command = [sys.executable, "watched.py"]
        printed = terminal.run(command, {"PGQUEUE_URL": url, **python}, folder)
    terminal.draw(
        terminal.last_screen(printed), "spark_pgqueue.watch(query)", PICTURES / "watch.svg"
    )


def web_page(folder: Path) -> None:
    """The page of `pgqueue web`."""
    with working(folder) as url, spark_pgqueue.connect(url) as queue:
        page = web.serve(queue, serving.Address("127.0.0.1", 0), title="shop", allow_actions=True)
        threading.Thread(target=page.serve_forever, daemon=True).start()
        with headless(folder / "profile") as browser:
            _photograph(browser, page.url, Path(web.__file__).with_name("screenshot.png"))
            for width in WIDTHS:
                for scheme in ("light", "dark"):
                    _set_screen(browser, width, scheme)
                    _photograph(browser, page.url, LOOKED_AT / f"web-{width}-{scheme}.png", 2)
        page.shutdown()


def _set_screen(browser: WebDriver, width: int, scheme: str) -> None:
    sized = {"width": width, "height": 1200, "deviceScaleFactor": 1, "mobile": width < 640}
    preferred = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sized)  # type: ignore[attr-defined]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", preferred)  # type: ignore[attr-defined]


def _photograph(browser: WebDriver, url: str, picture: Path, looks: int = 20) -> None:
    """When the page's curves have something to show; in few colours, and so in few bytes."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    browser.get(url)
    points = "return document.querySelector('polyline')?.points.numberOfItems || 0"
    WebDriverWait(browser, 120).until(lambda b: b.execute_script(points) > looks)
    with Image.open(BytesIO(browser.get_screenshot_as_png())) as image:
        image.quantize(64).save(picture, optimize=True)


MADE: dict[str, Callable[[Path], None]] = {
    "top": top,
    "watch": watch,
    "web": web_page,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or MADE:
        print(name)
        with tempfile.TemporaryDirectory(prefix="pgqueue-picture-") as temporary:
            MADE[name](Path(temporary))
