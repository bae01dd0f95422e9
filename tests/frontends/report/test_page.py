"""A report is one small, self-contained page for any store."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("matplotlib", reason="needs casckpt[report]")
import casckpt
from casckpt.cli.main import cli
from casckpt.errors import NotFound
from casckpt.frontends.report import page, write_report
from casckpt.frontends.report.page import group, heat, layer_of, summed
from casckpt.store.store import Store

pytestmark = pytest.mark.process  # matplotlib lists the system's fonts


EMPTY = {"meta", "link", "br", "path", "use", "image", "rect", "circle"}


class Checker(HTMLParser):
    """Checks that every HTML tag is closed, and that the page does not fetch or run anything."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"script", "iframe", "object"}
        assert not [name for name, _ in attrs if name.startswith("on")]
        self.fetched += [value or "" for name, value in attrs if name in {"src", "href", "xlink:href"}]
        if tag not in {"meta", "link", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in {"meta", "link", "br"}:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def checked(text: str) -> str:
    """Check that a page is self-contained, and return its words."""
    assert len(text.encode()) < 300_000
    found = Checker(text)
    assert all(one.startswith(("#", "data:")) for one in found.fetched)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    return " ".join(found.words)


def test_the_page_shows_growth_runs_layers_and_checkpoints(store: Store) -> None:
    words = checked(page(store))
    for word in ("sft@40", "other@1", "best", "model.layers.3", "separately", "changed: model 4.0 KiB", "No damage"):
        assert word in words
    assert "gc --keep-last 3 would eventually free" in words
    # growth, runs, and two charts of sft; none of the other run, which has nothing to compare
    assert page(store).count("<svg") == 2 + 2 + 1


def test_names_from_a_store_are_escaped(store_path: Path) -> None:
    store = casckpt.open(store_path)
    bad = "<script>alert(1)</script>&$x_1$\n"
    for step in (1, 2):
        store.save({bad: {"0": torch.full((9,), float(step)), "1": torch.ones(9)}}, run="x", step=step)
    words = checked(page(store))
    assert "<script>" in words


def test_the_page_shows_where_a_checkpoint_came_from(store_path: Path) -> None:
    store = casckpt.open(store_path)
    store.save({"w": torch.ones(9)}, step=1, lineage={"imported_from": {"path": "/data/<b>base"}})
    words = checked(page(store))
    assert "imported from /data/<b>base" in words


def test_the_page_of_a_store_with_many_checkpoints_is_small(store_path: Path) -> None:
    store = casckpt.open(store_path)
    for run in range(13):
        for step in range(1, 13):
            state = {f"layers.{n}": torch.full((2,), float(step)) for n in range(60)}
            store.save({"model": state}, run=f"a-run-with-a-long-name/of-a-sweep-{run}", step=step)
    words = checked(page(store))
    assert "1 more are not shown" in words
    assert "The newest 150 of 156" in words


def test_the_page_of_a_damaged_store_reports_the_damage(store: Store, store_path: Path) -> None:
    for path in store_path.rglob("objects/**/*"):
        if store.get("sft@20").id in path.name:
            path.unlink()
    words = checked(page(casckpt.open(store_path)))
    assert "cannot be read" in words
    assert "sft@40" in words


def test_the_report_of_an_empty_store_has_a_page(store_path: Path) -> None:
    store = casckpt.open(store_path)
    store.create()
    assert "There are no checkpoints" in checked(page(store))


def test_nothing_is_written_if_the_store_is_missing(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        write_report(casckpt.open(tmp_path / "nothing"), tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_the_command_overwrites_an_existing_page(store: Store, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    done = CliRunner().invoke(cli, ["report", store.url.removeprefix("file://"), "-o", str(target)])
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"wrote {target}, ")
    checked(target.read_text())


def test_the_report_does_not_import_torch() -> None:
    code = "import sys, casckpt.frontends.report; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_heat_of_a_layer_is_the_fraction_of_it_that_changed(store_path: Path) -> None:
    store = casckpt.open(store_path)
    for step, *values in ((1, 0.5, 1.5), (2, 0.5, 2.5), (3, 3.5, 2.5)):
        held = {str(number): torch.full((4096,), value) for number, value in enumerate(values)}
        store.save({"model": {"layers": held}}, run="a", step=step)
    first, *compared = store.sizes().growth(["a"])
    assert (first.changed, [entry.commit.step for entry in compared]) == (None, [2, 3])
    assert heat(store, compared) == {"model.layers.0": [0.0, 1.0], "model.layers.1": [1.0, 0.0]}


def test_a_run_that_was_not_compared_has_no_heat(store: Store) -> None:
    assert heat(store, []) == {}


KEYS = st.lists(
    st.lists(st.sampled_from(["model", "layers", "3", "17", "weight", "", "x"]), min_size=1, max_size=6).map(".".join),
    unique=True,
)


@pytest.mark.parametrize(
    ("key", "width", "expected"),
    [
        ("model.layers.3.attn.weight", 1, "model.layers.3"),
        ("model.layers.7.attn.weight", 4, "model.layers.4-7"),
        ("model.embed.weight", 1, "model.embed"),
        ("step", 1, "step"),
        ("0.weight", 1, "0"),
        ("train.0.rng", 1, "train.0"),
    ],
)
def test_a_layer_name_ends_at_the_first_number(key: str, width: int, expected: str) -> None:
    assert layer_of(key, width) == expected


def test_neighboring_layers_share_a_group_if_there_are_many_layers() -> None:
    found = group([f"model.layers.{n}.weight" for n in range(100)], most=40)
    assert found["model.layers.5.weight"] == "model.layers.4-7"
    assert len(set(found.values())) == 25


def test_names_without_numbers_are_shortened() -> None:
    found = group([f"a.{name}.w.x" for name in "bcdefgh"], most=3)
    assert set(found.values()) == {"a"}
    assert set(group([f"{name}.w" for name in "bcdefgh"], most=3).values()) == {"b", "c", "..."}


@given(KEYS, st.integers(1, 8))
def test_every_key_belongs_to_one_of_a_few_groups(keys: list[str], most: int) -> None:
    found = group(keys, most)
    assert list(found) == keys
    assert len(set(found.values())) <= most


@given(st.dictionaries(st.text(max_size=5), st.integers(0, 2**40)))
def test_the_groups_together_contain_every_byte(nbytes: dict[str, int]) -> None:
    assert sum(summed(nbytes, group(nbytes)).values()) == sum(nbytes.values())
