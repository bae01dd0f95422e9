"""Inputs for decoders, chosen by coverage: ``python -m tests.support.fuzz_guided KIND COUNT SEED CORPUS``.

It needs atheris (`pip install atheris`), which the tests do not install. Every input that reaches new code is kept in
the folder CORPUS. The smallest of these inputs are in tests/data/fuzz, where all fuzzing starts.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

atheris = importlib.import_module("atheris")
with atheris.instrument_imports(include=["casckpt"]):
    from tests.support.fuzz_decoders import decodes, seeds


def main(kind: str, count: int, seed: int, corpus: Path) -> None:
    """Run until an error other than a casckpt error occurs, or until COUNT inputs have been decoded."""
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds(kind)):
        (corpus / f"seed-{number}").write_bytes(data)
    limits = ["-max_len=20000", "-timeout=20", "-rss_limit_mb=4096"]
    atheris.Setup(["fuzz", f"-runs={count}", f"-seed={seed}", *limits, str(corpus)], lambda data: decodes(kind, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
