"""Imports Megatron-core in the server from which ranks are forked. The import takes four seconds of CPU time.

Afterward, `torch.load` accepts the same classes as before, so `tests.support.megatron_core.core` registers Megatron's.
"""

from __future__ import annotations

import warnings
from importlib import import_module

from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

before = get_safe_globals()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import_module("megatron.core.dist_checkpointing.strategies.torch")
clear_safe_globals()
add_safe_globals(before)
