"""The tables of a plan: the settings of each axis that has more than a degree, and the memory policy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Self

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
    """The `pipe` axis: splits the model's chain of blocks into stages over ranks."""

    degree: Annotated[int, "ranks that the chain is split over"] = 1
    schedule: Annotated[
        Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "gems", "bidirectional", "message"],
        "the order of forwards and backwards",
    ] = "1f1b"
    chunks: Annotated[int | None, "stages of each rank (interleaved)"] = None
    batches: Annotated[int | None, "parts of a step that alternate (gems)"] = None
    in_flight: Annotated[
        int | None, "at most so many micro-batches between forward and backward on a rank: less memory, more waiting"
    ] = None
    balance: Annotated[Literal["time", "memory"], "what stages have equal parts of"] = "time"
    split: Annotated[tuple[str, ...], "the modules at which all stages but the first begin, in place of balance"] = ()
    shadow: Annotated[bool, "each rank also keeps the next one's stage, and takes it over if it is lost"] = False

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
    """The `shard` axis: splits parameters, gradients and optimizer state over ranks, in one of ZeRO's stages."""

    degree: Annotated[int, "ranks that the state is split over"] = 1
    stage: Annotated[Literal[1, 2, 3], "1: optimizer state is split; 2: also gradients; 3: also parameters"] = 3


@dataclass(frozen=True)
class Branch(AxisTable):
    """The `branch` axis: gives independent branches of the model to different ranks.

    With the same samples (`batch`), all ranks compute what is outside of branches. With their own, branches get the
    samples of all ranks, and return each rank its own.
    """

    degree: Annotated[int, "ranks that branches are split over"] = 1
    batch: Annotated[
        Literal["same", "split"], "samples of these ranks: all the same, or each its own, which branches gather"
    ] = "same"
    modules: Annotated[tuple[str, ...], "the modules that are branches; empty: they are found"] = ()

    @property
    def splits_batch(self) -> bool:
        """Do the ranks of the axis have different samples?"""
        return self.degree > 1 and self.batch == "split"


@dataclass(frozen=True)
class Tensor(AxisTable):
    """The `x` and `y` axes: split the outputs and the inputs of every matmul, swapped in alternate layers."""

    x: Annotated[int, "ranks that outputs of matmuls are split over"] = 1
    y: Annotated[int, "ranks that inputs of matmuls are split over"] = 1
    sequence: Annotated[bool, "split activations outside of attention and MLPs along the sequence over x, too"] = False
    regather: Annotated[
        bool, "with sequence, gather inputs of matmuls again in backward: less memory, one more all-gather"
    ] = False
    chunks: Annotated[int, "pieces of each gather and scatter, sent while others are multiplied"] = 1
    drop_duplicates: Annotated[
        bool, "ranks of x send different tokens over expert, instead of all of them the same"
    ] = False


@dataclass(frozen=True)
class Context(AxisTable):
    """The `context` axis: splits sequences over ranks."""

    degree: Annotated[int, "ranks that a sequence is split over"] = 1
    kind: Annotated[Literal["ring", "all-to-all"], "how attention gets keys of other ranks"] = "ring"


@dataclass(frozen=True)
class Tile(PlanTable):
    """The axes `rows` and `columns`: split each image into tiles over ranks.

    Where tiles end, ranks get whole images (`hand_over`). With "gather" all ranks compute the same from there on.
    """

    rows: Annotated[int, "ranks that rows of an image are split over"] = 1
    columns: Annotated[int, "ranks that columns of an image are split over"] = 1
    until: Annotated[str, "the module before which tiles end; empty: the first that needs whole images"] = ""
    hand_over: Annotated[
        Literal["gather", "batch"],
        "which whole images ranks get there: all of them, or those of their share of the batch",
    ] = "gather"
    fused: Annotated[int, "layers that share one exchange of a wider halo"] = 1

    @property
    def degree(self) -> int:
        """The number of tiles of an image."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Memory(PlanTable):
    """The memory policy.

    Gradients of several micro-batches are held whole until they are reduced, or with `accumulate = "slice"` (shard
    stages 2 and 3) only as the rank's slice.
    """

    recompute: Annotated[Recompute, "activations that are computed again in backward"] = "none"
    accumulate: Annotated[
        Literal["whole", "slice"], "reduce gradients once a step (whole), or after each micro-batch (slice)"
    ] = "whole"
    master: Annotated[
        bool,
        "keep fp32 weights beside bf16 ones; without, updates are rounded stochastically, which needs exact = false",
    ] = True
    state: Annotated[
        Literal["master", "bf16", "int8"],
        "the dtype of AdamW's moments: that of the master weights, or fewer bits, which needs exact = false",
    ] = "master"
    offload: Annotated[float, "the share of master weights and moments that is kept in host memory, 0 to 1"] = 0.0
    delay: Annotated[
        bool, "update on the host during the next step, which uses weights before it; needs exact = false"
    ] = False
    activations: Annotated[
        float, "the share of blocks whose saved activations are kept in host memory until backward, 0 to 1"
    ] = 0.0
    weights: Annotated[
        float, "the share of blocks whose weights, gradients and optimizer state are kept in host memory, 0 to 1"
    ] = 0.0
    recompute_stages: Annotated[
        int | None, "the first so many stages of pipe recompute, the others save everything; by default all"
    ] = None
    keep_collectives: Annotated[
        bool, "recompute communicates nothing: results of a block's collectives are kept, too"
    ] = False

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
