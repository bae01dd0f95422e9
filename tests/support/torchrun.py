"""The environment that torchrun sets for its processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def as_torchrun_says(rank: int, size: int, **more: str) -> Iterator[None]:
    """Set the environment that tells Lightning and other frameworks that their processes already exist.

    ``more``: additional variables. Warnings about the environment are suppressed.
    """
    said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    names = {name: str(value) for name, value in said.items()}
    meeting = {"TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with patch.dict(os.environ, names | meeting | more), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def as_accelerate_hears(rank: int, size: int) -> Iterator[None]:
    """Set the same environment for Accelerate, and reset Accelerate's cache of the environment."""
    from accelerate.state import AcceleratorState, GradientState

    with as_torchrun_says(rank, size, ACCELERATE_USE_CPU="true"):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
