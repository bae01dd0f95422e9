"""docs/reliability.md has a run without failures for each version of Python and torch that pyproject.toml claims."""

from __future__ import annotations

import re

from tests.test_packaging import ROOT


def claims(pyproject: str) -> set[tuple[str, str]]:
    """Return the versions of Python, and the oldest version of torch."""
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"|requires-python = ">=(3\.\d+)"', pyproject)
    torch = re.findall(r'"torch>=([0-9.]+)', pyproject)
    return {("torch", version) for version in torch} | {("Python", one or other) for one, other in pythons}


def ran(page: str) -> set[tuple[str, str]]:
    """Return the versions in rows without failures. Of torch, without the last number."""
    table = page.partition("<!-- versions -->\n")[2].partition("<!-- end of versions -->")[0]
    header, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    passed = [cells for row in rows if (cells := dict(zip(header, row, strict=False)))["failed"] == "0"]
    return {("Python", cells["Python"]) for cells in passed} | {
        ("torch", cells["torch"].rpartition(".")[0]) for cells in passed
    }


def test_each_claimed_version_was_tested() -> None:
    claimed = claims((ROOT / "pyproject.toml").read_text())
    assert {name for name, _ in claimed} == {"Python", "torch"}
    assert claimed - ran((ROOT / "docs/reliability.md").read_text()) == set()


def test_a_claim_without_a_run_is_found() -> None:
    page = (
        "<!-- versions -->\n| Python | torch | failed |\n|---|---|---|\n| 3.11 | 2.6.0 | 0 |\n| 3.12 | 2.7.0 | 1 |\n"
        "<!-- end of versions -->\n"
    )
    claimed = claims('requires-python = ">=3.12"\n"torch>=2.6,<3",')
    assert claimed == {("Python", "3.12"), ("torch", "2.6")}
    assert claimed - ran(page) == {("Python", "3.12")}
