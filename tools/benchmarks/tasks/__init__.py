"""The tasks of workers. Each takes `benchmarks.worker.Here` and plain arguments, and returns plain data."""
