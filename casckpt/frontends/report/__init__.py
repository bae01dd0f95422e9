"""A report of a store as one HTML page: ``casckpt report STORE -o FILE``.

::

    from casckpt.frontends.report import page, write_report

    write_report(store, "report.html")

`page` collects the facts from manifests and from the catalogue of this host, without reading any tensors. `charts`
draws the charts as SVG. The page is a single file that needs neither network access nor scripts.
"""

from __future__ import annotations

from casckpt.frontends.report.page import page, write_report

__all__ = ["page", "write_report"]
