"""The tables [train], [checkpoint], [restart], [numbers], [log] and [roles] of a run file as frozen dataclasses."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from weft.data.config import Data, PreferenceConfig
from weft.data.goldfish import Goldfish
from weft.errors import ConfigError
from weft.plan import Plan
from weft.schema import at_least, at_most

MAX_BATCH, MAX_BATCH_TOKENS = 1 << 24, 1 << 36  # of a step; more micro-batches could not be listed
MAX_STEPS = 10**12
MAX_LOADERS = 1 << 10  # also of batches on their way to a rank
# Limits of AdamW and torch's generators: a value is at least the first number and below the second.
LIMITS = {
    "learning_rate": (0.0, math.inf),
    "weight_decay": (0.0, math.inf),
    "beta1": (0.0, 1.0),
    "beta2": (0.0, 1.0),
    "epsilon": (0.0, math.inf),
    "z_loss": (0.0, math.inf),
    "dpo_beta": (0.0, math.inf),
    "seed": (-(2**63), 2**63),
}


@dataclass(frozen=True)
class TrainConfig:
    """The options of training.

    `graph` is in `step/cuda_graph.py`, `goldfish` in `data/goldfish.py`, `layer_drop` in `step/layer_drop.py`, and the
    loss of preferences in `step/preference.py`.
    """

    steps: Annotated[int, "steps of the run"]
    batch: Annotated[int | None, "sequences or images of a step, over all ranks; or give batch_tokens"] = None
    batch_tokens: Annotated[int | None, "tokens of a step, over all ranks"] = None
    learning_rate: Annotated[float, "the highest learning rate"] = 3e-4
    schedule: Annotated[Literal["cosine", "wsd", "constant"], "the course of the learning rate after the warm-up"] = (
        "cosine"
    )
    warmup_steps: Annotated[int, "steps in which the learning rate rises"] = 0
    decay_steps: Annotated[int | None, "the last steps, in which it falls (wsd)"] = None
    final_learning_rate: Annotated[float, "the last learning rate, as a part of the highest"] = 0.1
    weight_decay: Annotated[float, "AdamW's decay of weights"] = 0.1
    beta1: Annotated[float, "AdamW's decay of the first moment"] = 0.9
    beta2: Annotated[float, "AdamW's decay of the second moment"] = 0.95
    epsilon: Annotated[float, "AdamW's epsilon"] = 1e-8
    clip: Annotated[float | None, "the largest norm of the gradient"] = 1.0
    seed: Annotated[int, "of the initial weights, the order of samples and dropout"] = 0
    deterministic: Annotated[bool, "use only kernels that repeat their bits"] = False
    compile: Annotated[bool | None, "compile blocks with torch.compile; by default on GPUs"] = None
    graph: Annotated[bool | None, "record forward and backward as a CUDA graph; by default for images on one GPU"] = (
        None
    )
    z_loss: Annotated[float, "the weight of the squared log of the softmax's denominator (text)"] = 0.0
    goldfish: Annotated[Goldfish | None, "leave targets out of the loss, against memorising"] = None
    layer_drop: Annotated[LayerDrop | None, "skip deep blocks at random, more often later"] = None
    compressed: Annotated[
        CompressedAdam | None, "an optimizer that sends one bit per parameter over data; needs `plan.exact = false`"
    ] = None
    kfac: Annotated[
        Kfac | None, "K-FAC for linears and convolutions, AdamW for the rest; needs `plan.exact = false`"
    ] = None
    freeze: Annotated[
        tuple[str, ...], "patterns of names of parameters that are not trained, such as model.embed*"
    ] = ()
    dpo_beta: Annotated[float, "the strength of the reference in the loss of preferences"] = 0.1
    device: Annotated[Literal["auto", "cpu", "cuda"], "cpu, cuda, or what is there"] = "auto"
    share_gpus: Annotated[bool, "allow more ranks than GPUs, for tests"] = False
    timeout_seconds: Annotated[int, "the longest wait for another rank"] = 600
    log_every: Annotated[int, "steps between two lines of the metrics"] = 1
    evaluate_every: Annotated[
        int | None, "steps between two evaluations on held-out samples; none if data.held_out = 0"
    ] = None
    evaluate_sequences: Annotated[int, "held-out sequences or images of an evaluation"] = 64
    patience: Annotated[int | None, "stop after so many evaluations without a lower held-out loss"] = None
    timeline: Annotated[str | None, "a file to draw the last step of a pipeline to"] = None
    profile: Annotated[
        str | None, "steps whose communication is recorded for `weft profile`; `10:20`: the ten after the tenth"
    ] = None

    def __post_init__(self) -> None:
        positive = ("steps", "log_every", "evaluate_every", "evaluate_sequences", "patience", "timeout_seconds")
        for name in (*positive, "decay_steps"):
            if getattr(self, name) is not None:
                at_least(f"train.{name}", getattr(self, name), 1)
        at_least("train.warmup_steps", self.warmup_steps, 0)
        at_most("train.steps", self.steps, MAX_STEPS)
        at_most("train.batch", self.batch or 0, MAX_BATCH)
        at_most("train.batch_tokens", self.batch_tokens or 0, MAX_BATCH_TOKENS)
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if not low <= value < high:
                raise ConfigError(f"train.{name} = {value}; it must be at least {low} and below {high}")
        if not 0 <= self.final_learning_rate <= 1:
            raise ConfigError(
                f"train.final_learning_rate = {self.final_learning_rate}; it is a fraction of train.learning_rate"
            )
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"train.clip = {self.clip}; it must be greater than 0, inf to clip nothing")
        if (self.batch is None) == (self.batch_tokens is None):
            raise ConfigError("give one of train.batch (sequences per step) and train.batch_tokens (tokens per step)")
        if self.warmup_steps + (self.decay_steps or 0) > self.steps:
            raise ConfigError(
                f"train.warmup_steps = {self.warmup_steps} and train.decay_steps = {self.decay_steps or 0} exceed "
                f"train.steps = {self.steps}"
            )
        if self.decay_steps is not None and self.schedule != "wsd":
            raise ConfigError(f"train.decay_steps belongs to schedule = 'wsd'; given schedule = '{self.schedule}'")
        if self.patience is not None and self.evaluate_every is None:
            raise ConfigError(
                f"train.patience = {self.patience} counts evaluations, and train.evaluate_every is not given; give it, "
                f"or leave train.patience out"
            )
        if self.profile is not None and not self.profile_steps:
            raise ConfigError(
                f"train.profile = '{self.profile}' is not FIRST:LAST with 0 <= FIRST < LAST and FIRST < train.steps = "
                f"{self.steps}; 10:20 records the ten steps after the tenth"
            )

    def refuse(self, data: Data) -> None:
        """Raise ConfigError if these options do not go with the data."""
        if self.patience is not None and data.held_out == 0:
            raise ConfigError(
                f"train.patience = {self.patience} but data.held_out = 0 leaves nothing to evaluate on; give a share "
                f"of the data, or leave train.patience out"
            )

    @property
    def profile_steps(self) -> range:
        """The steps, counted from 0, whose communication is recorded, up to the last; empty if there are none."""
        first, last = profile_bounds(self.profile) or (0, 0)
        return range(first, min(last, self.steps) if first < last else 0)


def profile_bounds(profile: Any) -> tuple[int, int] | None:
    """Returns FIRST and LAST of the text FIRST:LAST of `train.profile`; None for anything else."""
    match = re.fullmatch(r"([0-9]{1,12}):([0-9]{1,12})", profile) if isinstance(profile, str) else None
    return None if match is None else (int(match[1]), int(match[2]))


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save checkpoints, and which to keep."""

    every: Annotated[int | None, "steps between checkpoints on disk; one is always saved at the end"] = None
    memory_every: Annotated[int | None, "steps between copies in the memory of other ranks"] = None
    keep_last: Annotated[int, "newest checkpoints that are kept"] = 2
    keep_every: Annotated[int | None, "multiples of so many steps are kept as well"] = None
    asynchronous: Annotated[bool, "write while training goes on"] = True

    def __post_init__(self) -> None:
        for name in ("every", "memory_every", "keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None:
                at_least(f"checkpoint.{name}", value, 1)


@dataclass(frozen=True)
class RestartConfig:
    """When `weft train` restarts ranks. Under a launcher, ranks that hang exit, so that the launcher restarts them."""

    limit: Annotated[int, "restarts after a rank died, at most, within window_seconds"] = 5
    window_seconds: Annotated[int, "the time in which restarts are counted"] = 3600
    hang_seconds: Annotated[
        int, "ranks without progress for so long, and for the time of ten steps, are started again"
    ] = 60

    def __post_init__(self) -> None:
        at_least("restart.limit", self.limit, 0)
        at_least("restart.window_seconds", self.window_seconds, 1)
        at_least("restart.hang_seconds", self.hang_seconds, 1)


@dataclass(frozen=True)
class NumbersConfig:
    """What to do about wrong numbers; see `resilience/bad_numbers.py` and `resilience/corruption.py`.

    After a bad step, "repeat" goes back and repeats the step, and skips it if it is bad again. "rollback" goes back to
    the checkpoint and leaves out the last `leave_out` batches since it.
    """

    on_bad: Annotated[
        Literal["stop", "skip", "repeat", "rollback"],
        "what to do after a step whose loss or gradient is NaN, infinite or a spike",
    ] = "stop"
    spike: Annotated[
        float | None, "a loss so many median absolute deviations above the median of the last ones is bad"
    ] = None
    window: Annotated[int, "the last losses that the median is taken of"] = 64
    leave_out: Annotated[int, "batches that a rollback leaves out"] = 8
    limit: Annotated[int, "bad steps without a good one, at most; rollbacks without a new checkpoint"] = 10
    compare_every: Annotated[int | None, "steps between comparisons of state that several ranks hold"] = None
    repeat_every: Annotated[int | None, "steps between micro-batches that are computed twice and compared"] = None

    def __post_init__(self) -> None:
        for name, smallest in (
            ("window", 4),
            ("leave_out", 1),
            ("limit", 1),
            ("compare_every", 1),
            ("repeat_every", 1),
        ):
            if getattr(self, name) is not None:
                at_least(f"numbers.{name}", getattr(self, name), smallest)
        if self.spike is not None and not 0 < self.spike < math.inf:
            raise ConfigError(
                f"numbers.spike = {self.spike}; it counts median absolute deviations: give a number above 0, e.g. 10"
            )

    def refuse(self, train: TrainConfig, plan: Plan, checkpoint: CheckpointConfig) -> None:
        """Raise ConfigError if these checks need options of other tables that are not set."""
        if self.on_bad in ("repeat", "rollback") and checkpoint.every is None:
            raise ConfigError(f"numbers.on_bad = '{self.on_bad}' goes back to a checkpoint; give checkpoint.every")
        if self.repeat_every is not None and not train.deterministic:
            raise ConfigError(
                f"numbers.repeat_every = {self.repeat_every} compares bits, which kernels need not repeat; give "
                f"train.deterministic = true"
            )
        if self.repeat_every is not None and plan.pipe.degree > 1:
            raise ConfigError(
                f"numbers.repeat_every = {self.repeat_every} repeats a micro-batch, which plan.pipe = "
                f"{plan.pipe.degree} spreads over stages and time; leave it out (compare_every works)"
            )


@dataclass(frozen=True)
class LogConfig:
    """Where metrics are written in addition to metrics.jsonl in the run folder, which is always written."""

    tensorboard: Annotated[bool, "write TensorBoard's files to the run folder"] = False
    wandb: Annotated[str | None, "the project in Weights & Biases"] = None
    every_seconds: Annotated[
        int, "where no terminal is: seconds between lines about steps, at most (if steps end that often)"
    ] = 60

    def __post_init__(self) -> None:
        at_least("log.every_seconds", self.every_seconds, 1)


@dataclass(frozen=True)
class Roles:
    """Ranks of the run that do not train (docs/roles.md)."""

    loader: Annotated[int, "ranks that read and prepare batches ahead of training"] = 0
    validator: Annotated[int, "1: a rank evaluates snapshots while training goes on"] = 0
    curvature: Annotated[
        int, "ranks that invert the factors of K-FAC, for `train.kfac.mode` `sub-grid` and `sub-grid-async`"
    ] = 0
    depth: Annotated[int, "batches that loaders may have ready for each training rank"] = 2
    keep_best: Annotated[bool, "keep the snapshot with the lowest held-out loss, in the run's folder best"] = True

    def __post_init__(self) -> None:
        most = MAX_LOADERS
        for name, smallest, largest in (
            ("loader", 0, most),
            ("validator", 0, 1),
            ("curvature", 0, most),
            ("depth", 1, most),
        ):
            at_least(f"roles.{name}", getattr(self, name), smallest)
            at_most(f"roles.{name}", getattr(self, name), largest)

    @property
    def counts(self) -> dict[str, int]:
        """The number of ranks of each role, in the order of their ranks."""
        return {"validator": self.validator, "loader": self.loader, "curvature": self.curvature}

    @property
    def num_ranks(self) -> int:
        """The number of ranks that do not train."""
        return sum(self.counts.values())

    def refuse(self, train: TrainConfig, plan: Plan, data: Data) -> None:
        """Raise ConfigError if roles need options of other tables that are not set, or do not go with them."""
        self._refuse_curvature(train.kfac)
        if not self.num_ranks:
            return
        if isinstance(data, PreferenceConfig):
            raise ConfigError(
                "[roles]: data.kind = 'preference' needs the model itself, for its reference, and only training ranks "
                "have it; leave [roles] out"
            )
        if plan.pipe.shadow:
            raise ConfigError(
                "[roles]: plan.pipe.shadow = true forms the world anew when a rank is lost, without ranks of other "
                "roles; leave one of them out"
            )
        if self.validator and train.evaluate_every is None:
            raise ConfigError(
                f"roles.validator = {self.validator} evaluates every train.evaluate_every steps, which is not given; "
                f"give it, or leave the validator out"
            )
        if self.validator and data.held_out == 0:
            raise ConfigError(
                f"roles.validator = {self.validator} but data.held_out = 0 leaves nothing to evaluate on; give a "
                f"share of the data, or leave the validator out"
            )

    def _refuse_curvature(self, kfac: Kfac | None) -> None:
        """Raise ConfigError if K-FAC on curvature ranks is given without such ranks, or the other way round."""
        is_asked = kfac is not None and kfac.mode in ("sub-grid", "sub-grid-async")
        if kfac is not None and is_asked and not self.curvature:
            raise ConfigError(
                f"train.kfac.mode = '{kfac.mode}' has factors inverted by ranks of their own, and roles.curvature = 0; "
                f"give e.g. roles.curvature = 1, or another mode"
            )
        if self.curvature and not is_asked:
            given = "train.kfac is not given" if kfac is None else f"train.kfac.mode = '{kfac.mode}'"
            raise ConfigError(
                f"roles.curvature = {self.curvature} inverts the factors of K-FAC, and {given}; set train.kfac.mode to "
                f"'sub-grid' or 'sub-grid-async', or leave roles.curvature out"
            )


@dataclass(frozen=True)
class CompressedAdam:
    """An optimizer that sends one bit per parameter over `data` (`optim/one_bit_adam.py`, `optim/zero_one_adam.py`)."""

    kind: Annotated[Literal["1bit", "0/1"], "1-bit Adam or 0/1 Adam"]
    freeze_step: Annotated[int, "updates after which the second moment stays as it is"]
    kappa: Annotated[int, "0/1: updates of the second moment after which the gap between them doubles"] = 16
    local_scaler: Annotated[int, "0/1: steps after the freeze after which the gap between exchanges doubles"] = 32678
    most_local: Annotated[int, "0/1: the longest gap between exchanges, in steps"] = 16

    def __post_init__(self) -> None:
        for name in ("freeze_step", "kappa", "local_scaler", "most_local"):
            at_least(f"train.compressed.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class Kfac:
    """K-FAC for linears and convolutions, and AdamW for the rest (`optim/kfac.py`).

    Every rank inverts all factors, or each layer has an owner among the ranks of `data` or of roles.curvature (`mode`).
    """

    mode: Annotated[
        Literal["inline", "owner-sharded", "sub-grid", "sub-grid-async"],
        "who inverts factors: every rank, a layer's owner, or `roles.curvature` (async: without a wait)",
    ] = "owner-sharded"
    learning_rate: Annotated[float, "the peak for layers of K-FAC, on the same schedule"] = 0.1
    momentum: Annotated[float, "of preconditioned gradients"] = 0.9
    damping: Annotated[float, "what is added to the factors' diagonals; ten times as much where an inverse fails"] = (
        1e-3
    )
    decay: Annotated[float, "of the running average of factors"] = 0.95
    factor_every: Annotated[int, "updates between two samples of the factors"] = 1
    inverse_every: Annotated[int, "updates between two inversions; a multiple of factor_every"] = 10
    kl_clip: Annotated[float, "the limit of lr² · update · gradient; inf for none"] = 1e-3
    max_size: Annotated[int, "layers with a factor of more rows are left to AdamW"] = 4096
    exclude: Annotated[tuple[str, ...], "patterns of names of layers that are left to AdamW"] = ()

    def __post_init__(self) -> None:
        for name in ("factor_every", "inverse_every", "max_size"):
            at_least(f"train.kfac.{name}", getattr(self, name), 1)
        for name in ("momentum", "decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"train.kfac.{name} = {getattr(self, name)}; it must be at least 0 and below 1")
        for name in ("learning_rate", "damping"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"train.kfac.{name} = {getattr(self, name)}; it must be a number above 0")
        if not self.kl_clip > 0:
            raise ConfigError(f"train.kfac.kl_clip = {self.kl_clip}; it must be greater than 0, inf to limit nothing")
        if self.inverse_every % self.factor_every:
            raise ConfigError(
                f"train.kfac.inverse_every = {self.inverse_every} is not a multiple of factor_every = "
                f"{self.factor_every}; inverses are renewed where factors were sampled"
            )


@dataclass(frozen=True)
class LayerDrop:
    """The probability with which blocks are kept (`step/layer_drop.py`)."""

    theta: Annotated[float, "the final probability that the deepest block is kept"] = 0.5
    gamma: Annotated[float, "how fast the probability falls to it"] = 1e-3

    def __post_init__(self) -> None:
        if not 0 < self.theta <= 1:
            raise ConfigError(
                f"train.layer_drop.theta = {self.theta}; it is the least part to keep, above 0 and up to 1"
            )
        if not self.gamma >= 0:
            raise ConfigError(f"train.layer_drop.gamma = {self.gamma}; it must be at least 0")

    def keep_probability(self, step: int, layer: int, num_layers: int) -> float:
        """Returns the probability that block number `layer` (from 0) is kept."""
        theta = (1 - self.theta) * math.exp(-self.gamma * step) + self.theta
        return 1 - (layer + 1) / num_layers * (1 - theta)
