"""Garbage collection: forgets and purges checkpoints by a policy, and deletes objects that no checkpoint needs.

`gc` runs the phases of docs/format.md. Their order makes gc safe: it lists the objects, lists the commits
(`candidates`), waits for open transactions, and then relists the commits. `purge` forgets and purges checkpoints. A
phase that needs a fresh listing makes its own.
"""
