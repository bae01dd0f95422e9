"""What to do, as pure functions of values: what to write, what to reuse, which bytes to read, what to keep."""
