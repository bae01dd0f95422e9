"""Logs of rewrites, folded together with the logs of their bases."""

from __future__ import annotations

from pathlib import Path

import pytest

from casckpt.contents.refs import resolve
from casckpt.errors import Conflict, Refused
from casckpt.format.names import TxId
from casckpt.format.records import Dropped, Replaced, changed
from casckpt.history.commits import (
    forget,
    list_commits,
    refresh,
    restore,
)
from casckpt.history.folding import STANDS, UNSETTLED, VOID
from casckpt.history.following import at_step, is_visible, look_at_all, newest, newest_of_runs, newest_reusable
from casckpt.repository.repository import Repository
from tests.support.repositories import (
    START,
    Ticks,
    commit_bare,
    committed,
    half_rewrite,
    memory,
    repository,
    rewrite_bare,
)
from tests.upkeep.test_rewrite import finish, now


def visible(repo: Repository) -> list[TxId]:
    return [one.txid for one in list_commits(repo).visible()]


def test_a_restore_undoes_a_rewrite_permanently(repo: Repository) -> None:
    base = commit_bare(repo)
    made = rewrite_bare(repo, base)
    upon = rewrite_bare(repo, made)
    back = restore(repo, refresh(repo, base))
    assert visible(repo) == [back.txid]
    assert [now(repo, one).standing for one in (base, made, upon)] == [STANDS, VOID, VOID]
    with pytest.raises(Conflict, match="did not take effect"):
        restore(repo, now(repo, upon))
    other = rewrite_bare(repo, back)
    assert visible(repo) == [other.txid]
    assert now(repo, made).standing == VOID


def test_a_rewrite_is_invisible_until_its_base_is_recorded_as_replaced(repo: Repository, tmp_path: Path) -> None:
    base = commit_bare(repo)
    made = half_rewrite(repo, base)
    assert (now(repo, made).standing, visible(repo)) == (UNSETTLED, [base.txid])
    assert [one.txid for one in list_commits(repo).live()] == [made.txid, base.txid]
    with pytest.raises(Conflict, match="did not take effect"):
        forget(repo, now(repo, made))
    for host in (repo, repository(tmp_path / "new", repo.storage, seed=8)):
        assert newest(host, "run", is_visible) == now(repo, base)
        assert newest_reusable(host, "run", anew=True) == now(repo, base)
    finish(repo, made)
    assert visible(repo) == [made.txid]


# order


def test_latest_is_the_last_save_regardless_of_the_clocks(tmp_path: Path) -> None:
    storage = memory()
    ahead = repository(tmp_path / "ahead", storage, clock=Ticks(START + 600 * 10**6))
    repo = repository(tmp_path / "behind", storage, seed=2)
    one, two, three = (commit_bare(repo, "a", step) for step in (1, 2, 3))
    commit_bare(repo, "b", 1)
    made = rewrite_bare(ahead, two)
    assert made.txid > three.txid
    for host in (ahead, repo, repository(tmp_path / "new", storage, seed=3)):
        assert resolve(host, "a@latest").txid == three.txid
        assert newest_reusable(host, "a", anew=True) == now(host, three)
        assert [c.txid for c in list_commits(host).visible() if c.run == "a"] == [one.txid, made.txid, three.txid]
        assert next(c.txid for c in newest_of_runs(host, is_visible) if c.run == "a") == three.txid
    again = rewrite_bare(ahead, three)
    for host in (ahead, repo, repository(tmp_path / "newer", storage, seed=4)):
        assert resolve(host, "a@latest") == now(host, again)
        assert newest_reusable(host, "a", anew=True) == now(host, again)


def test_a_step_resolves_to_the_twin_that_was_saved_last(repo: Repository) -> None:
    one, two = (commit_bare(repo, "a", 1) for _ in range(2))
    rewrite_bare(repo, one)
    assert resolve(repo, "a@1").txid == two.txid
    assert [c.txid for c in list_commits(repo).current()] == [two.txid]
    made = rewrite_bare(repo, two)
    assert at_step(repo, look_at_all(repo, "a"), "a", 1, is_visible)[-1] == made


# damage and hostile records


@pytest.mark.parametrize("wrong", ["run", "step", "later"])
def test_a_rewrite_record_of_a_different_checkpoint_is_rejected(repo: Repository, wrong: str) -> None:
    record = committed(repo, "a", 1)
    base = repo.new_txid("b" if wrong == "run" else "a", 2 if wrong == "step" else 1)
    if wrong != "later":
        record = committed(repo, "a", 1)
    for fields in ({"replaces": (base, 1)}, {"origin": base}):
        with pytest.raises(Refused, match="impossible"):
            changed(record, **fields)
    with pytest.raises(Refused, match="impossible"):
        Replaced(txid=record.txid, time=0, by=record.txid)


def test_a_commit_stands_in_for_one_with_the_same_or_fewer_entries(repo: Repository) -> None:
    base = commit_bare(repo)
    made = rewrite_bare(repo, base)
    thin = rewrite_bare(repo, made, dropped=Dropped(entries=1, bytes=4, rule="optimizer"))
    again = rewrite_bare(repo, thin, dropped=thin.dropped)
    found = list_commits(repo)
    standins = [found.standin(found.commits[one.txid]).txid for one in (base, made, thin, again)]
    assert standins == [made.txid, made.txid, again.txid, again.txid]
    assert {one.txid for one in found.needed()} == {made.txid, again.txid}
