"""References: the grammar, the checkpoint that each reference finds, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.base.digest import hex_digest
from casckpt.contents.refs import resolve, resolve_forgotten, resolve_many
from casckpt.errors import Damaged, Gone, InvalidInput, NotFound
from casckpt.format.keys import commit_key, tag_key
from casckpt.format.names import ManifestId
from casckpt.history.commits import Commit, forget, list_commits, purge, refresh
from casckpt.history.tags import set_tag
from casckpt.repository.repository import Repository
from tests.support.faulty import FaultyStore
from tests.support.repositories import commit_bare, memory, repository


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    return repository(tmp_path)


def steps(commits: list[Commit]) -> list[tuple[str, int]]:
    return [(commit.run, commit.step) for commit in commits]


def an_id(start: str) -> ManifestId:
    return ManifestId(start.ljust(64, "0"))


def test_a_reference_with_run_and_step_is_resolved(repo: Repository) -> None:
    made = [commit_bare(repo, run, step) for run in ("a", "team/sft-v1.2_x") for step in (0, 7, 10)]
    for commit in made:
        assert resolve(repo, f"{commit.run}@{commit.step}") == commit
    assert resolve(repo, "a@007") == made[1]


def test_latest_is_the_save_that_began_last_regardless_of_its_step(repo: Repository) -> None:
    commit_bare(repo, "a", 100)
    rolled_back = commit_bare(repo, "a", 50)
    other = commit_bare(repo, "b", 1)
    assert resolve(repo, "a@latest") == rolled_back
    assert resolve(repo, "latest") == other
    forget(repo, other)
    assert resolve(repo, "latest") == rolled_back


def test_a_run_name_can_be_a_keyword_of_the_reference_syntax(repo: Repository) -> None:
    one, two = commit_bare(repo, "latest", 3), commit_bare(repo, "abcdef", 4)
    assert resolve(repo, "latest@3") == one
    assert resolve(repo, "latest@latest") == one
    assert resolve(repo, "abcdef@4") == two
    with pytest.raises(NotFound, match="no checkpoint abcdef"):
        resolve(repo, "abcdef")


def test_a_reference_resolves_to_the_twin_that_began_later(repo: Repository) -> None:
    one, two = (commit_bare(repo, "a", 1) for _ in range(2))
    assert resolve(repo, "a@1") == two
    assert resolve(repo, one.id) == one
    forget(repo, two)
    assert resolve(repo, "a@1") == one


def test_ids_and_their_prefixes_are_resolved(repo: Repository) -> None:
    one = commit_bare(repo, "a", 1, manifest=an_id("abcdef12"))
    two = commit_bare(repo, "a", 2, manifest=an_id("abcdef34"))
    assert resolve(repo, one.id) == one
    assert resolve(repo, one.id.upper()) == one
    assert resolve(repo, "abcdef3") == two
    with pytest.raises(InvalidInput, match=r"2 ids: abcdef12\S* \(a@1\), abcdef34\S* \(a@2\); use more digits"):
        resolve(repo, "abcdef")
    with pytest.raises(NotFound):
        resolve(repo, "abcdef5")


def test_a_forgotten_checkpoint_is_found_only_by_its_id(repo: Repository) -> None:
    forgotten = forget(repo, commit_bare(repo, "a", 1))
    assert resolve(repo, forgotten.id[:10]) == forgotten
    with pytest.raises(NotFound, match=f"was forgotten; its id is {forgotten.id}; `casckpt restore"):
        resolve(repo, "a@1")
    with pytest.raises(NotFound):
        resolve(repo, "latest")


def test_an_id_resolves_to_a_visible_commit_or_otherwise_to_the_latest(repo: Repository) -> None:
    same = [commit_bare(repo, "a", step, manifest=an_id("abcdef")) for step in range(3)]
    assert resolve(repo, "abcdef") == same[2]
    forget(repo, same[2])
    assert resolve(repo, "abcdef") == same[1]
    for commit in same[:2]:
        forget(repo, commit)
    assert resolve(repo, "abcdef").txid == same[2].txid


def test_a_purged_checkpoint_is_reported_as_gone(repo: Repository) -> None:
    purged = purge(repo, forget(repo, commit_bare(repo, "a", 1)))
    with pytest.raises(Gone, match=r"a@1 .*purged"):
        resolve(repo, purged.id)
    for _ in ("of a run that is gone", "of a run that is there"):
        with pytest.raises(Gone, match=r"a@1 .*purged"):
            resolve(repo, "a@1")
        with pytest.raises(Gone, match=r"a@1 .*purged"):
            resolve_forgotten(repo, "a@1", list_commits(repo))
        commit_bare(repo, "a", 7)
    other = commit_bare(repo, "a", 2, manifest=an_id(purged.id[:6]))
    assert resolve(repo, purged.id[:6]) == other


def test_a_reference_to_a_purged_commit_resolves_to_a_different_commit_of_the_checkpoint(repo: Repository) -> None:
    """The checkpoint was copied back after the purge. The holder continues with the copy."""
    commit = commit_bare(repo, "a", 1)
    purge(repo, forget(repo, commit))
    with pytest.raises(Gone, match="purged"):
        resolve(repo, commit)
    again = commit_bare(repo, "a", 1, manifest=commit.id)
    assert resolve(repo, commit) == again


def test_a_tag_resolves_to_its_checkpoint(repo: Repository) -> None:
    commit = commit_bare(repo, "a", 1)
    set_tag(repo, "best", commit)
    commit = refresh(repo, commit)
    assert resolve(repo, "tag:best") == commit
    with pytest.raises(NotFound, match="existing tags: best"):
        resolve(repo, "tag:bets")
    with pytest.raises(InvalidInput):
        resolve(repo, "tag:No Good")
    forgotten = forget(repo, commit)
    with pytest.raises(NotFound, match="forgotten; `casckpt restore"):
        resolve(repo, "tag:best")
    purge(repo, forgotten)
    with pytest.raises(NotFound, match="purged; move the tag"):
        resolve(repo, "tag:best")


def test_a_tag_resolves_to_a_different_commit_while_its_own_is_forgotten(repo: Repository) -> None:
    own = commit_bare(repo, "a", 1)
    set_tag(repo, "best", own)
    other = commit_bare(repo, "b", 1, manifest=own.id)
    own = refresh(repo, own)
    assert resolve(repo, "tag:best") == own
    forget(repo, own)
    assert resolve(repo, "tag:best") == other
    forget(repo, other)
    with pytest.raises(NotFound, match=r"a@1.* forgotten"):
        resolve(repo, "tag:best")


def test_a_tag_on_a_missing_checkpoint_is_not_found(repo: Repository, tmp_path: Path) -> None:
    other = repository(tmp_path, seed=9)
    set_tag(other, "best", commit_bare(other))
    key = tag_key("best", 0)
    repo.storage.put(key, other.storage.get(key, limit=1 << 20))
    with pytest.raises(NotFound, match="which is not in"):
        resolve(repo, "tag:best")
    repo.storage.replace(key, b"torn")
    with pytest.raises(Damaged):
        resolve(repo, "tag:best")


def test_a_state_in_place_of_a_reference_is_rejected_without_printing_it(repo: Repository) -> None:
    class Silent(dict[str, object]):
        def __repr__(self) -> str:
            raise AssertionError("the repr of a large state takes minutes")

    with pytest.raises(InvalidInput, match="of type Silent"):
        resolve(repo, Silent())  # type: ignore[arg-type]  # the arguments of load, swapped


@pytest.mark.parametrize(
    "ref",
    ["", "a", "abc", "abcde", "0" * 65, "a@", "a@x", "a@-1", "a@1.5", "@1", "a b@1", "a@@1", "a@1..", "a@1..2",
     "a@10000000000000000000", "Tag:x", "a@LATEST", "a@ 1", "a@\u0661", "xyzxyz", "a@1\n"],
)  # fmt: skip
def test_an_invalid_reference_is_rejected(repo: Repository, ref: str) -> None:
    commit_bare(repo, "a", 1)
    with pytest.raises(InvalidInput):
        resolve(repo, ref)


def test_the_bare_name_of_a_run_that_looks_like_an_id_suggests_its_newest_checkpoint(repo: Repository) -> None:
    commit_bare(repo, "43b5c20", 1)
    with pytest.raises(NotFound, match=r"there is no checkpoint 43b5c20 in .*; did you mean 43b5c20@latest\?"):
        resolve(repo, "43b5c20")


def test_a_not_found_error_lists_alternatives(repo: Repository) -> None:
    with pytest.raises(NotFound, match="no visible checkpoint"):
        resolve(repo, "latest")
    with pytest.raises(NotFound, match="has no visible checkpoints"):
        resolve(repo, "sft@1")
    for step in (10, 30, 20):
        commit_bare(repo, "sft-v1", step)
    with pytest.raises(NotFound, match="has no step 5; the newest is sft-v1@20, and the steps range from 10 to 30"):
        resolve(repo, "sft-v1@5")
    with pytest.raises(NotFound, match=r"did you mean sft-v1\?"):
        resolve(repo, "sft_v1@10")
    with pytest.raises(NotFound, match="existing runs: sft-v1"):
        resolve(repo, "zzz@latest")


def test_a_long_list_of_runs_is_shortened(repo: Repository) -> None:
    for number in range(9):
        commit_bare(repo, f"r{number}", 1)
    with pytest.raises(NotFound, match="r0, r1, r2, r3, r4 and 4 more"):
        resolve(repo, "zzz@1")


def test_a_not_found_error_mentions_unreadable_records(repo: Repository) -> None:
    commit = commit_bare(repo, "a", 1)
    commit_bare(repo, "b", 1)
    repo.storage.replace(commit_key(commit.txid), b"torn")
    with pytest.raises(NotFound, match=r"\(1 commit records cannot be read"):
        resolve(repo, "a@1")


def test_an_error_for_records_of_a_later_version_suggests_an_upgrade(repo: Repository) -> None:
    key = commit_key(commit_bare(repo, "a", 1).txid)
    line = repo.storage.get(key, limit=1 << 20).partition(b"\n")[0].replace(b'"head"', b'"foot"')
    repo.storage.replace(key, line + b"\n" + hex_digest(line).encode() + b"\n")
    for ref in ("latest", "a@1", "a@latest"):
        with pytest.raises(NotFound, match=r"A later version of casckpt may have written it: upgrade casckpt\)"):
            resolve(repo, ref)


def test_lists_of_references_and_ranges_of_steps_are_resolved(repo: Repository) -> None:
    made = {(run, step): commit_bare(repo, run, step) for run in ("a", "b/c") for step in (30, 10, 20)}
    forget(repo, commit_bare(repo, "a", 15))
    assert steps(resolve_many(repo, ["a@10..20"])) == [("a", 10), ("a", 20)]
    assert steps(resolve_many(repo, ["b/c@11.."])) == [("b/c", 20), ("b/c", 30)]
    assert steps(resolve_many(repo, ["a@20", "a@10..", made["b/c", 10].id])) == [
        ("a", 20), ("a", 10), ("a", 30), ("b/c", 10)
    ]  # fmt: skip
    assert steps(resolve_many(repo, ["a@10..10"])) == [("a", 10)]
    assert resolve_many(repo, []) == []


def test_a_range_contains_only_one_of_two_twins(repo: Repository) -> None:
    commit_bare(repo, "a", 1)
    later = commit_bare(repo, "a", 1)
    assert resolve_many(repo, ["a@0.."]) == [later]


@pytest.mark.parametrize("ref", ["@1", "@latest", "@", "@1..2"])
def test_the_error_for_a_reference_without_a_run_shows_it_and_the_grammar(repo: Repository, ref: str) -> None:
    with pytest.raises(InvalidInput, match=rf"^'{ref}' names no run: use an id .*, RUN@latest"):
        resolve_many(repo, [ref])


def test_a_range_without_checkpoints_is_not_found(repo: Repository) -> None:
    commit_bare(repo, "a", 10)
    with pytest.raises(InvalidInput, match="5 is greater than 3"):
        resolve_many(repo, ["a@5..3"])
    with pytest.raises(NotFound, match=r"no step in 11\.\.; the newest is a@10"):
        resolve_many(repo, ["a@11.."])
    with pytest.raises(NotFound, match="no checkpoint of run 'b'"):
        resolve_many(repo, ["b@1.."])
    for ref in ("a@...5", "a@-..5", "a@..x", "@..", "a@1...5", "a b@1..2", "1..5"):
        with pytest.raises(InvalidInput):
            resolve_many(repo, [ref])


@given(
    made=st.sets(st.integers(0, 30), min_size=1, max_size=8),
    low=st.none() | st.integers(0, 30),
    high=st.none() | st.integers(0, 30),
)
def test_a_range_can_be_open_at_either_end(made: set[int], low: int | None, high: int | None) -> None:
    repo = Repository(memory())
    repo.create()
    for step in made:
        commit_bare(repo, "sweep/lr-0.001", step)
    ref = f"sweep/lr-0.001@{'' if low is None else low}..{'' if high is None else high}"
    wanted = sorted(step for step in made if (low or 0) <= step <= (30 if high is None else high))
    if wanted:
        assert [commit.step for commit in resolve_many(repo, [ref])] == wanted
    else:
        with pytest.raises((NotFound, InvalidInput)):
            resolve_many(repo, [ref])


def test_restore_resolves_steps_and_ranges_to_forgotten_checkpoints(repo: Repository) -> None:
    forgotten = [forget(repo, commit_bare(repo, "a", step)) for step in (5, 1, 3)]
    forget(repo, commit_bare(repo, "a", 4))
    over = commit_bare(repo, "a", 4)
    forget(repo, commit_bare(repo, "b", 2))
    found = list_commits(repo)
    assert resolve_forgotten(repo, "a@3", found) == [forgotten[2]]
    assert steps(resolve_forgotten(repo, "a@2..", found)) == [("a", 3), ("a", 5)], "step 4 is visible"
    assert resolve_forgotten(repo, "a@4", found) == [over]
    assert resolve_forgotten(repo, forgotten[0].id[:12], found) == [forgotten[0]]
    with pytest.raises(NotFound, match=r"in 6\.\., run 'a' in \S+ has no step whose only checkpoints are forgotten"):
        resolve_forgotten(repo, "a@6..", found)
    with pytest.raises(NotFound, match=r"did you mean a\?|existing runs: a"):
        resolve_forgotten(repo, "aa@..", found)
    with pytest.raises(NotFound, match="no step 2"):
        resolve_forgotten(repo, "a@2", found)


def test_an_error_lists_the_ids_if_several_checkpoints_were_forgotten_at_a_step(repo: Repository) -> None:
    ids = [forget(repo, commit_bare(repo, "a", 1)).id[:16] for _ in range(2)]
    for ref in ("a@1", "a@.."):
        with pytest.raises(InvalidInput, match=rf"2 checkpoints of a@1 were forgotten: {ids[0]} \(of .*{ids[1]}"):
            resolve_forgotten(repo, ref, list_commits(repo))


def test_any_number_of_references_is_resolved_with_one_listing(tmp_path: Path) -> None:
    storage = FaultyStore(memory())
    repo = repository(tmp_path, storage)
    for step in range(5):
        commit_bare(repo, "a", step)
    commits = list_commits(repo)
    before = len(storage.calls)
    assert len(resolve_many(repo, ["a@0..", "a@2", "latest"], commits)) == 5
    assert len(storage.calls) == before
