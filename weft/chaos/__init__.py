"""Injects faults at random times and measures how a run recovers from them: `weft chaos`."""
