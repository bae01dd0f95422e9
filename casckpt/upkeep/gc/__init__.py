"""gc: forget what the policy does not keep, purge what was forgotten long ago, delete what nothing needs.

`gc` runs the phases of docs/format.md, and their order is the safety argument: list the objects, then the commits
(`candidates`), wait for open transactions (`wait`), then list the commits again. `purge` forgets and purges. A
listing is never passed from one phase to the next.
"""
