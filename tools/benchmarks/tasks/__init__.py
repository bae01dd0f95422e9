"""The workers' tasks. Each accepts `benchmarks.worker.Here` and plain arguments, and returns plain data."""
