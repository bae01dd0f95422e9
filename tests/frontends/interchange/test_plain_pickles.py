"""A file of torch.save with plain data is read without running code, and a hostile one is refused at once."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import date, time, timedelta
from pathlib import Path, PureWindowsPath
from typing import Any
from zipfile import ZipFile
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from torch.serialization import get_safe_globals, safe_globals

from casckpt.errors import CasckptError, InvalidInput, Refused
from casckpt.frontends.interchange import plain_pickles
from casckpt.frontends.interchange.torch_files import torch_save_to_casckpt
from casckpt.store.store import Store
from tests.support.exact import same
from tests.support.fuzz import Canary, sung
from tests.support.plain_examples import EXAMPLES


def needs_pickle(value: Any) -> bool:
    """Report whether docs/coming_from.md names a value as one that needs a pickle."""
    is_long = isinstance(value, int) and value.bit_length() >= 255 * 8
    special = isinstance(value, np.ndarray | np.generic) and (value.dtype.names or value.dtype.char in "gG")
    zone = isinstance(getattr(value, "tzinfo", value), ZoneInfo)
    return bool(is_long or special or zone or (isinstance(value, np.str_) and value == ""))


MORE = [
    np.asfortranarray(np.arange(6).reshape(2, 3)), bytearray(), Counter({date(2026, 1, 2): 3}), {date(2026, 1, 2), 4},
    frozenset([np.float32(2)]), {"a": {date(2026, 1, 2): [np.int8(1)]}}, torch.float16, torch.device("cuda:1"),
    [np.ones(2)], (range(3), (np.ones(1),)), {"defaultdict": 1}, np.array(["2020"], "M8[D]"),
]  # fmt: skip


def read(value: Any, path: Path, **options: Any) -> Any:
    torch.save(value, path, **options)
    mapped = options.get("_use_new_zipfile_serialization", True)
    return plain_pickles.plain(plain_pickles.load(path, mapped=mapped, allow_pickle=False))


@pytest.mark.parametrize("zipped", [True, False])
def test_plain_data_is_read_as_it_was(tmp_path: Path, zipped: bool) -> None:
    for value in [*EXAMPLES, *MORE]:
        if not needs_pickle(value):
            file = {"t": torch.ones(2), "x": value}
            found = read(file, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
            assert found["t"].tolist() == [1, 1]
            want = value.replace(fold=0) if isinstance(value, time) else value  # torch.save's protocol has no fold
            assert same(found["x"], want), repr(value)[:100]


@pytest.mark.parametrize(
    "value",
    [
        *filter(needs_pickle, EXAMPLES), np.random.default_rng(0), np.random.RandomState(0), np.array([{}]), Canary(),
        torch.nn.Linear(1, 1), len,
    ],
)  # fmt: skip
def test_other_data_is_refused_by_name_and_not_called_damaged(store: Store, tmp_path: Path, value: Any) -> None:
    torch.save({"x": value}, tmp_path / "x.pt")
    sung.clear()
    with pytest.raises(InvalidInput, match=r"holds more than tensors and plain data \(.+--allow-pickle"):
        torch_save_to_casckpt(tmp_path / "x.pt", store, step=1)
    assert sung == []


@pytest.mark.parametrize("value", [list, int, date, np.ndarray, np.dtype("f4"), Path])
def test_a_class_or_dtype_is_no_plain_data(store: Store, tmp_path: Path, value: Any) -> None:
    torch.save({"x": [value]}, tmp_path / "x.pt")
    with pytest.raises(CasckptError, match="allow"):
        torch_save_to_casckpt(tmp_path / "x.pt", store, step=1)


def test_a_path_of_another_system_is_a_pure_path(tmp_path: Path) -> None:
    torch.save({"x": PureWindowsPath(r"c:\x")}, tmp_path / "x.pt")
    with ZipFile(tmp_path / "x.pt") as file, ZipFile(tmp_path / "y.pt", "w") as other:
        for name in file.namelist():
            other.writestr(name, file.read(name).replace(b"PureWindowsPath", b"WindowsPath"))
    found = plain_pickles.plain(plain_pickles.load(tmp_path / "y.pt", mapped=False, allow_pickle=False))
    assert found == {"x": PureWindowsPath(r"c:\x")}


class Own:
    """What a program puts in place of other values."""

    def __init__(self, *_: Any) -> None:
        pass


def test_what_a_program_allows_stays_allowed_and_nothing_else(tmp_path: Path) -> None:
    nameless: list[Any] = [torch.float16]
    with safe_globals(nameless):
        assert read({"x": 1}, tmp_path / "x.pt") == {"x": 1}
    values = [date.min, time.min, timedelta(1), slice(1), range(3), frozenset(), np.float64(2)]
    names = ("datetime.date", "datetime.time", "datetime.timedelta", "builtins.slice", "builtins.range",
             "builtins.frozenset")  # fmt: skip
    with safe_globals([np.dtype, type(np.dtype("f8")), *((Own, name) for name in names)]):
        before = set(get_safe_globals())
        found = read(values, tmp_path / "x.pt")
        assert [type(one) for one in found] == [Own] * 6 + [np.float64]
        assert set(get_safe_globals()) == before
    assert not [one for one in get_safe_globals() if isinstance(one, tuple) and one[1] == "numpy.dtype"]
    assert same(read(values, tmp_path / "x.pt"), values)


def test_threads_can_read_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda n: read({"x": np.arange(n)}, tmp_path / f"{n}.pt")["x"].size, range(60))
        assert list(found) == list(range(60))


def call(name: str, *args: str) -> str:
    """A call in protocol 2. ``args``: code that pushes each argument."""
    return f"c{name}\n({''.join(args)}tR"


SING = "ctests.support.fuzz\nsing\n"
RANGE = call("__builtin__\nxrange", "K\0", "\x8a\x06" + "\xff" * 5 + "\0", "K\x01")
BYTES = call("_codecs\nencode", "X\x01\0\0\0a", "X\x06\0\0\0latin1")
LOOP = "(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t"
INT4 = call("numpy\ndtype", "U\x02i4") + LOOP + "b"


@pytest.mark.parametrize(
    ("code", "match"),
    [
        (call("posix\nsystem", "U\x04exit"), "--allow-pickle"),
        (f"{SING}(U\x01atR", r"tests\.support\.fuzz\.sing"),
        (call("__builtin__\ngetattr", "c__builtin__\nset\n", "U\x07__mro__"), "getattr"),
        (call("__builtin__\nlist", "]"), "takes no arguments"),
        (call("__builtin__\nset", RANGE), "not iterable"),
        (call("__builtin__\nfrozenset", RANGE), "not iterable"),
        (call("collections\nCounter", RANGE), "_Held"),
        (call("__builtin__\nbytes", "J\0\0\0\x7f"), "positional argument"),
        (call("__builtin__\nslice", "N", "]", "N"), "wrong type list"),
        (call("datetime\ndate", "K\x01K\x63K\x01"), "month must be"),
        (call("datetime\ndate", call("_codecs\nencode", "X\x04\0\0\0\x07\x08\x01\x63", "X\x06\0\0\0latin1")),
         "day is out of range"),
        (call("datetime\ndate", "K\x01K\x01K\x01") + "}(X\x01\0\0\0aK\x01ub", "--allow-pickle"),
        (call("argparse\nNamespace") + "}(K\x01K\x02ub", "name is not a string"),
        (call("collections\ndefaultdict", SING), r"tests\.support\.fuzz\.sing"),
        (call("collections\ndefaultdict", "X\x02\0\0\0os"), "os"),
        (call("numpy._core.multiarray\nscalar", INT4, BYTES), "does not match 1 bytes"),
        (call("numpy._core.multiarray\n_reconstruct") + f"(K\x01J\xff\xff\xff\xff\x85{INT4}\x89{BYTES}tb", "value"),
        (call("numpy.core.multiarray\n_reconstruct", "N") + f"(K\x01J\xff\xff\xff\xff\x85{INT4}\x89{BYTES}tb",
         "size|shape"),
        (call("numpy.core.multiarray\n_reconstruct", "N") + f"(K\x01)N\x89{BYTES}tb", "NoneType"),
    ],
)  # fmt: skip
def test_a_hostile_pickle_is_refused_at_once(store: Store, tmp_path: Path, code: str, match: str) -> None:
    torch.save({"x": 1}, tmp_path / "x.pt")
    with ZipFile(tmp_path / "x.pt") as file, ZipFile(tmp_path / "y.pt", "w") as other:
        for name in file.namelist():
            data = b"\x80\x02}X\x01\0\0\0a" + code.encode("latin-1") + b"s."
            other.writestr(name, data if name.endswith("data.pkl") else file.read(name))
    sung.clear()
    with pytest.raises((InvalidInput, Refused), match=match):
        torch_save_to_casckpt(tmp_path / "y.pt", store, step=1)
    assert sung == []
