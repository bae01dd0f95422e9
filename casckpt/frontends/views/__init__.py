"""Views of a checkpoint: a selection of its tensors, renamed, split or concatenated for a program.

A view (`view`) is a value that depends only on the manifest. `model_part` finds the model in checkpoints of any front
end. `recut` splits and joins tensors along their first dimension. `casckpt.loading.regions` reads a view in bounded
memory. Exports, `casckpt serve` and `casckpt follow` use views.
"""
