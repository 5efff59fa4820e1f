"""Lets a run survive bad numbers, corrupted bits, hangs and lost ranks."""
