"""Weft's AdamW over flat buffers; 1-bit and 0/1 Adam, which send less; and K-FAC (`kfac.py`).

`update.py` has its arithmetic, `state_store.py` the memory of its state, `rounding.py` random rounding and 8-bit codes.
"""

from weft.optim.adamw import AdamW

__all__ = ["AdamW"]
