from __future__ import annotations

from typing import Any

from casckpt.base.text import lineage_text


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
