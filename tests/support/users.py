"""Acts as a different user, which only root can do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def acting_as(user: int, group: int, *, umask: int) -> Iterator[None]:
    """Inside the context, this process has the rights of a user of one group, and its umask."""
    groups, before = os.getgroups(), os.umask(umask)
    os.setgroups([])
    os.setegid(group)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
        os.umask(before)
