"""Six weeks in a day: ``tools/soak weeks 12`` imitates a long training run, with real pauses between its saves.

The driver (driver.py) starts one job after the other. Each has another number of ranks, trains a small model as users
do (training.py), and ends after some saves: as planned, by SIGTERM, or by SIGKILL of one rank or of all of them, at a
random instant or in a save. Meanwhile and in between, commands thin, collect, verify, and copy to a mirror. The disk
fills up. The mirror is lost once, and rebuilt. The signing keys change. The clocks of jobs and commands move through
six weeks, with steps of hours forward and back. Half-way, the library is replaced by a newer one, and for one job by
the older one again. Two processes, one of each library, follow the run all the time.

Books in the folder record each save, with digests that casckpt has no part in. The invariants are:

- a job continues with exactly the state of a save that began, never with an older one than the last that returned
- every checkpoint that a follower reads is what was saved, bit for bit
- after each job, each visible checkpoint is one that began, and all that the rules keep are there
- commands succeed, and verify finds no damage
- jobs, ranks and commands end only as planned
- at the end, each checkpoint of the store and of the mirror is what was saved, and signed by the key of its time; the
  rules keep each of them; nothing else is stored; and memory, files and threads of the followers have not grown

The same command continues a soak that was stopped or killed. What a run does next follows from the books alone.
"""
