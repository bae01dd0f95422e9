"""What the server that ranks are forked from imports once, in place of each of them: no threads, only modules."""

from __future__ import annotations

import torch.distributed.fsdp
import torch.distributed.tensor
import torch.distributed.tensor.parallel  # noqa: F401 - as the others here

import casckpt.checkpoint.job
import casckpt.checkpoint.load
import casckpt.checkpoint.ranks
import casckpt.checkpoint.store  # noqa: F401 - imported for those who are forked later
