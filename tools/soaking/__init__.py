"""See tools/soak. One process forks workers, kills or stops one of them every second or so, and starts it again.

Of each minute the last third is calm, for what takes longer than the next kill is away. Two workers live as long as the
soak does: one follows a run, one does all that a program does with a store.

What a checkpoint holds follows from its run and step, so that everybody can tell whether it is right. Invariants:

- what is loaded under a lease, or is tagged, is what was saved, to the bit; without either it may be gone, never wrong
- once a save has returned, its run's latest is never an older one; of one that was revoked nothing is visible
- verify finds no damage, while everything else goes on
- what a watch tells can be loaded, or is gone
- in each pause: nothing is open, no object is there that nothing names, every checkpoint loads; of those whose save has
  returned the newest two of each run are there, and a copy has the newest two, and all, if it is told which
- no worker ends but by a kill of the soak
- memory, files and threads of the two that are never killed do not grow

In the folder each save that returned is a line of ``ledger``, each run of the soak one of ``runs``, and each invariant
that did not hold one of ``failures``; ``counts.json`` has what happened in all runs together.
"""
