"""How people call it: training state, torch DCP, Megatron, trainers, converters. All write the same manifest."""
