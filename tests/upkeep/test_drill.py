"""People who share a store: `tests.support.drill`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import run_script


@pytest.mark.parametrize("acl", ["acl", pytest.param("without", marks=pytest.mark.soak)])
def test_in_a_team_nobody_is_locked_out_or_loses_anything_and_status_names_each_trouble(
    acl: str, disk_path: Path
) -> None:
    done = run_script("tests.support.drill", disk_path, acl)
    if done.status == 2:
        pytest.skip(done.told.strip().rpartition("\n")[2])
    assert done.status == 0, done.told[-3000:]
