"""Models of the protocol: rewrites, loads, tags, leases, mirrors, announcements, and folded history.

The folder above contains a model of commits and gc in more detail.

`explorer` explores every interleaving, `places` defines the records of a log. Each of the other modules models one
concern, with its programs, invariants and mutants.
"""
