"""Runs: the log of each, and what follows it instead of listing all of commits/."""
