"""The front ends: training state, torch DCP, Megatron, trainers, converters. All write the same manifest."""
