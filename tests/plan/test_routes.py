"""Routes between versions of a cell: they end where they are to, and none reads more than it must."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from casckpt.format.digest import cell_digest
from casckpt.format.extents import Frame, StoredCell
from casckpt.format.regions import full_box
from casckpt.plan.routes import Route, find_route

BOX = full_box((1000,))
NBYTES = 1000


def cell(version: int, stored: int, base: StoredCell | None) -> StoredCell:
    """A version of the cell; without a base it lies there as it is."""
    frame = None if base is None else Frame(stored, base)
    return StoredCell(0, NBYTES * version, NBYTES, BOX, 0, 1000, cell_digest(b"%d" % version), frame)


@st.composite
def trees(draw: st.DrawFn) -> list[StoredCell]:
    """Versions of which each is stored by itself, or told from any earlier one."""
    found: list[StoredCell] = []
    for version in range(draw(st.integers(1, 12))):
        base = draw(st.sampled_from([None, *found]))
        found.append(cell(version, draw(st.integers(1, 400)), base))
    return found


def end(start: StoredCell, route: Route) -> StoredCell:
    """Where a route leads to."""
    at = start
    for one in route.undone:
        assert one == at
        assert at.base is not None
        at = at.base
    for one in route.decoded:
        assert one.base == at
        at = one
    return at


@given(trees(), st.data())
def test_a_route_leads_there_and_reads_the_least(found: list[StoredCell], data: st.DataObject) -> None:
    held, wanted = (data.draw(st.sampled_from(found)) for _ in "ab")
    route = find_route(held, wanted)
    alone = sum(one.stored for one in wanted.chain)
    up, down = list(held.chain), list(wanted.chain)
    costs = [
        sum(one.stored for one in up[: up.index(one)] + down[: down.index(one)]) for one in up if one in down
    ]  # fmt: skip
    if route is None:
        assert not costs or min(costs) >= alone
    else:
        assert end(held, route) == wanted
        assert route.cost() == min(costs) < alone


def test_no_key_is_read_along_a_chain() -> None:
    versions = [cell(0, NBYTES, None)]
    for version in range(1, 10):
        versions.append(cell(version, 5, versions[-1]))
    for one, other in pairwise(versions):
        assert find_route(one, other) == Route([], [other])
        assert find_route(other, one) == Route([other], [])
    assert find_route(versions[2], versions[7]) == Route([], versions[3:8])
    assert find_route(versions[4], versions[4]) == Route([], [])
