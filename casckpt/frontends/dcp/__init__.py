"""torch.distributed.checkpoint on a store: a storage writer and reader, planners without pickle, and converters.

`writer` and `reader` implement DCP's interfaces. A `session` is one save: it begins a transaction, uploads the plan's
items as a native save does, and commits. `schema` translates between DCP's metadata and a manifest. `converters`
import and export DCP folders in bounded memory.
"""

from __future__ import annotations

from casckpt.frontends.dcp.converters import casckpt_to_dcp, dcp_to_casckpt
from casckpt.frontends.dcp.planners import PickleFreeLoadPlanner, PickleFreeSavePlanner
from casckpt.frontends.dcp.reader import StorageReader
from casckpt.frontends.dcp.writer import StorageWriter
from casckpt.frontends.interchange.torch_files import casckpt_to_torch_save, torch_save_to_casckpt

__all__ = [
    "PickleFreeLoadPlanner",
    "PickleFreeSavePlanner",
    "StorageReader",
    "StorageWriter",
    "casckpt_to_dcp",
    "casckpt_to_torch_save",
    "dcp_to_casckpt",
    "torch_save_to_casckpt",
]
