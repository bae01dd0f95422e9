"""Retention: in each run, a policy keeps what any of its rules keeps. Some checkpoints are never forgotten."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casckpt.errors import InvalidInput
from casckpt.format.keys import make_txid
from casckpt.plan.retention import Policy, SavedCheckpoint, reasons_to_keep, runs_without, thinning_of, unmeasured

START = datetime(2026, 1, 1, tzinfo=UTC)
DAY = 86_400_000_000


def kept(number: int, step: int, run: str = "sft", day: int | None = None) -> SavedCheckpoint:
    """Checkpoint ``number`` in order of transactions, created on ``day`` (by default its number)."""
    txid = make_txid(START + timedelta(days=number), number.to_bytes(8, "big"), run, step)
    return SavedCheckpoint(txid, run, step, (number if day is None else day) * DAY)


def plan_forget(visible: list[SavedCheckpoint], policy: Policy, now: int) -> list[SavedCheckpoint]:
    keep = reasons_to_keep(visible, policy, now)
    return [one for one in visible if one.txid not in keep]


def steps(forgotten: list[SavedCheckpoint]) -> list[int]:
    return [one.step for one in forgotten]


TEN = [kept(i, i * 50) for i in range(10)]


@pytest.mark.parametrize(
    "rules",
    [
        {"keep_last": -1},
        {"keep_last": 0},
        {"keep_every": 0},
        {"keep_every": -5},
        {"keep_within": -1.0},
        {"keep_within": float("nan")},
        {"keep_within": 7},
        {"keep_daily": 0},
        {"keep_weekly": "7d"},
        {"keep_monthly": True},
        {"keep_last": 1.5},
        {"keep_last": True},
        {"keep_last": "3"},
        {"keep_every": 2.0},
    ],
)
def test_an_invalid_policy_is_rejected(rules: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"keep-"):
        Policy(**rules)


def test_a_policy_accepts_a_duration_as_a_string() -> None:
    store = [*TEN, kept(11, 50)]
    by_text, by_timedelta = Policy(keep_within="2d"), Policy(keep_within=timedelta(days=2))
    assert plan_forget(store, by_text, 9 * DAY) == plan_forget(store, by_timedelta, 9 * DAY) != []
    with pytest.raises(InvalidInput, match="not a duration"):
        Policy(keep_within="7 days")


def test_a_plan_without_a_policy_forgets_nothing() -> None:
    assert plan_forget([*TEN, kept(11, 50)], Policy(), 99 * DAY) == []


def test_keep_last_keeps_the_newest_checkpoints() -> None:
    assert steps(plan_forget(TEN, Policy(keep_last=3), 0)) == [0, 50, 100, 150, 200, 250, 300]


def test_keep_every_keeps_multiples_of_a_step() -> None:
    assert steps(plan_forget(TEN, Policy(keep_every=100), 0)) == [50, 150, 250, 350]  # 450 is the newest


def test_keep_within_keeps_recent_checkpoints() -> None:
    assert steps(plan_forget(TEN, Policy(keep_within="2d"), 9 * DAY)) == [0, 50, 100, 150, 200, 250, 300]


def test_the_newest_of_each_day_week_and_month_is_kept() -> None:
    """Days without checkpoints do not count. Day 0 is 1970-01-01, a Thursday."""
    store = [kept(number, number * 10, day=day) for number, day in enumerate([0, 3, 3, 4, 31, 33])]
    assert steps(plan_forget(store, Policy(keep_daily=3), 0)) == [0, 10, 20]
    assert steps(plan_forget(store, Policy(keep_daily=9), 0)) == [10]
    assert steps(plan_forget(store, Policy(keep_weekly=2), 0)) == [0, 10, 20, 30]
    assert steps(plan_forget(store, Policy(keep_weekly=4), 0)) == [0, 10]
    assert steps(plan_forget(store, Policy(keep_monthly=2), 0)) == [0, 10, 20, 40]


def at(number: int, when: datetime) -> SavedCheckpoint:
    return replace(kept(number, number), created_at=int(when.timestamp() * 1_000_000))


def test_days_weeks_and_months_are_in_utc_in_every_year(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        # one week, in Tokyo one day
        last, first = (
            datetime(2025, 12, 31, 22, tzinfo=UTC),
            datetime(2026, 1, 1, 1, tzinfo=UTC),
        )
        turn = [at(0, last), at(1, first), at(2, first + timedelta(hours=20)), at(3, first + timedelta(days=31))]
        assert steps(plan_forget(turn, Policy(keep_daily=9), 0)) == [1]
        assert steps(plan_forget(turn, Policy(keep_weekly=9), 0)) == [0, 1]
        assert steps(plan_forget(turn, Policy(keep_monthly=9), 0)) == [1]
        same = [at(0, first), at(1, first + timedelta(days=365)), at(2, first + timedelta(days=400))]  # of two years
        assert steps(plan_forget(same, Policy(keep_monthly=9), 0)) == []
    finally:
        monkeypatch.undo()
        time.tzset()


def test_the_newest_of_a_day_is_the_last_created_not_the_last_copied() -> None:
    day = datetime(2026, 1, 1, tzinfo=UTC)
    copied = [
        at(0, day + timedelta(hours=9)),
        at(1, day + timedelta(hours=3)),
        at(2, day - timedelta(days=3)),
        at(9, day),
    ]
    assert steps(plan_forget(copied, Policy(keep_daily=1), 0)) == [1, 2]
    assert steps(plan_forget(copied, Policy(keep_daily=2), 0)) == [1]


def test_a_checkpoint_is_kept_if_any_rule_keeps_it() -> None:
    policy = Policy(keep_last=2, keep_every=200, keep_within="3d")
    assert steps(plan_forget(TEN, policy, 9 * DAY)) == [50, 100, 150, 250]


def test_keep_last_0_adds_no_checkpoints_to_those_of_other_rules() -> None:
    assert plan_forget(TEN, Policy(keep_last=0, keep_every=100), 0) == plan_forget(TEN, Policy(keep_every=100), 0)


def test_rules_count_checkpoints_of_each_run_separately() -> None:
    store = [kept(0, 0, "a"), kept(1, 1, "b"), kept(2, 2, "a"), kept(3, 3, "b")]
    assert steps(plan_forget(store, Policy(keep_last=1), 0)) == [0, 1]


def test_the_newest_checkpoint_has_the_latest_transaction_not_the_highest_step() -> None:
    rolled_back = [kept(0, 500), kept(1, 600), kept(2, 100)]
    assert steps(plan_forget(rolled_back, Policy(keep_last=1), 0)) == [500, 600]


def test_the_age_of_a_copy_is_the_age_of_the_original() -> None:
    store = [kept(0, 0, day=9), kept(8, 8, day=1), kept(9, 9, day=2)]
    assert steps(plan_forget(store, Policy(keep_within="1d"), 9 * DAY)) == [8]


def test_superseded_twins_are_forgotten_and_not_counted() -> None:
    store = [kept(0, 100), kept(1, 50), kept(2, 100), kept(3, 150)]
    for policy in (Policy(keep_last=100), Policy(keep_every=50), Policy(keep_within="999w")):
        assert plan_forget(store, policy, 9 * DAY) == [store[0]]
    assert plan_forget(store, Policy(keep_last=2), 0) == store[:2]


STORES = st.lists(
    st.builds(lambda step, run, day: (step, run, day), st.integers(0, 12), st.sampled_from("ab"), st.integers(0, 9)),
    max_size=25,
).map(lambda rows: [kept(i, step, run, day) for i, (step, run, day) in enumerate(rows)])
POLICIES = st.builds(
    Policy,
    keep_last=st.none() | st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 5),
    keep_within=st.none() | st.integers(0, 9).map(lambda days: f"{days}d"),
)


@given(STORES, POLICIES)
def test_no_policy_forgets_the_newest_checkpoint_of_a_run(store: list[SavedCheckpoint], policy: Policy) -> None:
    forgotten = set(plan_forget(store, policy, 9 * DAY))
    for run in "ab":
        of_run = [one for one in store if one.run == run]
        assert not of_run or of_run[-1] not in forgotten


@given(STORES, POLICIES)
def test_a_second_plan_forgets_nothing_more(store: list[SavedCheckpoint], policy: Policy) -> None:
    forgotten = plan_forget(store, policy, 9 * DAY)
    assert plan_forget([one for one in store if one not in forgotten], policy, 9 * DAY) == []


@given(STORES, POLICIES, st.integers(1, 5))
def test_an_additional_rule_never_forgets_more(store: list[SavedCheckpoint], policy: Policy, every: int) -> None:
    if policy.is_empty or policy.keep_every is not None:
        return
    forgotten = set(plan_forget(store, policy, 9 * DAY))
    assert set(plan_forget(store, replace(policy, keep_every=every), 9 * DAY)) <= forgotten


def scored(*values: float | None, name: str = "loss") -> list[SavedCheckpoint]:
    return [replace(kept(i, i), metrics={} if value is None else {name: value}) for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("best", "stay"),
    [
        ("loss:1", [3]),
        ("loss:min:2", [1, 3]),  # the first of equal ones
        ("loss:max:1", [0]),
        (["loss:1", "loss:max:1"], [0, 3]),
        ("loss:99", [0, 1, 2, 3]),
        ("acc:max:3", [0, 1, 2, 3, 4, 5]),  # no checkpoint has the metric, so all of them stay
        (["loss:1", "acc:max:3"], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_best_checkpoints_by_a_metric_are_kept(best: Any, stay: list[int]) -> None:
    store = [*scored(9.0, 2.0, 2.0, float("-inf"), float("nan"), None), kept(9, 9)]
    assert steps(plan_forget(store, Policy(keep_best=best), 0)) == [n for n in range(6) if n not in stay]


def test_a_run_without_the_metric_is_kept_and_named() -> None:
    with_it, young = scored(3.0, 1.0, 2.0), [kept(number, number, run="young") for number in range(2)]
    sick = [replace(kept(number, number, run="sick"), metrics={"loss": float("nan")}) for number in range(2)]
    store, policy = [*with_it, *sick, *young], Policy(keep_best="loss:1")
    assert plan_forget(store, policy, 0) == with_it[:1]
    assert runs_without(store, policy) == {"loss": ["sick", "young"]}
    assert runs_without(with_it, policy) == {"loss": []}
    assert runs_without(store, Policy(keep_last=1)) == {}


def test_only_runs_without_any_metric_are_left_to_the_other_rules() -> None:
    with_it, young = scored(3.0, 1.0, 2.0), [kept(number, number, run="young") for number in range(3)]
    others = [replace(kept(number, number, run="others"), metrics={"acc": 1.0}) for number in range(3)]
    store, policy = [*with_it, *others, *young], Policy(keep_best="loss:1", keep_last=2)
    assert unmeasured(store, policy) == {"young"}
    keep = reasons_to_keep(store, policy, 0, without_best={"young"})
    assert [saved for saved in store if saved.txid not in keep] == [with_it[0], young[0]]
    assert plan_forget(store, policy, 0) == with_it[:1], "rotation waits for the first metric"
    for alone in (Policy(keep_best=["loss:1", "acc:max:1"]), Policy(keep_last=0, keep_best="loss:1"), Policy()):
        assert unmeasured(store, alone) == set(), "no other rule says what to keep of the run"
    assert runs_without(young, policy) == {"loss": ["young"]}, "the other rule applies, so the name need not exist"


def test_a_metric_without_values_is_rejected() -> None:
    store = [replace(one, metrics={**one.metrics, "acc": 1.0}) for one in scored(1.0, 2.0)]
    with pytest.raises(InvalidInput, match="no checkpoint here has a metric 'los'; the existing metrics are acc, loss"):
        runs_without(store, Policy(keep_best=["loss:1", "los:min:3"]))
    other = replace(store[0], run="other", metrics={})
    assert runs_without([*store, other], Policy(keep_best="loss:1")) == {"loss": ["other"]}
    with pytest.raises(InvalidInput, match="no checkpoint of run other has a metric 'loss'; none of them has any"):
        runs_without([*store, other], Policy(keep_best="loss:1"), run="other")
    assert runs_without([], Policy(keep_best="loss:1")) == {"loss": []}, "an empty store has no typing errors"


def test_a_metric_name_can_contain_colons() -> None:
    for text, name in (("val:loss:1", "val:loss"), ("max:max:1", "max"), ("val:max:max:1", "val:max")):
        store = [*scored(1.0, name=name), kept(5, 5), kept(9, 9)]
        assert steps(plan_forget(store, Policy(keep_best=text), 0)) == [5]


@pytest.mark.parametrize("best", ["loss", "loss:", ":3", "loss:0", "loss:-1", "loss:max:", "loss:1.5", 3, ["x"], [3]])
def test_an_invalid_keep_best_is_rejected(best: Any) -> None:
    with pytest.raises(InvalidInput, match=r"keep-best"):
        Policy(keep_best=best)


def test_a_metric_that_is_no_loss_needs_a_direction() -> None:
    assert not Policy(keep_best=["val_loss:1", "Error:1"]).best[1].is_max
    for text in ("acc:1", "val/acc:1", "acc:maximum:1"):
        with pytest.raises(InvalidInput, match=f"pass '{text[:-2]}:max:1' to keep the highest, or '{text[:-2]}:min:1'"):
            Policy(keep_best=text)


def test_an_empty_keep_best_is_not_treated_as_a_rule() -> None:
    assert Policy(keep_best=()).is_empty
    assert plan_forget(TEN, Policy(keep_best=[]), 0) == []


def test_the_last_healthy_checkpoint_is_kept() -> None:
    store = [replace(kept(i, i), healthy=word) for i, word in enumerate([True, None, None, False, False])]
    assert steps(plan_forget(store, Policy(keep_last=1), 0)) == [0, 1, 3]
    assert steps(plan_forget(store[:3], Policy(keep_last=1), 0)) == [0, 1]
    assert steps(plan_forget(store[3:], Policy(keep_last=1), 0)) == [3]


@pytest.mark.parametrize(
    "rule",
    [3, {}, {"drop": []}, {"drop": ["a"]}, {"keep_last": 1}, {"drop": [1], "keep_last": 1}, {"drop": "a", "x": 1}],
)
def test_an_invalid_thinning_rule_is_rejected(rule: Any) -> None:
    with pytest.raises(InvalidInput, match=r"drop|is kept whole"):
        thinning_of(rule)


def test_a_thinning_rule_selects_checkpoints() -> None:
    assert thinning_of(None) is None
    found = thinning_of({"drop": "optim.*", "keep_last": 2})
    assert found is not None
    assert (found.drop, found.keep) == (("optim.*",), Policy(keep_last=2))
