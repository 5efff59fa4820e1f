"""Says why a plan that splits the batch differs, if the unsplit model differs in the same way.

A plan gives each forward some samples of a batch. A model that centres its features over the batch, a loss that
contrasts samples with each other, or a forward that counts its calls computes something else from parts of a batch than
from the whole. No plan that splits the batch can equal such a model, and the plan is not at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weft.proof.compare import Noise, training
from weft.proof.report import severity
from weft.proof.sequential import SequentialResult


def sample_dependence(
    name: str,
    num_samples: int,
    expected: SequentialResult,
    run_parts: Callable[[], SequentialResult],
    noise: Mapping[str, Noise],
) -> str | None:
    """Returns in words that a model's steps depend on how many samples a forward has; None if they do not.

    `run_parts` runs the unsplit model with `num_samples` of each batch at a time, of which `expected` had more. `noise`
    is the model's own.
    """
    if num_samples >= expected.num_samples:
        return None
    pairs = training(run_parts(), expected)
    for quantity in ("loss", "gradient", "parameter"):
        worst = pairs[quantity].worst(noise.get(quantity))
        is_difference, _ = severity(worst)
        if is_difference:
            return (
                f"{name} with this loss, unsplit, computes another {quantity} from {num_samples} samples at a time "
                f"than from {expected.num_samples} (relative difference {worst.error:.0e}), so its result for a sample "
                f"depends on the others of a forward, on earlier forwards or on numbers that it draws, and no plan "
                f"that splits the batch can equal it; let it treat each sample alone, or give each forward the whole "
                f"batch (data, shard and expert 1, and no smaller micro_batch)"
            )
    return None
