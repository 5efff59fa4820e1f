"""The `context` axis: one sequence over several ranks."""
