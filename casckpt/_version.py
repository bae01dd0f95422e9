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
    moves = _text(git / "logs/HEAD").splitlines()
    return f"{version}+g{moves[-1].split()[1][:8]}" if moves and ".dev" in version else version


__version__ = _with_commit("0.3.0.dev0", Path(__file__).parent.parent)
