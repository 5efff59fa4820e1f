"""The time of compute and of a collective that runs at the same time."""

from __future__ import annotations

# The share of speed that matmuls lose to a collective that runs at the same time, because it takes processors and
# memory bandwidth. Chosen, not measured: Galvatron (arXiv 2211.13878, not re-checked) takes 0.3.
OVERLAP_LOSS = 0.2


def beside(compute: float, communication: float, floor: float = 0.0, overlaps: bool = True) -> float:
    """Seconds of compute with a collective that runs at the same time; at least `floor` seconds of the collective are
    exposed, and all of them if nothing `overlaps`.
    """
    if not overlaps:
        return compute + communication
    return compute + OVERLAP_LOSS * min(compute, communication) + max(floor, communication - compute)
