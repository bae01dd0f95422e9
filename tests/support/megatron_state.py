"""A sharded state dict that several tests save and load."""

from __future__ import annotations

import argparse

import torch

COMMON = {
    "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99)),
    "groups": [{"lr": 1.0}],
    "seed": torch.tensor([5]),
    "empty": {"dict": {}, "list": []},
    "content_metadata": {"version": 2},
}
