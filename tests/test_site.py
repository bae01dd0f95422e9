"""The site: each public name has a page, each picture matches its source, and the table of contents lists each page.

`tools/docs` builds the site itself with separate tools.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import page_tables
import pictures
import pytest
import reference

from casckpt import errors
from casckpt.base.units import parse_size
from casckpt.cli.commands.settings import _DEFAULTS
from casckpt.cli.types import ENV_STORE
from casckpt.frontends.follow import Follower
from casckpt.frontends.trainer import CheckpointerConfig
from casckpt.repository.repository import CACHE_VARIABLE, CREATE_VARIABLE, USER_VARIABLE, Repository
from casckpt.saving.options import SaveOptions
from casckpt.store.opening import open as open_store
from casckpt.store.types import NAMES
from tests.support.pages import commands_of, pattern
from tests.support.recipes import says_kill_it
from tests.support.scripts import run_script

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
EXAMPLES = sorted((DOCS / "examples").glob("*.py"))
FRONTENDS = ("accelerate", "convert", "dcp", "lightning", "megatron", "torchtitan", "trainer", "transformers")
NONE = (MISSING, inspect.Parameter.empty)
ELSEWHERE = {"rl_publish_follow", "read_without_casckpt"}  # tests/test_examples.py checks their output
KILLED = {path.stem for path in EXAMPLES if says_kill_it(path)}  # tests/test_recipes.py checks these


@pytest.mark.process  # front ends import matplotlib, which lists the fonts of the system
@pytest.mark.filterwarnings("ignore")  # from the imports of front ends
@pytest.mark.parametrize("stem", reference.api_pages())
def test_each_public_name_has_a_page(stem: str) -> None:
    page = reference.api_pages()[stem]
    pytest.importorskip(stem if stem in ("accelerate", "lightning", "torchtitan", "transformers") else "casckpt")
    assert sorted(page.examples) == reference.public_names(import_module(page.module))
    assert all("```py" in example or "](" in example for example in page.examples.values())


def test_the_results_of_methods_are_documented() -> None:
    names = {one.__name__ for one in reference.values()}
    assert {"GcResult", "VerifyResult", "SaveStats", "StoreUsage", "RunUsage", "Difference", "Change"} <= names
    assert not {"Store", "Checkpoint", "Repository"} & names


def test_each_front_end_has_a_page() -> None:
    assert {page.module for page in reference.api_pages().values()} == {
        "casckpt", "casckpt.errors", *(f"casckpt.frontends.{name}" for name in FRONTENDS)
    }  # fmt: skip


def test_every_page_of_the_site_is_written(tmp_path: Path) -> None:
    reference.write(tmp_path / "api", only={"casckpt", "errors"})
    assert ".. autoclass:: casckpt.Store\n   :members:" in (tmp_path / "api/casckpt/Store.md").read_text()
    assert ".. autofunction:: casckpt.open" in (tmp_path / "api/casckpt/open.md").read_text()
    assert ".. autoexception:: casckpt.errors.Damaged" in (tmp_path / "api/errors/Damaged.md").read_text()
    listed = (tmp_path / "api/casckpt.md").read_text()
    assert "| [Store](casckpt/Store.md) | Checkpoints of any number of runs" in listed


def test_the_site_names_keyword_arguments() -> None:
    from casckpt.saving.options import SaveArguments
    from casckpt.store.store import Store

    found = [*reference.keywords(inspect.signature(Store.save), {"SaveArguments": SaveArguments})]
    assert [str(one) for one in found[:3]] == ["state: State", "run: str = 'default'", "step: int"]
    assert {"metadata", "compress", "overwrite"} <= {one.name for one in found}


@pytest.mark.parametrize("source", sorted(pictures.PICTURES.glob("*.dot")), ids=lambda path: str(path.stem))
def test_each_picture_matches_its_source(source: Path) -> None:
    drawn = source.with_suffix(".svg").read_text()
    assert pictures.mark(source.read_text()) in drawn, "run: tools/docs --pictures"
    inside = pictures.inlined(f"![what it shows](pictures/{source.stem}.svg)")
    assert 'aria-label="what it shows"' in inside
    assert not re.search(r"<style|https?://(?!www\.w3\.org)|\n\s*\n", inside)


def test_each_page_is_in_the_table_of_contents() -> None:
    entries = set(re.findall(r"^(?:[\w.]+ <)?([\w/]+)>?$", (DOCS / "index.md").read_text(), re.MULTILINE))
    pages = {path.stem for path in DOCS.glob("*.md")} - {"README", "index"}
    assert pages | {"examples/README", "decisions/README"} <= entries
    assert {f"_api/{stem}" for stem in reference.api_pages()} <= entries


def test_links_to_api_pages_have_no_anchor() -> None:
    """The site writes these pages from docstrings, and their headings are not those of docs/api/."""
    texts = {path.name: path.read_text() for path in DOCS.rglob("*.md")}
    assert [name for name, text in texts.items() if re.search(r"\(api/\w+\.md#", text)] == []


def test_the_table_of_errors_matches_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `?(\w*)`? ?\| `([\w-]+)` \| (\d) \|", (DOCS / "api/errors.md").read_text(), re.M)
    known: dict[str, Any] = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.CasckptError)
    }
    assert {name: (kind, int(status)) for name, _, kind, status in rows} == {
        name: (value.kind, value.exit_status) for name, value in known.items()
    }
    for name, base, _, _ in rows[1:]:
        assert base in {one.__name__ for one in known[name].__mro__[1:]}


def test_each_environment_variable_is_documented() -> None:
    text = "".join(path.read_text() for path in (ROOT / "casckpt").rglob("*.py"))
    named = set(re.findall(r"os\.environ(?:\.get\(|\[)([A-Z_]+)\b", text))
    assert named == {"ENV_STORE", "CACHE_VARIABLE", "CREATE_VARIABLE", "USER_VARIABLE"}
    read = set(re.findall(r'os\.environ(?:\.get\(|\[)"(\w+)"|"(\w+)" in os\.environ', text))
    of_itself, for_commands = (DOCS / "environment.md").read_text().split("`casckpt follow --exec` sets")
    described = {name for row in re.findall(r"^\| (`.*?`) \|", of_itself, re.MULTILINE) for name in quoted(row)}
    assert described == {ENV_STORE, CACHE_VARIABLE, CREATE_VARIABLE, USER_VARIABLE, *("".join(one) for one in read)}
    assert set(re.findall(r"^\| `(\w+)` \|", for_commands, re.MULTILINE)) == set(
        re.findall(r"CASCKPT_\w+", inspect.getdoc(Follower) or "")
    )


def quoted(text: str) -> list[str]:
    """Return the strings in backticks."""
    return re.findall(r"`([^`]+)`", text)


def settings(heading: str) -> dict[str, str]:
    """Return the names in a table of docs/settings.md, with their defaults."""
    text = page_tables.inserted((DOCS / "settings.md").read_text())
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found, f"docs/settings.md has no section {heading!r}"
    return dict(re.findall(r"^\| `(\w+)`(?: \(.*?\))? \| ?(?:`(.*?)`)? \| \S.* \|$", found[1], re.MULTILINE))


def test_documented_store_settings_match_the_code() -> None:
    assert settings("Store settings") == _DEFAULTS
    assert list(_DEFAULTS) == list(NAMES)


def test_documented_settings_for_a_new_store_match_the_code() -> None:
    sizes = {name: parse_size(default) for name, default in settings("Sizes of a new store").items()}
    assert sizes == Repository.create.__kwdefaults__


def as_written(values: dict[str, Any]) -> dict[str, str]:
    """Return defaults as shown on a page. A name without a default has ""."""
    return {name: "" if value in NONE else repr(value).replace("'", '"') for name, value in values.items()}


def test_documented_arguments_of_open_match_the_code() -> None:
    parameters = [*inspect.signature(open_store).parameters.values()][1:]
    assert settings("Options of open") == as_written({one.name: one.default for one in parameters})


@pytest.mark.parametrize(
    ("heading", "kind"), [("Options of save", SaveOptions), ("Options of Checkpointer", CheckpointerConfig)]
)
def test_documented_save_settings_match_the_code(heading: str, kind: Any) -> None:
    assert settings(heading) == as_written({field.name: field.default for field in fields(kind)})


@pytest.mark.process
@pytest.mark.parametrize(
    "path", [one for one in EXAMPLES if one.stem not in ELSEWHERE | KILLED], ids=lambda path: str(path.stem)
)
def test_an_example_prints_its_documented_output(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for command, expected in commands_of(path):
        found = re.fullmatch(rf"(?:python|torchrun --nproc-per-node (\d+)) {path.name}", command)
        assert found is not None, command
        done = run_script(path, cwd=folder, ranks=int(found[1] or 0))
        assert done.status == 0, done.told
        assert re.fullmatch(pattern(expected), done.printed.strip()), done.printed


def test_every_example_is_listed() -> None:
    listed = set(re.findall(r"^\| \[(\w+\.py)\]", (DOCS / "examples/README.md").read_text(), re.MULTILINE))
    assert listed == {path.name for path in EXAMPLES}
