"""Axis `branch`: independent branches of a model on different ranks (`axis.py`)."""
