"""Given changed bytes, every decoder of stored data returns a value or raises a casckpt error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from casckpt.errors import Damaged
from casckpt.format.records import decode_marker, encode_marker
from tests.support.fuzz_decoders import DECODERS, bend, decodes, seeds, stored
from tests.support.repositories import MARKER

ROOT = Path(__file__).parents[2]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", DECODERS)
def test_changed_bytes_decode_or_raise_a_casckpt_error(kind: str) -> None:
    assert all(decodes(kind, seed) for seed in stored(kind)[:20])
    for seed in seeds(kind):
        decodes(kind, seed)
    bend(kind, 400, 0)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", DECODERS)
def test_decoding_thousands_of_changed_inputs_uses_at_most_four_gib(kind: str, seed: int) -> None:
    command = [sys.executable, "-m", "tests.support.fuzz_decoders", kind, "20000", str(seed)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def test_invalid_utf8_in_an_unknown_field_is_reported_as_damage() -> None:
    written = encode_marker(MARKER)
    with pytest.raises(Damaged):
        decode_marker(written.replace(b'"hash"', b'"\xe2sh"'))
