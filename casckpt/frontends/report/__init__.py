"""A report of a store as one HTML page without scripts or network access: ``casckpt report STORE -o FILE``.

::

    from casckpt.frontends.report import page, write_report

    write_report(store, "report.html")

It is made from manifests and the catalogue of this host, without reading tensors.
"""

from __future__ import annotations

from casckpt.frontends.report.page import page, write_report

__all__ = ["page", "write_report"]
