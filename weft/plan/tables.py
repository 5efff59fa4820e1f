"""The tables of a plan: the settings of each axis that has more than a degree, and the memory policy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from weft.errors import ConfigError
from weft.schema import convert_fields

HOST_SHARES = ("offload", "activations", "weights")  # fields of `Memory`: shares that are kept in host memory

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class PlanTable:
    """A table of a plan. Its values are converted and checked as those of a run file."""

    def __post_init__(self) -> None:
        convert_fields(self, f"plan.{type(self).__name__.lower()}")


@dataclass(frozen=True)
class AxisTable(PlanTable):
    """The settings of an axis. A number in place of the table sets the first: `pipe = 4` is `pipe = { degree = 4 }`."""

    @classmethod
    def from_shorthand(cls, value: Any, path: str) -> Self:
        names = [one.name for one in fields(cls)]
        if type(value) is not int:
            keys = ", ".join([*names[:5], *["..."] * (len(names) > 5)])
            raise ConfigError(f"'{path}' = {value!r} but it expects an integer or a table {{ {keys} }}")
        return cls(**{names[0]: value})


@dataclass(frozen=True)
class Pipe(AxisTable):
    """The `pipe` axis: splits the model's chain of blocks into stages over ranks.

    `schedule` is the order of forwards and backwards. `chunks` is the number of stages of each rank (interleaved), and
    `batches` the number of parts of a step that alternate (gems). `in_flight` caps the micro-batches between forward
    and backward that a rank holds, over all of its stages: less memory, more waiting. Stages are balanced by `balance`;
    with `split`, all stages but the first begin at the modules that it names. `shadow`: each rank also keeps the next
    rank's stage, and takes it over if that rank is lost.
    """

    degree: int = 1
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "gems", "bidirectional", "message"] = "1f1b"
    chunks: int | None = None
    batches: int | None = None
    in_flight: int | None = None
    balance: Literal["time", "memory"] = "time"
    split: tuple[str, ...] = ()
    shadow: bool = False

    @property
    def num_stages(self) -> int:
        """The number of stages of the model."""
        return self.degree * ((self.chunks or 2) if self.schedule == "interleaved" else 1)

    @property
    def is_mirrored(self) -> bool:
        """Is every stage on two ranks, because the schedule has two replicas of the model?"""
        one_by_one = self.schedule == "gems" and self.batches == 1  # needs no second replica
        return self.degree > 1 and self.schedule in ("gems", "bidirectional") and not one_by_one

    @property
    def options(self) -> dict[str, int]:
        """The options of the schedule that are given."""
        given = {"chunks": self.chunks, "batches": self.batches, "in_flight": self.in_flight}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Shard(AxisTable):
    """The `shard` axis. `stage` is that of ZeRO: 1 shards the optimizer state, 2 also gradients, 3 also parameters."""

    degree: int = 1
    stage: Literal[1, 2, 3] = 3


@dataclass(frozen=True)
class Branch(AxisTable):
    """The `branch` axis: gives independent branches of the model to different ranks.

    `batch` says which samples these ranks have. "same": all of them the same, so that what is outside of branches is
    computed by all. "split": each its own; branches get the samples of all ranks, and return each rank its own.
    `modules` names the modules that are branches; empty: they are found.
    """

    degree: int = 1
    batch: Literal["same", "split"] = "same"
    modules: tuple[str, ...] = ()

    @property
    def splits_batch(self) -> bool:
        """Do the ranks of the axis have different samples?"""
        return self.degree > 1 and self.batch == "split"


@dataclass(frozen=True)
class Tensor(AxisTable):
    """The `x` and `y` axes: split the outputs and the inputs of every matmul, swapped in alternate layers.

    `sequence` also splits the activations outside of attention and MLPs along the sequence over x. `regather` then
    gathers the inputs of matmuls again in backward instead of saving them whole: less memory, one more all-gather.
    `chunks` is the number of pieces of each gather and scatter, so that some are sent while others are multiplied.
    `drop_duplicates`: ranks of x, which hold the same tokens, send different ones over `expert`.
    """

    x: int = 1
    y: int = 1
    sequence: bool = False
    regather: bool = False
    chunks: int = 1
    drop_duplicates: bool = False


@dataclass(frozen=True)
class Context(AxisTable):
    """The `context` axis: splits sequences over ranks. `kind` is how attention gets the keys of other ranks."""

    degree: int = 1
    kind: Literal["ring", "all-to-all"] = "ring"


@dataclass(frozen=True)
class Tile(PlanTable):
    """The axes `rows` and `columns`: split each image into tiles over ranks.

    `until` names the module before which tiles end; "" is the first operation that needs whole images. `hand_over` is
    what happens there. "gather": every rank gets the whole images, and all ranks compute the same from there on.
    "batch": each rank gets whole images of its share of the samples. `fused` layers share one exchange of a wider halo.
    """

    rows: int = 1
    columns: int = 1
    until: str = ""
    hand_over: Literal["gather", "batch"] = "gather"
    fused: int = 1

    @property
    def degree(self) -> int:
        """The number of tiles of an image."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Memory(PlanTable):
    """The memory policy.

    `recompute`: which activations are recomputed in backward instead of saved. `recompute_stages`: the number of stages
    of the pipeline that do it, the first ones; the others save everything. None means all stages.

    `accumulate`: how gradients of several micro-batches are summed. "whole" communicates once a step, and holds whole
    gradients until then. "slice" reduces after each micro-batch, and holds only the rank's slice (shard stages 2, 3).

    `master`: keep fp32 weights beside those in bf16. Without them, updates are rounded stochastically. `state`: the
    dtype of AdamW's two moments, that of the master weights or fewer bits. Without master weights, or with fewer bits,
    `plan.exact` must be false. `offload`: the share of master weights and moments that is kept in host memory, 0 to 1.
    `delay`: each step's update overlaps with the forward and backward of the next step, which use the weights before
    that update; needs `plan.exact = false`.

    `keep_collectives`: recompute takes the results of a block's collectives from memory, and communicates nothing.

    `activations`: the share of blocks, 0 to 1, whose saved activations are kept in host memory until backward.
    `weights`: the share of blocks whose weights, gradients, master weights and moments are kept in host memory.
    """

    recompute: Recompute = "none"
    accumulate: Literal["whole", "slice"] = "whole"
    master: bool = True
    state: Literal["master", "bf16", "int8"] = "master"
    offload: float = 0.0
    delay: bool = False
    activations: float = 0.0
    weights: float = 0.0
    recompute_stages: int | None = None
    keep_collectives: bool = False

    @property
    def repeats_collectives(self) -> bool:
        """Does recompute communicate again what a block communicates in forward?"""
        return self.recompute != "none" and not self.keep_collectives

    @property
    def keeps_state_on_host(self) -> bool:
        """Is any state that persists between steps kept in host memory?"""
        return self.offload > 0 or self.weights > 0

    @property
    def recompute_words(self) -> str:
        """What is recomputed as text, such as `none`, or `full in the first 3 stages`."""
        count = self.recompute_stages
        where = "" if count is None else " in the first stage" if count == 1 else f" in the first {count} stages"
        return f"{self.recompute}{where}"

    @property
    def words(self) -> str:
        """The policy as text, such as `, recompute full, offload 0.35`; empty if nothing is set."""
        again = "" if self.recompute == "none" else f", recompute {self.recompute_words}"
        shares = {name: getattr(self, name) for name in HOST_SHARES}
        again += ", collectives kept" * self.keep_collectives
        return again + "".join(f", {name} {share:g}" for name, share in shares.items() if share)
