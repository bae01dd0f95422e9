"""The version of casckpt, which is defined only here. In a checkout, a development version names its commit.

Wheels and sdists have a copy of this file with the result: see tools/hatch_build.py.
"""

from pathlib import Path


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _with_commit(version: str, root: Path) -> str:
    """Return the version, and of a development version also the commit of the checkout in ``root``, if it is one."""
    git = root / (_text(root / ".git").removeprefix("gitdir: ") or ".git")  # a worktree has a file
    head = _text(git / "HEAD").removeprefix("ref: ")
    if "/" in head:
        shared = git / _text(git / "commondir")
        packed = _text(shared / "packed-refs").splitlines()
        head = _text(shared / head) or next((line for line in packed if line.endswith(f" {head}")), "")
    return f"{version}+g{head[:8]}" if head and ".dev" in version else version


__version__ = _with_commit("0.3.0.dev0", Path(__file__).parent.parent)
