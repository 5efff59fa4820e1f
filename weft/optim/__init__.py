"""Weft's AdamW over flat buffers.

`update.py` has its arithmetic, `state_store.py` the memory of its state, `rounding.py` random rounding and 8-bit codes.
"""

from weft.optim.adamw import AdamW

__all__ = ["AdamW"]
