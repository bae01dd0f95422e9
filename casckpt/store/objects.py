"""Whole objects in what a store saves and loads: modules, optimizers, and others with a state_dict.

To name the parameters of an optimizer, models are taken apart. That lies above the store, and `casckpt` hands it in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

home: Callable[[], Any]
"""Imports, and gives, the module that takes objects apart: set when `casckpt` is imported."""
