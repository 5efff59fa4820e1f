"""Learning rates as a pure function of the step: warm-up, then cosine, WSD (warm-up, stable, decay) or constant."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "wsd", "constant"]


def learning_rate(
    step: int, *, peak: float, schedule: Schedule, steps: int, warmup: int, decay: int | None, final: float
) -> float:
    """Returns the learning rate of step `step` (from 0). `final` is the last step's rate as a fraction of the peak.

    WSD holds the peak and decays linearly over the last `decay` steps (a tenth of all, unless given).
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    if schedule == "cosine":
        done = (step - warmup) / max(1, steps - warmup)
        return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
    length = decay if decay is not None else max(1, steps // 10)
    into = step - (steps - length)
    return peak if into < 0 else peak * (1 - (1 - final) * min(1.0, (into + 1) / length))
