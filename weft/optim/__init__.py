"""Weft's own optimizer: AdamW over flat slices. `update` is its arithmetic, `store` where its state lies, `rounding`
numbers in few bits.
"""

from weft.optim.adamw import AdamW

__all__ = ["AdamW"]
