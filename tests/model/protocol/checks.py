"""Checks for all concerns: a model's invariants hold, certain steps occur in it, and its mutants fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.model.protocol.explorer import Model, explore

Make = Callable[..., Model]
Setups = Mapping[str, Mapping[str, Any]]


def check_holds(made: Model, happens: tuple[str, ...] = (), *, limit: int = 200_000) -> None:
    """Check that no invariant breaks, and that each of ``happens`` occurs (a model without steps would also hold)."""
    verdict = explore(made, limit=limit)
    assert not verdict.broken, f"{verdict.broken}\n" + "\n".join(verdict.trace)
    missing = [what for what in happens if not any(what in label for label in verdict.done)]
    assert not missing, f"in {verdict.states} states this never happens: {missing}"


def check_dies(made: Model, says: str) -> None:
    """Check that the invariant with this description is the first one to break."""
    assert explore(made, limit=200_000).broken == says
