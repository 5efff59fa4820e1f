"""Axes `x` and `y`: every linear split by outputs and inputs (AxoNN; Megatron is y = 1). With `shard`, a 3-D matmul.

For O = I·W with I [m, k], m tokens of one batch rank, and W [k, n]:

    column  W: n over x, k over y     I: k over y      O = sum over y, n over x       dI = sum over x
    row     W: n over y, k over x     I: k over x      O = sum over x, n over y       dI = sum over y

Columns and rows alternate, so a row's output is laid out as the next column takes it: the residual stream has its
features over y and is the same on all ranks of x; between column and row, features (heads) go over x. Bytes per layer
and micro-batch, at c bytes an element: column backward m·k/y·c over x (once for several columns with one input),
forward m·n/x·c over y; row forward m·n/y·c over x, backward m·k/x·c over y. With `tensor.sequence` the residual stream
is also split along the sequence over x between the regions: each all-reduce over x becomes an all-gather and a
reduce-scatter of the same size, and norms and their activations are split too.

The embedding's rows (vocabulary) go over x, its features over y; the head likewise, and its logits stay split
(`vocabulary.py`). Norms over y sum their moments over y. What has no partner is gathered after its matmul.
Convolutions are in `convolution.py`; in a model that has some, the stream between layers is whole on every rank of y:
a column takes its part of it, and a row's parts are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.cut import Cut, share
from weft.errors import PlanError
from weft.mesh import Mesh
from weft.pairing import Pairing, Split, is_norm, pair, sizes
from weft.parallel import convolution
from weft.parallel.draws import Draws, has_dropout
from weft.parallel.tensor_cost import localise, traffic
from weft.parallel.tensor_cuts import parameter_cuts
from weft.parallel.tensor_norm import split_norm
from weft.parallel.tensor_ops import Region, gather, leave, own_part, scatter, scatter_sum
from weft.parallel.tensor_refuse import refuse_sizes
from weft.parallel.vocabulary import Vocabulary, set_vocabulary, split_embedding
from weft.plan import BatchSplit, Plan
from weft.profile import CUTS_ATTRIBUTE, Profile
from weft.strategy import Cost, Strategy, Values, tally

__all__ = ["TensorAxes", "localise"]

SEQUENCE_DIM = 1  # of hidden states [batch, sequence, features]


class TensorAxes(Strategy):
    """Matmuls over `x` and `y`."""

    name = "tensor"

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        if plan.tensor.x == plan.tensor.y == 1:
            return None
        try:
            pairing = profile.pairing
        except PlanError as error:
            return str(error)
        return refuse_sizes(profile, pairing, plan)

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        if plan.tensor.x == plan.tensor.y == 1:
            return Cost()
        calls = list(traffic(profile, plan, coordinates["x"], coordinates["y"])) * split.accumulation
        return Cost(tally([(key, num_bytes) for key, num_bytes in calls if num_bytes]))

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        if plan.tensor.x == plan.tensor.y == 1:
            return model
        pairing = pair(model)
        cuts = parameter_cuts(
            pairing, {name: tuple(p.shape) for name, p in model.named_parameters()}, plan, mesh.coordinates
        )
        _Applier(model, pairing, plan, mesh).apply()
        _shrink(model, cuts)
        model.__dict__[CUTS_ATTRIBUTE] = cuts
        return model


# --- what each module does


def _shrink(model: nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Put parameters of the local shapes in place; their values come when the state is laid out."""
    made: dict[int, nn.Parameter] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in names:
                if id(parameter) not in made:
                    shape = cuts[names[id(parameter)]].local_shape
                    empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[leaf] = made[id(parameter)]


class _Applier:
    """Replaces forwards and adds hooks; modules, names and classes stay."""

    def __init__(self, model: nn.Module, pairing: Pairing, plan: Plan, mesh: Mesh) -> None:
        self.model, self.pairing = model, pairing
        self.x, self.y = mesh["x"], mesh["y"]
        self.sequence = plan.tensor.sequence and self.x.degree > 1
        self.keep_part = plan.memory.recompute == "none"  # else what a block saves lives for a moment only
        self.draws = Draws(self.x, mesh.device) if has_dropout(model) and self.x.degree > 1 else None
        self.passed: set[str] = set()  # the ends of the chain that this forward has come by

    def apply(self) -> None:
        self.model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        for parent in {split.parent for split in self.pairing.splits.values() if split.parent is not None}:
            splits = [split for split in self.pairing.splits.values() if split.parent == parent]
            columns = [self.model.get_submodule(split.module) for split in splits]
            width = sizes(columns[0])[0] // (1 if self.pairing.is_whole else self.y.degree)
            hook = partial(self._enter_parent, splits[0], columns, width)
            self.model.get_submodule(parent).register_forward_pre_hook(hook, with_kwargs=True)
        for split in self.pairing.splits.values():
            module = self.model.get_submodule(split.module)
            forward = {"column": self._column, "row": self._row, "gathered": self._gathered, "head": self._head}
            replaced = self._convolution if split.num_spatial else forward[split.kind]
            setattr(module, "forward", partial(replaced, module, split))  # noqa: B010 (a method to mypy)
            if split.kind == "head":
                num_classes = sizes(module)[1]
                begin, end = share(num_classes, self.x.degree, self.x.index)
                set_vocabulary(self.model, Vocabulary(begin, end, num_classes, self.x))
        for name in self.pairing.embeddings:
            embedding = self.model.get_submodule(name)
            assert isinstance(embedding, nn.Embedding)
            begin = share(embedding.num_embeddings, self.x.degree, self.x.index)[0]
            setattr(embedding, "forward", partial(split_embedding, embedding, begin=begin, axis=self.x))  # noqa: B010
            if self.pairing.is_whole:
                embedding.register_forward_hook(lambda _, __, out: gather(out, self.y, -1))
        if self.y.degree > 1 and not self.pairing.is_whole:
            for name in _outer_norms(self.model, self.pairing):
                norm = self.model.get_submodule(name)
                setattr(norm, "forward", partial(split_norm, norm, self.y))  # noqa: B010
        if self.sequence:
            first, last = (self.model.get_submodule(self.pairing.blocks[end]) for end in (0, -1))
            # First of all hooks: a block may itself be what takes the sequence into a region.
            first.register_forward_pre_hook(self._before_chain, with_kwargs=True, prepend=True)
            last.register_forward_hook(self._after_chain)
        for name, scaled in self.pairing.scaled.items():
            scaled.apply(self.model.get_submodule(name), self.x.degree)

    # --- into a region and out of it

    def _region(self, in_block: bool) -> Region:
        return Region(self.x, SEQUENCE_DIM, self.keep_part) if self.sequence and in_block else Region(self.x)

    def _enter_parent(
        self, split: Split, columns: list[Any], width: int, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Several columns share one input: it enters their region once, and its gradient is summed once."""
        inputs = [key for key, value in (*enumerate(args), *kwargs.items()) if _is_hidden(value, width)]
        both = [key for key in inputs[1:] if (args[key] if isinstance(key, int) else kwargs[key]).requires_grad]
        if not inputs or both:
            raise PlanError(
                f"'{split.parent}' got {len(inputs)} tensors with {width} features, but the tensor axes split "
                f"attention to one input (self-attention) only; use tensor.x = tensor.y = 1"
            )
        self._draw_apart()
        region = module.__dict__["_weft_region"] = self._region(self._in_block(split))
        weights = [column.weight for column in columns]
        key = inputs[0]
        if isinstance(key, int):
            return (*args[:key], region.enter(self._own(args[key]), weights), *args[key + 1 :]), kwargs
        return args, {**kwargs, key: region.enter(self._own(kwargs[key]), weights)}

    def _own(self, value: Tensor) -> Tensor:
        """Our features of a stream that is whole over y; elsewhere we have only ours."""
        return own_part(value, self.y, -1) if self.pairing.is_whole else value

    def _column(self, module: Any, split: Split, value: Tensor) -> Tensor:
        if split.parent is None:
            self._draw_apart()
            region = self._region(self._in_block(split))
            value = region.enter(self._own(value), [module.weight])
        else:
            region = self.model.get_submodule(split.parent).__dict__["_weft_region"]
        return _add_bias(leave(region.linear(value, module.weight, split.turned), self.y), module)

    def _row(self, module: Any, split: Split, value: Tensor) -> Tensor:
        if not self.sequence:
            self._draw_alike()
        region = Region(self.y)
        out = region.linear(region.enter(value, [module.weight]), module.weight, split.turned)
        is_split = self.sequence and self._in_block(split)
        out = _add_bias(scatter_sum(out, self.x, SEQUENCE_DIM) if is_split else leave(out, self.x), module)
        return gather(out, self.y, -1) if self.pairing.is_whole else out

    def _gathered(self, module: Any, split: Split, value: Tensor) -> Tensor:
        is_split = self._in_block(split)
        region = self._region(is_split)
        out = region.linear(region.enter(self._own(value), [module.weight]), module.weight, split.turned)
        out = gather(_add_bias(leave(out, self.y), module), self.x, -1)
        return scatter(out, self.x, SEQUENCE_DIM) if self.sequence and is_split else out

    def _head(self, module: Any, split: Split, value: Tensor) -> Tensor:
        region = Region(self.x)
        out = region.linear(region.enter(self._own(value), [module.weight]), module.weight, split.turned)
        return _add_bias(leave(out, self.y), module)

    def _convolution(self, module: Any, split: Split, value: Tensor) -> Tensor:
        if split.kind == "column":
            self._draw_apart()
        elif split.kind == "row":
            self._draw_alike()
        kinds = {"gathered": convolution.gathered, "column": convolution.column, "row": convolution.row}
        return kinds[split.kind](module, self.x, self.y, value)

    def _in_block(self, split: Split) -> bool:
        return self.pairing.block_of(split.module) is not None

    # --- the model, and the chain of its blocks

    def _before_model(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if kwargs.get("labels") is not None:
            raise PlanError(
                "the model was given labels, but its logits are split over x and its own loss would be wrong; leave "
                "labels out and use weft.train_step, or weft.cross_entropy(logits, labels, weft.vocabulary_of(model))"
            )
        self.passed.clear()
        if self.draws is not None:
            self.draws.forget()

    def _before_chain(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        self._pass("first")
        if args:
            return (self._scatter_sequence(args[0]), *args[1:]), kwargs
        key = next(key for key, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point())
        return args, {**kwargs, key: self._scatter_sequence(kwargs[key])}

    def _after_chain(self, _: nn.Module, __: Any, out: Any) -> Any:
        self._pass("last")
        self._draw_alike()
        if isinstance(out, tuple):
            return (gather(out[0], self.x, SEQUENCE_DIM), *out[1:])
        return gather(out, self.x, SEQUENCE_DIM)

    def _scatter_sequence(self, hidden: Tensor) -> Tensor:
        if hidden.dim() != 3 or hidden.shape[SEQUENCE_DIM] % self.x.degree:
            raise PlanError(
                f"tensor.sequence = true splits [batch, sequence, features] over x = {self.x.degree}, but the first "
                f"block got {list(hidden.shape)}; use a sequence that x divides, or tensor.sequence = false"
            )
        self._draw_apart()
        return scatter(hidden, self.x, SEQUENCE_DIM)

    def _pass(self, end: str) -> None:
        if end in self.passed:
            raise PlanError(
                f"the {end} block was called twice in one forward, but tensor.sequence = true splits the sequence "
                f"where the chain of blocks begins and gathers it where it ends; use tensor.sequence = false"
            )
        self.passed.add(end)

    def _draw_apart(self) -> None:
        if self.draws is not None:
            self.draws.apart()

    def _draw_alike(self) -> None:
        if self.draws is not None:
            self.draws.alike()


def _outer_norms(model: nn.Module, pairing: Pairing) -> list[str]:
    """The norms whose features are split over y: all but those of single heads."""
    return [
        name
        for name, module in model.named_modules()
        if is_norm(module) and not any(f"{name}.{leaf}" in pairing.inner for leaf in module._parameters)
    ]


def _add_bias(value: Tensor, module: Any) -> Tensor:
    return value if module.bias is None else value + module.bias


def _is_hidden(value: Any, width: int) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1] == width
