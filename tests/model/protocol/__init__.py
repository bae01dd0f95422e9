"""Models of the protocol of the next format, which is not built yet; the protocol that is built is one folder up.

`explorer` walks every interleaving; `logs` says what the records in commits/ mean; each other module is a concern, with
its programs, its invariants and its mutants. docs/decisions/0034 says what they taught.
"""
