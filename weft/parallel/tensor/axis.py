"""Axes `x` and `y`: split every linear by outputs and inputs (AxoNN; Megatron is y = 1). With `shard`, a 3-D matmul.

For O = I·W with I [m, k], m tokens of one batch rank, and W [k, n]:

    column  W: n over x, k over y     I: k over y      O = sum over y, n over x       dI = sum over x
    row     W: n over y, k over x     I: k over x      O = sum over x, n over y       dI = sum over y

Columns and rows alternate, so a row's output has the layout of the next column's input. The residual stream has its
features split over y, and is the same on all ranks of x. From a column to its row (a *region*), features or heads are
split over x. Bytes per layer and micro-batch, with c bytes an element:

    column   forward m·n/x·c over y, backward m·k/y·c over x (once for several columns with the same input)
    row      forward m·n/y·c over x, backward m·k/x·c over y

With `tensor.sequence` the residual stream is also split along the sequence over x, outside of the regions. Each
all-reduce over x becomes an all-gather and a reduce-scatter of the same size, and norms and their activations are
split, too. The sequence stays split from the embedding to the head if only the chain of blocks and a norm lie between
them (`inspection/chain_ends.py`).

The embedding's rows (vocabulary) are split over x and its features over y; the head is split in the same way, and its
logits stay split (`vocabulary.py`). Norms sum their moments over y. The outputs of a linear without a partner are
gathered after its matmul. Convolutions are in `convolution.py`. In a model with convolutions, every rank of y holds the
whole values between layers: a column takes its part of them, and the parts of a row's output are gathered.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import Axis, Ledger
from weft.errors import PlanError
from weft.inspection.blocks import find_blocks
from weft.inspection.embedding_lookup import is_plain_lookup, replaced_lookup
from weft.inspection.pairing import pair
from weft.inspection.parameter_cut import share
from weft.inspection.rng import INNER, PART, WHOLE, ScopedRng, has_dropout
from weft.inspection.split_probe import linear_sizes
from weft.inspection.tensor_splits import Pairing, Split, is_norm
from weft.memory.recompute_context import register_state
from weft.mesh import Mesh
from weft.parallel.cut_parameters import cut_parameters
from weft.parallel.tensor import closed_form, convolution
from weft.parallel.tensor.cost import assumptions, localise, traffic, transient_bytes
from weft.parallel.tensor.cuts import ends_of, parameter_cuts
from weft.parallel.tensor.norm import split_norm
from weft.parallel.tensor.operations import gather, leave
from weft.parallel.tensor.overlapped_matmul import StreamSplit
from weft.parallel.tensor.refuse import refuse_sizes
from weft.parallel.tensor.sequence_stream import SequenceSplitter
from weft.parallel.tensor.split_linear import SharedInput, SplitLinear
from weft.parallel.tensor.vocabulary import Vocabulary, mark_logits_of, set_vocabulary, split_embedding, vocabulary_of
from weft.pipeline.stand_in import skeleton
from weft.plan import BatchSplit, Plan
from weft.plan import Tensor as TensorSetting
from weft.profiling import Profile
from weft.profiling.software import BlockPass
from weft.profiling.workload import Call
from weft.strategy import Cost, SearchSpace, Strategy, Transient, Values, divisors, tally, uncounted_traffic

logger = logging.getLogger("weft")


class TensorAxes(Strategy):
    """Splits matmuls and convolutions over `x` and `y`."""

    name = "tensor"
    axes = ("x", "y")

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        if plan.tensor.x == plan.tensor.y == 1:
            return None
        try:
            pairing = profile.pairing
        except PlanError as error:
            return str(error)
        return refuse_sizes(profile, pairing, plan)

    def localise(self, profile: Profile, plan: Plan, coordinates: Mapping[str, int]) -> Profile:
        return localise(profile, plan, coordinates)

    def assumptions(self, profile: Profile, plan: Plan) -> tuple[str, ...]:
        return assumptions(profile, plan)

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        if plan.tensor.x == plan.tensor.y == 1:
            return Cost()
        if not profile.counted:
            given, source = f"tensor.x = {plan.tensor.x}", "the layers that a forward calls"
            raise uncounted_traffic(given, source, "tensor.x = tensor.y = 1")
        calls = list(traffic(profile, plan, coordinates["x"], coordinates["y"])) * split.accumulation
        temporary_bytes = transient_bytes(profile, plan)
        communication = tally([(key, num_bytes) for key, num_bytes in calls if num_bytes])
        return Cost(communication, transient=Transient(0, temporary_bytes, temporary_bytes))

    def settings(self, space: SearchSpace) -> Iterable[Mapping[str, Any]]:
        if space.samples != "sequences":
            yield {}
            return
        for x in divisors(space.num_devices):
            streams = [(False, False)] if x == 1 else [(False, False), (True, False)]
            if x > 1 and "tensor.regather" in space.asked:  # otherwise the search tries it only with plans too large
                streams.append((True, True))
            for y in divisors(space.num_devices // x):
                yield from ({"tensor": TensorSetting(x, y, *stream)} for stream in streams)

    def block_calls(self, block: BlockPass, plan: Plan) -> Iterable[Call]:
        return closed_form.block_calls(block, plan) if plan.tensor.x * plan.tensor.y > 1 else ()

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        if plan.tensor.x == plan.tensor.y == 1:
            return model
        pairing = pair(model)
        if mesh.is_first_of_stage:
            for name, reason in pairing.kept.items():
                logger.info("tensor.x leaves '%s' whole: %s", name, reason)
            if pairing.assumption is not None:
                logger.warning(pairing.assumption)
        split_model(model, pairing, plan, mesh)
        return model


# --- changes to modules


def split_model(model: nn.Module, pairing: Pairing, plan: Plan, mesh: Mesh) -> None:
    """Replace the forwards of a model's layers by those with collectives, and its parameters by a rank's parts."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    cuts = parameter_cuts(pairing, shapes, plan, mesh.coordinates)
    _Applier(model, pairing, plan, mesh).apply()
    cut_parameters(model, cuts)


class _Applier:
    """Replaces forwards and adds hooks. Modules, their names and classes stay, and so does the name of the argument of
    torch's own layers, `input`, by which a model may pass it.
    """

    def __init__(self, model: nn.Module, pairing: Pairing, plan: Plan, mesh: Mesh) -> None:
        self.model, self.pairing = model, pairing
        self.x, self.y = mesh["x"], mesh["y"]
        self.rng = _scopes_of(model, pairing, mesh) if has_dropout(model) else None
        is_split = plan.tensor.sequence and self.x.degree > 1
        self.stream = StreamSplit(plan.tensor.chunks, plan.tensor.regather) if is_split else None
        self.chain = SequenceSplitter(self.x, ends_of(pairing, plan), self.stream, self.rng)

    def apply(self) -> None:
        self.model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        self._linears()
        for name in self.pairing.embeddings:
            embedding = self.model.get_submodule(name)
            assert isinstance(embedding, nn.Embedding)
            begin = share(embedding.num_embeddings, self.x.degree, self.x.index)[0]
            lookup = partial(self._embedding, name, embedding, begin)
            is_plain = is_plain_lookup(embedding)
            _replace_forward(embedding, lookup if is_plain else replaced_lookup(embedding, lookup))
            if self.pairing.is_whole:
                embedding.register_forward_hook(lambda _, __, out: gather(out, self.y, -1))
        if self.y.degree > 1 and not self.pairing.is_whole:
            for name in _outer_norms(self.model, self.pairing):
                norm = self.model.get_submodule(name)
                _replace_forward(norm, partial(split_norm, norm, self.y))
        if self.stream is not None and self.pairing.blocks:  # a stage of a pipeline may have no block
            self.chain.attach(self.model, self.pairing.blocks[0], self.pairing.blocks[-1])
        if self.rng is not None:
            self._scopes(self.rng)
        for name, scaled in self.pairing.scaled.items():
            scaled.apply(self.model.get_submodule(name), self.x.degree)

    def _scopes(self, rng: ScopedRng) -> None:
        """Enter the rng scope of the residual stream before each block, and before dropout ahead of all blocks.

        Dropout between a column and its row stays in their scope; column and row may themselves be blocks.
        """
        stream = WHOLE if self.stream is None else PART
        for block in find_blocks(self.model).values():
            block.register_forward_pre_hook(lambda *_: rng.enter(stream), prepend=True)
            register_state(block, rng)
        for name, module in self.model.named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and self.pairing.block_of(name) is None:
                module.register_forward_pre_hook(lambda *_: rng.enter_first(WHOLE))
        self.model.register_forward_hook(lambda *_: rng.end())

    def _linears(self) -> None:
        entering: dict[str, list[SplitLinear]] = {}
        for split in self.pairing.splits.values():
            module = self.model.get_submodule(split.module)
            if split.num_spatial:
                _replace_forward(module, partial(self._convolution, module, split))
                continue
            is_split = self.pairing.block_of(split.module) is not None or split.module == self.chain.ends.head
            stream = self.stream if is_split else None
            linear = SplitLinear(module, split, self.x, self.y, stream, self.chain, self.rng, self.pairing.is_whole)
            _replace_forward(module, getattr(linear, split.kind))
            if split.parent is not None:
                entering.setdefault(split.parent, []).append(linear)
            if split.kind == "head":
                num_classes = linear_sizes(module)[1]
                begin, end = share(num_classes, self.x.degree, self.x.index)
                vocabulary = Vocabulary(begin, end, num_classes, self.x)
                set_vocabulary(self.model, vocabulary)
                if self.x.degree > 1:
                    mark_logits_of(self.model, split.module, vocabulary)
        for parent, columns in entering.items():
            module = self.model.get_submodule(parent)
            _replace_forward(module, SharedInput(parent, module.forward, columns).forward)

    def _convolution(self, module: Any, split: Split, input: Tensor) -> Tensor:
        if self.rng is not None and split.kind in ("column", "row"):
            self.rng.enter(INNER if split.kind == "column" else WHOLE)
        kinds = {"gathered": convolution.gathered, "column": convolution.column, "row": convolution.row}
        return kinds[split.kind](module, self.x, self.y, input)

    def _embedding(self, name: str, module: nn.Embedding, begin: int, input: Tensor) -> Tensor:
        rows = split_embedding(module, input, begin)
        if self.rng is not None:
            self.rng.enter(WHOLE)
        if name != self.chain.ends.embedding:
            return leave(rows, self.x)
        self.chain.expected = rows
        return rows

    def _before_model(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if kwargs.get("labels") is not None and vocabulary_of(model) is not None:
            raise PlanError(
                "the model was given labels, but its logits are split over x and its own loss would be wrong; leave "
                "labels out and use weft.train_step, or weft.cross_entropy(logits, labels, weft.vocabulary_of(model))"
            )
        self.chain.reset()
        if self.rng is not None:
            self.rng.begin()


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    setattr(module, "forward", forward)  # noqa: B010 (a method to mypy)


def _scopes_of(model: nn.Module, pairing: Pairing, mesh: Mesh) -> ScopedRng | None:
    """Returns the rng scopes of a model over x and y; None if all ranks hold the same elements.

    The residual stream has its features split over y, and with `tensor.sequence` its tokens over x. Between a column
    and its row, features (heads) are split over x, and all ranks of y hold the same ones.
    """
    x, y = mesh["x"], mesh["y"]
    of_stream = [] if pairing.is_whole or y.degree == 1 else [y]
    if x.degree == 1 and not of_stream:
        return None
    return ScopedRng({WHOLE: of_stream, PART: [*of_stream, x], INNER: [x]}, mesh.device)


def _outer_norms(model: nn.Module, pairing: Pairing) -> list[str]:
    """Returns the names of norms whose features are split over y: all but those of single heads."""
    return [
        name
        for name, module in model.named_modules()
        if is_norm(module) and not any(f"{name}.{leaf}" in pairing.inner for leaf in module._parameters)
    ]


class _DryMesh(Mesh):
    """The mesh of the rank at `coordinates`, without process groups: collectives of its axes only count."""

    def __init__(self, plan: Plan, coordinates: Mapping[str, int]) -> None:
        self.plan, self.coordinates = plan, dict(coordinates)
        self.device, self.ledger = torch.device("cpu"), Ledger()

    def __getitem__(self, name: str) -> Axis:
        return Axis(name, self.plan.degree(name), self.coordinates[name], None, self.ledger, dry=True)


def dry_split(model: nn.Module, plan: Plan, x: int, proofs: dict[Any, Any]) -> nn.Module:
    """Returns the copy of a model that rank `x` of the axis would hold. `proofs` are as for `pair`.

    Hooks that the split adds to the model itself are left out: they mark its result for the loss.
    """
    made = skeleton(model)
    hooks = [(made.__dict__[kind], dict(made.__dict__[kind])) for kind in _HOOKS]
    split_model(made, pair(made, proofs), plan, _DryMesh(plan, {**dict.fromkeys(plan.degrees, 0), "x": x}))
    for held, before in hooks:
        held.clear()
        held.update(before)
    return made


_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
