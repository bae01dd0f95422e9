"""Frames: every cell comes back to the bit, differences add up and are undone, and hostile frames are refused."""
