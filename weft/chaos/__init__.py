"""Faults at random times and what a run does under them: `weft chaos`."""
