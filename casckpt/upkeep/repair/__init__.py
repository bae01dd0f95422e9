"""Damage: found, marked, and put right from wherever right bytes are."""
