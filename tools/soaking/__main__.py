"""``python -m soaking``, as tools/soak calls it."""

from __future__ import annotations

import sys

from soaking.cli import main

sys.exit(main())
