"""See tools/soak. One process forks workers, kills or stops one of them every second or so, and starts it again.

The last third of each minute is calm, for work that takes longer than the time between two kills. Two workers are never
killed: one follows a run, and one does everything that a program does with a store.

The content of a checkpoint follows from its run and step, so every process can check it. The invariants are:

- a load under a lease, or of a tagged checkpoint, returns the saved state, bit for bit; without a lease or tag, the
checkpoint may be gone, but the loaded state is never wrong
- after a save has returned, the latest checkpoint of its run is never an older one; a revoked save is not visible
- verify never finds damage
- a checkpoint from a watch can be loaded, or is gone
- in each pause, there is no open transaction and no unneeded object, and every checkpoint loads; the newest two saved
  checkpoints of each run exist, and a copy has the newest two, and all others that it names
- a worker ends only if the soak kills it
- memory, files and threads of the two workers that are never killed do not grow

In the soak's folder, ``ledger`` has a line for each finished save, ``runs`` for each run of the soak, and ``failures``
for each broken invariant. ``counts.json`` has the totals of all runs.
"""
