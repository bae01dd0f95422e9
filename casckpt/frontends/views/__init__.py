"""Views of a checkpoint: which tensors a program sees, under which names, split or concatenated.

A view (`view`) is a value that depends on the manifest alone. `model_part` finds the model in checkpoints of any front
end, and `recut` splits and joins tensors along their first dimension. `casckpt.loading.regions` reads a view in bounded
memory.
Exports, `casckpt serve` and `casckpt follow` are built on views.
"""
