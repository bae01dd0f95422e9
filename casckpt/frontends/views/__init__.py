"""Views of a checkpoint: selections of its tensors that are renamed or split for a program.

A view (`view`) is a value that depends only on the manifest. `model_part` finds the model in a checkpoint from any
front end. `recut` splits tensors. `casckpt.loading.regions` reads a view
in bounded memory. Exports, `casckpt serve` and `casckpt follow` use views.
"""
