"""A report of a store as one page of HTML, which needs no network and no scripts: ``casckpt report STORE -o FILE``.

::

    from casckpt.frontends.report import page, write_report

    write_report(store, "report.html")

It is made of manifests and of what this host's catalogue knows; no tensor is read.
"""

from __future__ import annotations

from casckpt.frontends.report.page import page, write_report

__all__ = ["page", "write_report"]
