"""Which part of a model a serving rank holds, and what its steps send."""
