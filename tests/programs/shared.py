"""What the programs of this folder share: their options, the lines that they print, and the moment of a kill.

A program prints one line for each event, which `test_loops.py` reads::

    starts after 20         the step of the checkpoint that it resumed; "starts afresh" if it resumed none
    ran 21 0.0031           a step or epoch that it has completed, and the learning rate
    ended 5f3a...           a digest of the model's weights at the end
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

KILL = "CASCKPT_TEST_KILL"
"""``STEPS:SECONDS``: kill the job so many seconds after this process completed so many steps (0: after it started)."""
_left = [0]


def options(**defaults: Any) -> argparse.Namespace:
    """Return the options of the command line. ``defaults``: further options of the program, with their values."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True)
    parser.add_argument("--steps", type=int, required=True, help="the last step or epoch")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True)
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("casckpt.events").setLevel(logging.WARNING)
    _left[0] = int(os.environ.get(KILL, "-1:0").split(":")[0])
    _count()
    return parser.parse_args()


def starts(step: int | None) -> None:
    """Print the step of the checkpoint from which the program continues."""
    _tell("starts afresh" if step is None else f"starts after {step}")


def ran(step: int, rate: float) -> None:
    """Print that a step was completed."""
    _tell(f"ran {step} {rate:.9g}")
    _left[0] -= 1
    _count()


def ended(weights: Mapping[str, Any]) -> None:
    """Print a digest of a state dict."""
    digest = hashlib.blake2b(digest_size=8)
    for name, value in sorted(weights.items()):
        if isinstance(value, torch.Tensor):
            digest.update(name.encode() + value.detach().cpu().contiguous().view(-1).numpy().tobytes())
    _tell(f"ended {digest.hexdigest()}")


def _tell(line: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def _count() -> None:
    """Start the clock of the kill, if it is time."""
    if _left[0] == 0:
        _left[0] = -1
        clock = threading.Timer(float(os.environ[KILL].split(":")[1]), lambda: os.killpg(0, signal.SIGKILL))
        clock.daemon = True
        clock.start()
