"""Signatures: who vouches for a checkpoint, and whose word a load wants."""
