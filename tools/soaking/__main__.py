"""``python -m soaking``, as tools/soak calls it."""

from __future__ import annotations

import sys

if sys.argv[1:2] == ["weeks"]:  # it must not import the library of the checkout, which may change meanwhile
    from soaking.weeks.driver import main

    sys.exit(main(sys.argv[2:]))
else:
    from soaking.cli import main as short

    sys.exit(short())
