"""Front ends: the interfaces through which frameworks save to and load from a store. All write the same manifests.

`training_state` saves models and optimizers by parameter name, and most other front ends build on it. `dcp` and
`megatron` implement the interfaces of those libraries. `trainer`, `lightning`, `transformers`, `accelerate` and
`torchtitan` are for training loops. `convert`, `interchange`, `views` and `serve` exchange checkpoints with other
tools. `follow` keeps a folder up to date with the newest checkpoint of a run.
"""
