"""``python -m casckpt``: the command line."""

from __future__ import annotations

from casckpt.cli.main import main

if __name__ == "__main__":
    main()
