"""A save, from a state to a commit.

`save` is the way through. `prepare` flattens the state on each rank. The **leader** (`leader`) begins a transaction and
plans. Each rank compares its cells with the previous ones and uploads those that are new (`upload`). What a rank stored
is its **share** (`shares`). The leader merges the shares into a manifest and commits. `saver` runs saves in the
background.
"""
