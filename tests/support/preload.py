"""The imports of the server from which ranks are forked. They run once for all ranks, and do not start threads."""

from __future__ import annotations

import hypothesis
import pytest
import s3fs
import sqlite_utils
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.distributed.tensor.parallel

import casckpt.frontends.dcp
import casckpt.frontends.trainer
import casckpt.frontends.training_state
import casckpt.loading.load
import casckpt.saving.save
import casckpt.saving.saver
import casckpt.storage.remote.s3.client
import casckpt.store.store
import casckpt.upkeep.copies.mirror
import casckpt.upkeep.gc.forgetting
import casckpt.upkeep.gc.gc
import casckpt.upkeep.repair.repair
import casckpt.upkeep.sizes
import tests.support.buckets
import tests.support.parallel
import tests.support.ranks
import tests.support.together
import tests.support.worlds
from tests.support.afresh import collect_less

__all__ = ["casckpt", "hypothesis", "pytest", "s3fs", "sqlite_utils", "tests", "torch"]

collect_less()  # otherwise, the first collection in each rank would copy all of these objects
