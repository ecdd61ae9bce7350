"""`python -m tests.docs` writes what is generated; `make docs` does that."""

from __future__ import annotations

import tempfile
from pathlib import Path

from spark_pgqueue import embedded
from spark_pgqueue.postgres import connection, schema
from tests.docs import (
    comments,
    defaults,
    figures,
    hooks,
    options,
    promises,
    rows,
    settings,
    sql,
    stub,
)
from tests.endure import tally


def main() -> None:
    """Write all, from a schema that is installed for it."""
    for file in defaults.FILES:
        (defaults.ROOT / file).write_text(defaults.page(file))
    figures.write()
    stub.FILE.write_text(stub.stub())
    options.PAGE.write_text(options.page(options.PAGE.read_text()))
    comments.FILE.write_text(comments.file())
    hooks.FILE.write_text(hooks.file(hooks.FILE.read_text()))
    settings.PAGE.write_text(settings.page(settings.PAGE.read_text()))
    tally.write_page()
    promises.PAGE.write_text(promises.page())
    with (
        tempfile.TemporaryDirectory(prefix="pgqueue-docs-") as folder,
        embedded.start(Path(folder) / "data") as server,
        connection.connect(server.url) as conn,
    ):
        schema.install(conn)
        sql.PAGE.write_text(sql.page(conn))
        rows.PAGE.write_text(rows.page(conn, rows.PAGE.read_text()))
    for file in (
        stub.FILE,
        options.PAGE,
        comments.FILE,
        hooks.FILE,
        settings.PAGE,
        sql.PAGE,
        rows.PAGE,
        tally.PAGE,
        promises.PAGE,
    ):
        print(file)


if __name__ == "__main__":
    main()
