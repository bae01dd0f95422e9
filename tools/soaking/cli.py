"""The command line of the soak, and its files."""

from __future__ import annotations

import argparse
import importlib
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from casckpt.errors import ForgottenWarning
from soaking.master import Soak


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="tools/soak", description="Run everything at the same time on one store, with kills."
    )
    parser.add_argument("hours", type=float)
    parser.add_argument("--folder", type=Path, help="folder for the records and the store (default: a temporary one)")
    parser.add_argument("--storage", help="URL below which the store is created (default: the folder)")
    parser.add_argument("--storage-option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--nights", action="store_true", help="put a proxy with troubles in front of the bucket (needs endpoint_url)"
    )
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--idle", type=float, default=0.2, help="maximum seconds that a worker rests")
    parser.add_argument("--every", type=float, default=1.0, help="approximate seconds between kills")
    parser.add_argument(
        "--pause", type=float, default=60.0, help="seconds between pauses, in which everything is checked"
    )
    parser.add_argument("--nice", type=int, default=10)
    return parser.parse_args(given)


def main() -> int:
    """Run the soak."""
    asked = arguments()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="casckpt-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    asked.storage = asked.storage or str(folder)
    seed = asked.seed if asked.seed is not None else random.randrange(1 << 32)  # noqa: S311
    print(f"seed {seed}, folder {folder}", file=sys.stderr)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ForgottenWarning)  # under a lease
    if "://" in asked.storage:  # otherwise, each worker would import it again
        for name in ("aiobotocore.session", "s3fs", "botocore.endpoint"):
            with suppress(ImportError):
                importlib.import_module(name)
    status = Soak(asked, folder, random.Random(seed)).run()  # noqa: S311
    if asked.folder is None and status == 0:
        shutil.rmtree(folder)
    return status
