"""The checkpoints that exist: records, logs, and the commits that follow from them.

- A **transaction** (`transactions`) is a save in progress. It ends with one record in commits/.
- A **log** consists of the numbered records of one transaction. `commits` reads logs, and appends to them.
- A **commit** is the state that follows from a log: visible, forgotten or purged. `folding` computes it.

`announcements` keeps a log for each run. With this log, `following` finds the newest checkpoint without a listing.
`tags` and `leases` name checkpoints and protect them from gc.
"""
