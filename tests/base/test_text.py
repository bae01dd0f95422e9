from __future__ import annotations

from typing import Any

import pytest
import torch

import casckpt
from casckpt.base.text import lineage_text
from tests.support.repositories import memory
from tests.support.saves import small


@pytest.fixture
def saved() -> casckpt.Store:
    store = small(memory())
    store.save({"w": torch.arange(3.0)}, step=1)
    return store


def test_a_notebook_shows_tables_and_escapes_markup(saved: casckpt.Store) -> None:
    saved.save({"<b>w": torch.ones(3)}, run="r", step=2, metadata={"<script>": "<i>"})
    shown = {
        "store": saved._repr_html_(),
        "checkpoint": saved.get("r@2")._repr_html_(),
        "diff": saved.diff("default@1", "r@2")._repr_html_(),
    }
    assert all(text.startswith("<div><b>") and text.count("<table>") == 1 for text in shown.values())
    assert "<td>r</td><td>2</td>" in shown["store"]
    assert "<td>&lt;script&gt;</td><td>&lt;i&gt;</td>" in shown["checkpoint"]
    assert "<td>added</td><td>&lt;b&gt;w</td>" in shown["diff"]
    assert "0 checkpoints" in small(memory())._repr_html_()


def test_a_lineage_names_checkpoints_paths_and_anything_that_a_record_may_hold() -> None:
    one = {"id": "ab" * 32, "run": "sft", "step": 100}
    assert lineage_text(None) == lineage_text({}) == ""
    assert lineage_text({"resumed_from": one}) == "resumed from sft@100 (abababababab)"
    assert lineage_text({"imported_from": {"path": "/a/b", "digest": "x"}}) == "imported from /a/b"
    assert lineage_text({"merged_from": [one] * 5}).endswith("sft@100 (abababababab) and 2 more")
    assert lineage_text({"merged_from": None}) == "merged from (too long for the listing)"
    odd: list[Any] = [1, "x" * 1000, [1, None, [one]], {"run": 1}, {"path": None}, {"run": [], "step": {}}]
    for value in odd:
        assert len(lineage_text({"resumed_from": value})) < 400
