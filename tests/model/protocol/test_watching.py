"""A watch beside gcs that fold history: each visible checkpoint is yielded once, and no look misses one."""

from __future__ import annotations

import pytest

from tests.model.protocol.checks import check_dies, check_holds
from tests.model.protocol.watching import LARGE, MUTANTS, NEW, ONCE, SAFE, SHOWN, STATED, TOLD, model

DIES = {
    "any_order": ("two gcs", SHOWN),
    "deletes_open": ("a save in progress", SHOWN),
    "deletes_live": ("over between live ones", SHOWN),
    "deletes_newest": ("all is over", SHOWN),
    "announces_nothing": ("announcements that were lost", TOLD),
    "fills_nothing": ("announcements that were lost", TOLD),
    "believes_its_number": ("a save that slept", SHOWN),
    "begins_anew": ("an old copy", SHOWN),
    "head_first": ("two gcs", SHOWN),
    "goes_on": ("two gcs", SHOWN),
    "after_begins_anew": ("behind a folded one", SHOWN),
    "after_all": ("behind what is folded meanwhile", NEW),
    "ended_first": ("from the start", STATED),
    "ignores_ended": ("from the start", STATED),
    "drops_hidden": ("forgotten, and restored", SHOWN),
    "believes_hidden": ("forgotten, and restored", TOLD),
    "by_txid": ("a copy of what was yielded", ONCE),
    "reads_once": ("a killed save", SHOWN),
    "ignores_open": ("behind a save in progress", SHOWN),
}


@pytest.mark.parametrize("start", SAFE)
def test_a_watch_yields_each_checkpoint_once(start: str) -> None:
    check_holds(model(start=start), ("DELETES runs" if start == "a copy of what was yielded" else "YIELDS",))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", LARGE)
def test_a_watch_yields_each_checkpoint_once_in_larger_models(start: str) -> None:
    check_holds(model(start=start), ("YIELDS", "DELETES runs"), limit=8_000_000)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_change_to_the_protocol_breaks_an_invariant(mutant: str) -> None:
    start, broken = DIES[mutant]
    check_dies(model(mutant, start=start), broken.says)
