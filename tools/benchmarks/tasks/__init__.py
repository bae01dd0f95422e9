"""What workers are told to do. Each task takes `benchmarks.worker.Here` and plain arguments, and returns plain data."""
