"""What a commit refers to: manifests, blobs and signatures, and the references that name a checkpoint.

- `refs` resolves a **reference** such as `run@step` to a commit.
- `contents` defines `Contents`: the values of a checkpoint, by key.
- `manifests` reads and writes **manifests**, and `blobs` does the same for **blobs** and for marks of damage.
- `checkpoint` defines `Checkpoint`, the value that users receive. `watching` yields new checkpoints of a run.
"""
