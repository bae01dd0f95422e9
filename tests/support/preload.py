"""What the server that ranks are forked from imports once, in place of each of them: no threads, only modules."""

from __future__ import annotations

import pytest
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.distributed.tensor.parallel

import tests.support.parallel
import tests.support.ranks
import tests.support.together
import tests.support.worlds

__all__ = ["pytest", "tests", "torch"]
