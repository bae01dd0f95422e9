"""Decoders are created at import, since msgspec crashes if threads create one at the same time."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import casckpt.format
from casckpt.format.blob import encode_header
from casckpt.format.records import Forgotten, encode
from tests.format.test_manifest import UPLOADERS, data

FORMAT = Path(casckpt.format.__file__).parent


def late_types(source: str) -> Iterator[str]:
    """Yield the calls in which msgspec would inspect a type for the first time while a thread decodes."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(given.arg == "type" for given in node.keywords):
            yield ast.unparse(node)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.Lambda):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("Decoder", "convert"):
                    yield ast.unparse(node)


@pytest.mark.parametrize("path", sorted(FORMAT.glob("*.py")), ids=lambda path: path.stem)
def test_decoders_of_all_types_exist_before_threads_start(path: Path) -> None:
    assert list(late_types(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(data): return msgspec.json.decode(data, type=Body)",
        "def f(data): return Decoder(Body).decode(data)",
        "def f(data): return msgspec.msgpack.Decoder(Body).decode(data)",
        "def f(data): return msgspec.convert(data, Body)",
    ],
)
def test_a_type_added_later_is_detected(source: str) -> None:
    assert list(late_types(source))


RACE = """
import os, sys, threading
from casckpt.format import blob, manifest, records

sys.setswitchinterval(1e-6)
record, name, written, header = map(bytes.fromhex, sys.argv[1:])
together = threading.Barrier(16)

def first():
    together.wait()
    records.decode(record, records.LaterRecord, "commits/x")
    blob.decode_header(header, 8264)
    manifest.decode(written, name.decode()).tensors

for _ in range(6):
    child = os.fork()  # a new process that has decoded nothing
    if not child:
        threads = [threading.Thread(target=first) for _ in range(16)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
"""


def test_threads_can_be_the_first_to_decode_a_type() -> None:
    """No process dies when sixteen threads decode its first record, blob and manifest."""
    record = encode(Forgotten(txid=UPLOADERS[0], time=1, who="ann@node3"))
    name, written = data()
    given = [part.hex() for part in (record, name.encode(), written, encode_header([("float32", 4096)], 2))]
    done = subprocess.run([sys.executable, "-c", RACE, *given], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
