"""Sphinx's configuration of the site: it reads the pages where they stand."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pygments.lexer import inherit
from pygments.lexers.sql import PostgresLexer
from pygments.token import Name

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.site import navigation

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "spark-pgqueue"
extensions = ["myst_nb"]
root_doc = "README"
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
include_patterns = ["*.md", "sql/**", "spark_pgqueue/**", "tests/**", "notebooks/**"]
exclude_patterns = [".*", "**/.*", "**/__pycache__"]

myst_heading_anchors = 4  # as GitHub has them
myst_enable_extensions = ["attrs_inline"]
nb_execution_mode = "off"  # a notebook is stored with its outputs

html_theme = "furo"
html_title = "spark-pgqueue"
html_additional_pages = {"index": "to-readme.html"}
templates_path = ["."]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}

PICTURE = re.compile(
    r'<picture>.*?srcset="(?P<dark>[^"]+)".*?alt="(?P<alt>[^"]+)".*?src="(?P<light>[^"]+)".*?</picture>',
    re.DOTALL,
)


class Psql(PostgresLexer):
    """SQL with commands of psql in it, such as `\\gset`."""

    tokens = {"root": [(r"\\\w+", Name.Builtin), inherit]}


def as_sphinx_wants(app: Sphinx, page: str, source: list[str]) -> None:
    """A picture for light and dark becomes two; the navigation is added where Sphinx looks."""
    source[0] = PICTURE.sub(
        r"![\g<alt>](\g<light>){.only-light}![\g<alt>](\g<dark>){.only-dark}", source[0]
    )
    if page == root_doc:
        source[0] += navigation.toctrees()
    elif page in navigation.BELOW:
        source[0] += navigation.below(page)


def setup(app: Sphinx) -> None:
    app.add_lexer("sql", Psql)
    app.connect("source-read", as_sphinx_wants)
