"""The tables [train], [checkpoint], [restart], [numbers], [log] and [roles] of a run file as frozen dataclasses."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

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

    Give `batch` (sequences or images per step) or `batch_tokens` (tokens per step), not both.

    `compile`: compile each block with torch.compile; by default on GPUs. `graph`: record forward and backward as a CUDA
    graph (`step/cuda_graph.py`); by default for images on one GPU. `z_loss` is the weight of the squared log of the
    softmax's denominator (language models). `goldfish` leaves targets out of the loss (`data/goldfish.py`), and
    `layer_drop` skips blocks (`step/layer_drop.py`). `compressed` sends less over `data`, and `kfac`
    preconditions gradients; both are not exact.
    `share_gpus` allows more ranks than GPUs, for tests.
    `evaluate_sequences` is the number of held-out sequences or images. `patience` is the number of evaluations without
    a lower held-out loss after which the run stops. `timeline` is a file in which the last step of a
    pipeline is drawn. `profile` = "10:20" records the communication of the ten steps after the tenth. `freeze` has
    patterns of names of parameters that are not trained (`model.embed*`).
    `dpo_beta` is the strength of the reference in the loss of preferences (`step/preference.py`).
    """

    steps: int
    batch: int | None = None
    batch_tokens: int | None = None
    learning_rate: float = 3e-4
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 0
    decay_steps: int | None = None
    final_learning_rate: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip: float | None = 1.0
    seed: int = 0
    deterministic: bool = False
    compile: bool | None = None
    graph: bool | None = None
    z_loss: float = 0.0
    goldfish: Goldfish | None = None
    layer_drop: LayerDrop | None = None
    compressed: CompressedAdam | None = None
    kfac: Kfac | None = None
    freeze: tuple[str, ...] = ()
    dpo_beta: float = 0.1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    share_gpus: bool = False
    timeout_seconds: int = 600
    log_every: int = 1
    evaluate_every: int | None = None
    evaluate_sequences: int = 64
    patience: int | None = None
    timeline: str | None = None
    profile: str | None = None

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
    """When to save checkpoints, and which to keep. One is always saved at the end.

    `every`: the steps between checkpoints on disk. `memory_every`: those between copies in memory. `keep_last` is the
    number of newest checkpoints that are kept, and multiples of `keep_every` steps are kept, too.
    """

    every: int | None = None
    memory_every: int | None = None
    keep_last: int = 2
    keep_every: int | None = None
    asynchronous: bool = True

    def __post_init__(self) -> None:
        for name in ("every", "memory_every", "keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None:
                at_least(f"checkpoint.{name}", value, 1)


@dataclass(frozen=True)
class RestartConfig:
    """How often `weft train` restarts ranks after one died: at most `limit` times within `window_seconds`.

    Ranks that wait or make no progress for `hang_seconds`, and for the time of ten steps, are restarted as well. Under
    a launcher they exit, so that the launcher restarts them.
    """

    limit: int = 5
    window_seconds: int = 3600
    hang_seconds: int = 60

    def __post_init__(self) -> None:
        at_least("restart.limit", self.limit, 0)
        at_least("restart.window_seconds", self.window_seconds, 1)
        at_least("restart.hang_seconds", self.hang_seconds, 1)


@dataclass(frozen=True)
class NumbersConfig:
    """What to do about wrong numbers; see `resilience/bad_numbers.py` and `resilience/corruption.py`.

    `on_bad` is the action on a bad step. A step is bad if its loss or gradient norm is NaN or infinite or, with
    `spike` = k, if the loss is above the median of the last `window` losses by k times their median absolute deviation.
    "repeat" goes back and repeats the step, and skips it if it is bad again. "rollback" goes back to the checkpoint and
    leaves out the last `leave_out` batches since it. More than `limit` bad steps without a good one (rollbacks: without
    a new checkpoint) end the run. Every `compare_every` steps, ranks compare the state of which they hold copies. Every
    `repeat_every` steps, a micro-batch is computed twice and compared.
    """

    on_bad: Literal["stop", "skip", "repeat", "rollback"] = "stop"
    spike: float | None = None
    window: int = 64
    leave_out: int = 8
    limit: int = 10
    compare_every: int | None = None
    repeat_every: int | None = None

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
    """Where metrics are written in addition to metrics.jsonl in the run folder, which is always written.

    `every_seconds`: a log of what `weft train` prints has a line at least so often.
    """

    tensorboard: bool = False
    wandb: str | None = None
    every_seconds: int = 60

    def __post_init__(self) -> None:
        at_least("log.every_seconds", self.every_seconds, 1)


@dataclass(frozen=True)
class Roles:
    """Ranks of the run that do not train (docs/roles.md).

    `loader`: ranks that read batches ahead of the training ranks; each training rank has at most `depth` batches on
    their way. `validator`: 1 for a rank that evaluates snapshots while training goes on; with `keep_best`, the
    snapshot with the lowest held-out loss is kept in the folder `best` of the run. `curvature`: ranks that invert the
    factors of K-FAC.
    """

    loader: int = 0
    validator: int = 0
    curvature: int = 0
    depth: int = 2
    keep_best: bool = True

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
    """An optimizer that sends one bit per parameter over `data` (`optim/one_bit_adam.py`, `optim/zero_one_adam.py`).

    `freeze_step`: the number of updates after which the second moment stays as it is. The others are of 0/1 Adam:
    the gap between updates of the second moment doubles every `kappa` of them, and after the freeze the number of steps
    from one exchange to the next doubles every `local_scaler` steps, up to `most_local`.
    """

    kind: Literal["1bit", "0/1"]
    freeze_step: int
    kappa: int = 16
    local_scaler: int = 32678
    most_local: int = 16

    def __post_init__(self) -> None:
        for name in ("freeze_step", "kappa", "local_scaler", "most_local"):
            at_least(f"train.compressed.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class Kfac:
    """K-FAC for linears and convolutions, and AdamW for the rest (`optim/kfac.py`).

    `mode`: every rank inverts all factors, or each layer has an owner among the ranks of `data`, or among those of
    roles.curvature, for which training waits or (async) does not. `learning_rate` is the peak for layers of K-FAC, on
    the schedule of [train]. Factors are sampled every `factor_every` updates and inverted every `inverse_every`, with
    `damping`; `decay` is that of their running average. `kl_clip` limits the size of an update. `exclude` has patterns
    of names of layers that AdamW updates, and so do factors above `max_size` rows.
    """

    mode: Literal["inline", "owner-sharded", "sub-grid", "sub-grid-async"] = "owner-sharded"
    learning_rate: float = 0.1
    momentum: float = 0.9
    damping: float = 1e-3
    decay: float = 0.95
    factor_every: int = 1
    inverse_every: int = 10
    kl_clip: float = 1e-3
    max_size: int = 4096
    exclude: tuple[str, ...] = ()

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
    """`theta` is the final probability that the deepest block is kept; `gamma` is the rate of the decay to it."""

    theta: float = 0.5
    gamma: float = 1e-3

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
