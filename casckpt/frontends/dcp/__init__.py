"""torch.distributed.checkpoint on a store: a writer and a reader for it, planners without pickle, and converters."""

from __future__ import annotations

from casckpt.frontends.dcp.planners import PickleFreeLoadPlanner, PickleFreeSavePlanner
from casckpt.frontends.dcp.reader import StorageReader
from casckpt.frontends.dcp.writer import StorageWriter

__all__ = ["PickleFreeLoadPlanner", "PickleFreeSavePlanner", "StorageReader", "StorageWriter"]
