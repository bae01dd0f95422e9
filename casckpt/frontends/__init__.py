"""Front ends: how frameworks save to and load from a store. All of them write the same manifest.

`training_state` saves models and optimizers by parameter name, and most other front ends build on it. `dcp` and
`megatron` implement the interfaces of those libraries. `trainer`, `lightning`, `transformers`, `accelerate` and
`torchtitan` are for training loops. `convert`, `exporting` and `serve` exchange checkpoints with other tools.
"""
