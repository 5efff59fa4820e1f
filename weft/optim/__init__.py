"""Weft's AdamW over flat buffers; 1-bit and 0/1 Adam, which send less; and K-FAC (`kfac.py`).

`update.py` has its arithmetic, `buffer_state.py` its state of a buffer, `rounding.py` random rounding and 8-bit codes.
"""

from weft.optim.adamw import AdamW

__all__ = ["AdamW"]
