"""What a program sees of a checkpoint: which entries, under which names, cut or joined in which way.

A view (`view`) is a value that depends on the manifest alone. `model_part` finds the model in checkpoints of any front
end, `recut` splits and joins tensors along their first dimension, and `windows` reads a view in bounded memory.
Exports, `casckpt serve` and `casckpt follow` are built on views.
"""
