"""gc: forgets and purges checkpoints by the policy, and deletes objects that no checkpoint needs.

`gc` runs the phases of docs/format.md, and their order is the safety argument: list the objects, then the commits
(`candidates`), wait for open transactions (`wait`), then list the commits again. `purge` forgets and purges. A phase
makes its own listing, and no listing is passed to a later phase that needs a fresh one.
"""
