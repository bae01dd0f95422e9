"""Every decoder of what lies in a store, on bytes that are bent: a value, or an error of casckpt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from casckpt.errors import Damaged
from casckpt.format.records import Marker, decode_marker, encode_marker
from tests.support.fuzz_decoders import DECODERS, bend, decodes, seeds, stored

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", DECODERS)
def test_bent_bytes_end_well_or_in_our_errors(kind: str) -> None:
    assert all(decodes(kind, seed) for seed in stored(kind)[:20])
    for seed in seeds(kind):
        decodes(kind, seed)
    bend(kind, 400, 0)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", DECODERS)
def test_thousands_of_bent_bytes_within_four_gib(kind: str, seed: int) -> None:
    command = [sys.executable, "-m", "tests.support.fuzz_decoders", kind, "20000", str(seed)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def test_what_no_text_is_in_a_field_that_is_passed_by_is_damage() -> None:
    written = encode_marker(Marker(format=1, store_id="abc", created_at=5))
    with pytest.raises(Damaged):
        decode_marker(written.replace(b'"hash"', b'"\xe2sh"'))
