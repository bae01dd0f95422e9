"""Models of the protocol of the next format, which is not implemented yet.

The folder above contains the model of the implemented protocol.

`explorer` explores every interleaving. `logs` defines the records in commits/. Each of the other modules models one
concern, with its programs, invariants and mutants. docs/decisions/0034 contains the results.
"""
