from __future__ import annotations

from pathlib import Path

import pytest

from casckpt.errors import Conflict, NotFound
from casckpt.history.commits import forget, list_commits
from casckpt.history.tags import delete_tag, set_tag
from casckpt.upkeep.gc.forgetting import plan_forget
from tests.support.repositories import commit_bare, repository


def test_references_and_ranges_choose_each_checkpoint_once(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    made = [commit_bare(repo, "a", step) for step in (1, 2, 3)]
    assert plan_forget(repo, ["a@2..", "a@3", made[1]]) == made[1:]
    assert len(list_commits(repo).visible()) == 3, "a plan writes nothing"


def test_a_tagged_checkpoint_stops_forget_of_all_named_ones(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    made = [commit_bare(repo, "a", step) for step in (1, 2, 3)]
    set_tag(repo, "best", made[1])
    with pytest.raises(Conflict, match=r"a@2 .* by best.*--tagged") as caught:
        plan_forget(repo, ["a@1..3"])
    assert caught.value.checkpoints == (made[1].id,)
    assert plan_forget(repo, ["a@1..3"], tagged=True) == made
    delete_tag(repo, "best")
    assert plan_forget(repo, ["a@1..3"]) == made


def test_forget_uses_the_current_state_of_a_commit(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    old = commit_bare(repo, "a", 1)
    now = forget(repo, old)
    assert plan_forget(repo, [old]) == [now]


def test_forget_of_a_missing_checkpoint_is_not_found(tmp_path: Path) -> None:
    repo = repository(tmp_path)
    commit_bare(repo, "a", 1)
    with pytest.raises(NotFound):
        plan_forget(repo, ["a@1", "a@7"])
