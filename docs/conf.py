"""How Sphinx builds the site of this folder; `tools/docs` runs it."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "site"), str(HERE.parent / "tools")]

import commands
import page_tables
import pictures
import reference
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from typing_extensions import is_typeddict

import casckpt
from benchmarks.show import markdown

project = "casckpt"
version = release = casckpt.__version__
html_title = f"casckpt {release}"
html_theme = "furo"
html_static_path = ["site/static"]
html_css_files = ["casckpt.css"]
html_show_copyright = False
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["README.md", "api", "site", "Thumbs.db"]
root_doc = "index"
suppress_warnings = ["misc.highlighting_failure"]  # a quote that is open at the end of a line of console
default_role = "py:obj"  # what docstrings name in single quotes
myst_heading_anchors = 4  # as GitHub has them
myst_enable_extensions = ["colon_fence"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"
html_theme_options = {"navigation_with_keys": True}


def _source_read(app: Sphinx, name: str, source: list[str]) -> None:
    text = page_tables.inserted(pictures.inlined(source[0]))
    if name == "examples/README":
        text += "".join(_listing(path.name) for path in sorted((HERE / "examples").glob("*.py")))
    if name == "benchmarks":
        text += "\n```{toctree}\n:hidden:\n:glob:\n\n_benchmarks/*\n```\n"
    text = re.sub(r"\]\((\.\./)?benchmarks/(\w[\w-]*)\.json\)", r"](\1_benchmarks/\2.md)", text)
    if name == "cli":
        text += f"\n{commands.sections()}"
    if name == "decisions/README":
        text += "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"
    for page in ("api/README.md", "README.md"):
        text = text.replace(f"]({page}", "](index.md")
    source[0] = text.replace("](api/", "](_api/").replace("](../api/", "](../_api/")


def _listing(name: str) -> str:
    return f"\n## {name}\n\n```{{literalinclude}} {name}\n```\n"


def _signature(app: Sphinx, what: str, name: str, obj: object, options: Any, given: str, returns: str) -> Any:  # noqa: PLR0917 (Sphinx calls it)
    """Name the keyword arguments that a function takes as ``**options``."""
    if not callable(obj) or inspect.isclass(obj):
        return None
    try:
        found = inspect.signature(obj)
    except (TypeError, ValueError):
        return None
    known = {
        one.__name__: one
        for module in list(sys.modules.values())
        if module.__name__.startswith("casckpt")
        for one in vars(module).values()
        if is_typeddict(one)
    }
    listed = [*reference.keywords(found, known)]
    return str(found.replace(parameters=listed, return_annotation=inspect.Signature.empty)), returns


def setup(app: Sphinx) -> None:
    """Write the pages of the reference and of the benchmarks' results, and connect what Sphinx calls for each page."""
    app.add_lexer("crontab", TextLexer)
    reference.write(HERE / "_api")
    markdown.write_pages(HERE / "benchmarks", HERE / "_benchmarks")
    app.connect("source-read", _source_read)
    app.connect("autodoc-process-signature", _signature)
