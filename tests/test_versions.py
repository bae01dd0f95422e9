"""docs/reliability.md has a run without failures for each version that pyproject.toml claims to support."""

from __future__ import annotations

import re

from tests.test_packaging import ROOT

LIBRARIES = ("accelerate", "lightning", "megatron-core", "torchtitan", "transformers")


def claims(pyproject: str) -> set[tuple[str, str]]:
    """Return the versions of Python, and the oldest versions of torch and `LIBRARIES`."""
    bounds = re.findall(r'"([a-z-]+)>=([0-9.]+)[,"]', pyproject)
    found = {(name, version) for name, version in bounds if name in ("torch", *LIBRARIES)}
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"|requires-python = ">=(3\.\d+)"', pyproject)
    return found | {("Python", one or other) for one, other in pythons}


def ran(page: str) -> set[tuple[str, str]]:
    """Return the versions in rows without failures, and of each version also its first numbers."""
    found = set[tuple[str, str]]()
    for name in ("versions", "libraries"):
        table = page.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- end of {name} -->")[0]
        header, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
        for row in rows:
            cells = dict(zip(header, row, strict=False))
            if cells["failed"] == "0":
                found |= {(cells["library"], cells["version"])} if name == "libraries" else {
                    (of, cells[of]) for of in ("Python", "torch")
                }  # fmt: skip
    parts = ((name, version.split(".")) for name, version in found)
    return {(name, ".".join(part[:count])) for name, part in parts for count in range(1, len(part) + 1)}


def test_each_claimed_version_was_tested() -> None:
    claimed = claims((ROOT / "pyproject.toml").read_text())
    assert {name for name, _ in claimed} == {"Python", "torch", *LIBRARIES}
    assert claimed - ran((ROOT / "docs/reliability.md").read_text()) == set()


def test_a_claim_without_a_run_is_found() -> None:
    page = (
        "<!-- versions -->\n| Python | torch | failed |\n|---|---|---|\n| 3.11 | 2.6.0 | 0 |\n| 3.12 | 2.7.0 | 1 |\n"
        "<!-- end of versions -->\n<!-- libraries -->\n| library | version | failed |\n|---|---|---|\n"
        "| lightning | 2.5.6 | 0 |\n<!-- end of libraries -->\n"
    )
    claimed = claims('requires-python = ">=3.12"\n"torch>=2.6,<3",\n"lightning>=2.5",  # why\n"accelerate>=1.1",')
    assert claimed == {("Python", "3.12"), ("torch", "2.6"), ("lightning", "2.5"), ("accelerate", "1.1")}
    assert claimed - ran(page) == {("Python", "3.12"), ("accelerate", "1.1")}
