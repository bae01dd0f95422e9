"""What a commit refers to (manifests, blobs and signatures), and the references that name a checkpoint.

- `refs` resolves a **reference** such as `run@step` to a commit.
- `contents` defines `Contents`: the values of a checkpoint, by key.
- `manifests` reads and writes **manifests**. `blobs` reads and writes **blobs** and damage marks.
- `checkpoint` defines `Checkpoint`, the value that users receive. `watching` yields the new checkpoints of a run.
"""
