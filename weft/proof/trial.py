"""A trial of a plan: its model and batches, the unsplit model of it, and what fails there, in words."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from weft.comm.backends import DeviceType
from weft.errors import PlanError, UnfitError, WeftError
from weft.inspection.nested_tensors import map_tensors
from weft.plan import BatchSplit, Plan
from weft.profiling import Profile
from weft.proof.compare import Noise, training
from weft.proof.report import severity
from weft.proof.sequential import BatchFn, ModelFn, SequentialResult, make_model, run_sequential
from weft.schedule.schedules import make_schedule
from weft.step.batch import Batch, plain_batch
from weft.step.objective import Objective

STEPS = 3
_WEFT, _TORCH = Path(__file__).parents[1], str(Path(torch.__file__).parent)
MAX_MESSAGE = 300  # characters of an error of a model's own code that are repeated


@dataclass(frozen=True)
class Trial:
    """How a plan is run for a proof: its device, number of steps, and whether it compiles or records."""

    plan: Plan
    steps: int = STEPS
    clip: float | None = 1.0
    ranks_per_node: int | None = None
    device: DeviceType = "cpu"
    compiles: bool = False
    records: bool = False  # records a CUDA graph
    cluster: str | None = None  # by whose links `communication.between = "fastest"` chooses
    not_proved: tuple[str, ...] = ()  # parts of the run that are not proved, in words
    tolerance: float | None = None  # replaces those of all quantities, whatever the model's own noise


@dataclass(frozen=True)
class Case:
    """The model, batches and objective of a proof, how a batch is split, and the model's profile."""

    model_fn: ModelFn
    batch_fn: BatchFn
    objective: Objective
    split: BatchSplit
    counted: Profile

    def batch(self, step: int, device: torch.device) -> Batch:
        """Returns the whole batch of a step on a device."""
        return map_tensors(lambda tensor: tensor.to(device), plain_batch(self.batch_fn(step)))


def device_of(trial: Trial) -> torch.device:
    """Returns this rank's device: the CPU, or the current GPU, which was set when the rank started."""
    return torch.device("cuda", torch.cuda.current_device()) if trial.device == "cuda" else torch.device("cpu")


@contextmanager
def explained(plan: Plan, name: str) -> Iterator[None]:
    """Raise a PlanError where a model that runs unsplit fails under the plan, for a reason that no rule foresaw."""
    try:
        yield
    except (WeftError, dist.DistError):
        raise
    except Exception as error:
        if _is_of_communication(error):
            raise
        raise PlanError(
            f"{name} runs unsplit and fails under {plan.describe_axes()}: {_described(error)}. Its code does something "
            f"that this plan changes, and no rule of weft names it (it may take parameters from parameters() or "
            f"named_parameters(), which are this rank's parts, or expect all features); use another plan"
        ) from error


@contextmanager
def fitting() -> Iterator[None]:
    """Raise the PlanErrors of the context as UnfitErrors: its code looks whether a plan fits, and compares nothing."""
    try:
        yield
    except UnfitError:
        raise
    except PlanError as error:
        raise UnfitError(str(error)) from error


@contextmanager
def unsplit(name: str) -> Iterator[None]:
    """Raise a PlanError where a model's own code fails before it is split."""
    try:
        yield
    except WeftError:
        raise
    except Exception as error:
        raise PlanError(
            f"{name} fails before it is split, on a batch of batch_fn: {_described(error)}; return what its forward "
            f"takes: (inputs, labels) for one input, or a dict of arguments for several"
        ) from error


def _described(error: Exception) -> str:
    """Returns an error of a model's own code in words: its class, its message and the last line of that code."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((one for one in reversed(frames) if _is_of_a_model(one.filename)), frames[-1])
    message = str(error).strip().partition("\n")[0]  # torch's may go on for a page
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]} …"
    return f"{type(error).__name__}: {message} ({Path(frame.filename).name}:{frame.lineno})"


def _is_of_communication(error: Exception) -> bool:
    """Did a collective fail? It does where another rank died, or makes other collectives."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    own = [file for file in files if not file.startswith(_TORCH)]
    return bool(own) and own[-1].startswith(str(_WEFT / "comm"))


def _is_of_a_model(file: str) -> bool:
    """Is this file neither torch's nor weft's, but for weft's models?"""
    is_ours = file.startswith(str(_WEFT)) and not file.startswith(str(_WEFT / "models"))
    return not is_ours and not file.startswith(_TORCH)


def sequential(case: Case, trial: Trial, device: torch.device) -> Callable[[int], SequentialResult]:
    """Returns a function that trains the unsplit model; given a number that is not 0, rounded in another way.

    It runs whole batches. If forwards change buffers, it runs what all ranks together do at a time, and with batch
    norms whose statistics are each rank's own, one micro-batch at a time.
    """
    plan, split = trial.plan, case.split
    together = split.micro_batch * split.num_batch_ranks
    parts = [split.batch, together]
    if case.counted.batch_mixers:
        parts = [together if plan.statistics == "batch" else split.micro_batch]

    def run(rounding: int) -> SequentialResult:
        model = make_model(case.model_fn).to(device)
        replicas = _replicas(plan, split) if parts[0] == together else []
        return run_sequential(
            model,
            lambda step: case.batch(step, device),
            case.objective,
            trial.steps,
            trial.clip,
            parts[0],
            replicas,
            rounding,
            keeps_casts=trial.compiles and plan.precision == "fp64",
        )

    def run_as_ranks_do(rounding: int) -> SequentialResult:
        result = run(rounding)
        if result.changed and parts[1:] and parts[0] != together:
            parts.pop(0)
            result = run(rounding)
        return result

    return run_as_ranks_do


def dependence(
    case: Case, trial: Trial, device: torch.device, expected: SequentialResult, noise: Mapping[str, Noise]
) -> str | None:
    """Returns in words that the unsplit model computes something else from micro-batches; None if it does not."""
    size = case.split.micro_batch

    def run_parts() -> SequentialResult:
        model, batches = make_model(case.model_fn).to(device), partial(case.batch, device=device)
        return run_sequential(model, batches, case.objective, trial.steps, trial.clip, size, [])

    return sample_dependence(type(case.counted.model).__name__, size, expected, run_parts, noise)


def _replicas(plan: Plan, split: BatchSplit) -> list[int]:
    """Returns the replica of each micro-batch if the pipeline has mirrored replicas; else an empty list."""
    pipe = plan.pipe
    if pipe.degree == 1:
        return []
    schedule = make_schedule(pipe.schedule, pipe.degree, split.accumulation, **pipe.options)
    steps = [step for rank in range(pipe.degree) for step in schedule.compute(rank)]
    found = {step.micro_batch: step.replica for step in steps}
    return [found[number] for number in sorted(found)] if len(schedule.placement) > 1 else []


def refuse_bad_numbers(name: str, expected: SequentialResult) -> None:
    """Raise a PlanError if the unsplit model's own loss or gradient norm is infinite or NaN."""
    for quantity, values in (("loss", expected.losses), ("gradient norm", expected.norms)):
        step = next((number for number, value in enumerate(values) if not math.isfinite(value)), None)
        if step is not None:
            raise PlanError(
                f"the {quantity} of {name}, unsplit and in float64, is {values[step]} in step {step + 1} of the proof, "
                f"so there is nothing that a plan could equal; look for a division by 0, a logarithm or root of a "
                f"number that is not positive, or a softmax of -inf alone in the model, its loss and its batch"
            )


def unusual_calls(counted: Profile, expected: SequentialResult) -> list[str]:
    """Returns in words how a loss called the model and its layers, where predicted bytes assume something else."""
    words = []
    if expected.inner_gradients:
        words.append(
            f"the loss computes gradients before its own backward (torch.autograd.grad, "
            f"{', '.join(expected.inner_gradients)}), for which the profile counts no communication; use data, or "
            f"shard stage 1 or 2"
        )
    for name, usual in [("", 1), *((block.name, block.calls) for block in counted.blocks)]:
        forward, backward = expected.calls[name, "forward"], expected.calls[name, "backward"]
        if (forward, backward) != (usual, 0):
            what = f"block '{name}'" if name else "the model"
            again = f" and {backward} times in backward (checkpointing by the model itself)" if backward else ""
            words.append(
                f"one loss calls {what} {forward} times{again}, and the profile counted {usual}, for which bytes are "
                f"predicted; compute the loss from one call, of all inputs together, or use data"
            )
    if not counted.counted:
        words.append(
            "which layers a forward calls depends on values, so their communication cannot be counted beforehand; use "
            "data, or shard stage 1"
        )
    for (name, _), calls in expected.calls.items():
        if calls > expected.calls["", "forward"] and name not in ("", *(block.name for block in counted.blocks)):
            words.append(
                f"one loss calls '{name}' {calls} times, and bytes are predicted for logits and a loss of one call; "
                f"call it once, of all inputs together, or use data or shard"
            )
    return words


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
