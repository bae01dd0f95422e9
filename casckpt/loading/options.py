"""The arguments of a load, as they are given and as they are carried: one spelling, from the call to the plan."""

from __future__ import annotations

_PLACE = 0
