from __future__ import annotations

import pytest
import torch

import casckpt
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
