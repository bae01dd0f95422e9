"""Models of the protocol of the next format, which is not built yet. The folder above models the built protocol.

`explorer` explores every interleaving. `logs` defines the records in commits/. Each other module models one concern,
with its programs, its invariants and its mutants. docs/decisions/0034 has the results.
"""
