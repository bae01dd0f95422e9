"""A save, from a state to a commit.

`save` calls the other modules in the following order. `prepare` flattens the state on each rank. The **leader**
(`leader`) begins a transaction, offers stored cells for reuse (`reuse_offer`), and plans. Each rank writes its part
(`rank_part`): it compares its cells with the offered ones, and uploads the new cells (`upload`). The extents that it
stored or reused form its **share** (`shares`). The leader merges the shares into a manifest, and commits. `saver` runs
saves in the background.

A DCP save calls the same leader and the same `write_part`; see `casckpt.frontends.dcp.session`.
"""
