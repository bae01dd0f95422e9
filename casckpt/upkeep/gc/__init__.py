"""Garbage collection: forgets and purges checkpoints by the policy, and deletes objects that no checkpoint needs.

`gc` runs the phases of docs/format.md. Their order makes gc safe: list the objects, then the commits (`candidates`),
wait for open transactions, then list the commits again. `purge` forgets and purges. Each phase makes its own listing,
if it needs a fresh one.
"""
