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
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.ledger import Key
from weft.cut import Cut, Interval, share, share_units, stack
from weft.errors import PlanError
from weft.mesh import Mesh
from weft.pairing import Pairing, Part, Split, is_norm, pair, sizes
from weft.parallel.layout import COMPUTE_DTYPE
from weft.parallel.tensor_ops import Region, enter, gather, leave, linear, scatter, scatter_sum
from weft.parallel.vocabulary import Vocabulary, loss_bytes, set_vocabulary, split_embedding
from weft.plan import BatchSplit, Plan
from weft.profile import CUTS_ATTRIBUTE, Block, Layer, Profile
from weft.strategy import Cost, Strategy, Values, tally

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
        return _refuse_sizes(profile, pairing, plan)

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        if plan.tensor.x == plan.tensor.y == 1:
            return Cost()
        calls = list(_traffic(profile, plan, coordinates["x"])) * split.accumulation
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


def localise(profile: Profile, plan: Plan, coordinates: Mapping[str, int]) -> Profile:
    """The profile with the parameters that the rank at `coordinates` holds, and the tokens that it sees."""
    context = plan.context.degree
    layers = {name: replace(layer, rows=layer.rows // context) for name, layer in profile.layers.items()}
    profile = replace(profile, layers=layers, stream_numel=profile.stream_numel // context)
    if plan.tensor.x == plan.tensor.y == 1:
        return profile
    shapes = {parameter.name: parameter.shape for block in profile.all for parameter in block.parameters}
    cuts = parameter_cuts(profile.pairing, shapes, plan, coordinates)

    def local(block: Block) -> Block:
        parameters = (replace(p, shape=cuts[p.name].local_shape, cut=cuts[p.name]) for p in block.parameters)
        return replace(block, parameters=tuple(parameters))

    return replace(profile, root=local(profile.root), blocks=tuple(local(block) for block in profile.blocks))


# --- what each rank holds


def parameter_cuts(
    pairing: Pairing, shapes: Mapping[str, tuple[int, ...]], plan: Plan, coordinates: Mapping[str, int]
) -> dict[str, Cut]:
    """Every parameter's part on the rank at `coordinates`."""
    x, y = coordinates["x"], coordinates["y"]
    make = _CutMaker(pairing, plan, x, y)
    return {name: make.cut(name, shape) for name, shape in shapes.items()}


class _CutMaker:
    def __init__(self, pairing: Pairing, plan: Plan, x: int, y: int) -> None:
        self.pairing, self.plan, self.x, self.y = pairing, plan, x, y
        self.num_x, self.num_y = plan.tensor.x, plan.tensor.y

    def cut(self, name: str, shape: tuple[int, ...]) -> Cut:
        module, _, leaf = name.rpartition(".")
        if module in self.pairing.embeddings:
            return self._make(shape, {0: (share(shape[0], self.num_x, self.x),), 1: self._over_y(shape[1])}, x=1, y=1)
        split = self.pairing.splits.get(module)
        if split is None:
            return self._other(name, shape)
        over_x, repeats = self._over_x(split)
        if split.kind == "row":
            if leaf == "bias":
                return self._make(shape, {0: self._over_y(shape[0])}, y=1, sums=self._outside_sums(name))
            inner, outer = (0, 1) if split.turned else (1, 0)
            return self._make(shape, {inner: over_x, outer: self._over_y(shape[outer])}, x=1, y=1)
        sums = (f"x:{repeats}",) if repeats > 1 else ()
        if leaf == "bias":
            return self._make(shape, {0: over_x}, x=1, repeats=repeats, sums=sums)
        inner, outer = (0, 1) if split.turned else (1, 0)
        cuts = {outer: over_x, inner: self._over_y(shape[inner])}
        return self._make(shape, cuts, x=1, y=1, repeats=repeats, sums=sums)

    def _over_x(self, split: Split) -> tuple[tuple[Interval, ...], int]:
        """The intervals of the dim that goes over x, and how many neighbours on x hold the same."""
        repeats = 1
        parts = []
        for part in split.parts:
            if part.is_key and part.num_units < self.num_x:
                repeats = self.num_x // part.num_units
                parts.append(share_units(part.num_units, part.unit, part.num_units, self.x // repeats))
            else:
                parts.append(share_units(part.num_units, part.unit, self.num_x, self.x))
        return stack([part.width for part in split.parts], parts), repeats

    def _over_y(self, size: int) -> tuple[Interval, ...]:
        return (share(size, self.num_y, self.y),)

    def _other(self, name: str, shape: tuple[int, ...]) -> Cut:
        if name in self.pairing.inner:
            return self._make(shape, {}, sums=("x",) if self.num_x > 1 else ())
        sums = self._outside_sums(name)
        if self.num_y > 1 and shape:
            return self._make(shape, {len(shape) - 1: self._over_y(shape[-1])}, y=1, sums=sums)
        return self._make(shape, {}, sums=sums)

    def _outside_sums(self, name: str) -> tuple[str, ...]:
        """Between regions each rank of x has its own part of the sequence, so gradients there are partial."""
        in_block = any(name.startswith(f"{block}.") for block in self.pairing.blocks)
        return ("x",) if self.plan.tensor.sequence and in_block and self.num_x > 1 else ()

    def _make(
        self,
        shape: tuple[int, ...],
        cuts: dict[int, tuple[Interval, ...]],
        x: int = 0,
        y: int = 0,
        repeats: int = 1,
        sums: tuple[str, ...] = (),
    ) -> Cut:
        """`x`, `y`: whether the parameter is cut over the axis; `repeats` neighbours on x hold the same part."""
        intervals = tuple(cuts.get(dim, ((0, size),)) for dim, size in enumerate(shape))
        replicas = (repeats if x else self.num_x) * (1 if y else self.num_y)
        is_first = (self.x % repeats == 0 if x else self.x == 0) and (bool(y) or self.y == 0)
        return Cut(shape, intervals, replicas, sums, is_first)


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


# --- what each module does


class _Applier:
    """Replaces forwards and adds hooks; modules, names and classes stay."""

    def __init__(self, model: nn.Module, pairing: Pairing, plan: Plan, mesh: Mesh) -> None:
        self.model, self.pairing, self.plan = model, pairing, plan
        self.x, self.y = mesh["x"], mesh["y"]
        self.sequence = plan.tensor.sequence and self.x.degree > 1

    def apply(self) -> None:
        for parent in {split.parent for split in self.pairing.splits.values() if split.parent is not None}:
            width = next(sizes(self.model.get_submodule(s.module))[0] for s in self._columns(parent))
            module = self.model.get_submodule(parent)
            module.register_forward_pre_hook(partial(self._enter_parent, width // self.y.degree), with_kwargs=True)
        for split in self.pairing.splits.values():
            module = self.model.get_submodule(split.module)
            forward = {"column": self._column, "row": self._row, "gathered": self._gathered, "head": self._head}
            setattr(module, "forward", partial(forward[split.kind], module, split))  # noqa: B010 (a method to mypy)
            if split.kind == "head":
                begin, end = share(sizes(module)[1], self.x.degree, self.x.index)
                set_vocabulary(self.model, Vocabulary(begin, end, self.x))
        for name in self.pairing.embeddings:
            embedding = self.model.get_submodule(name)
            assert isinstance(embedding, nn.Embedding)
            begin = share(embedding.num_embeddings, self.x.degree, self.x.index)[0]
            setattr(embedding, "forward", partial(split_embedding, embedding, begin=begin, axis=self.x))  # noqa: B010
        if self.y.degree > 1:
            self._split_norms()
        if self.sequence:
            self._split_sequence()
        self._scale_attributes()
        self.model.register_forward_pre_hook(_refuse_labels, with_kwargs=True)

    def _columns(self, parent: str) -> Iterator[Split]:
        return (split for split in self.pairing.splits.values() if split.parent == parent)

    def _enter(self, value: Tensor, region: Region) -> Tensor:
        if self.sequence:
            return gather(value, self.x, SEQUENCE_DIM, reduce=True, region=region)
        return enter(value, self.x, region)

    def _enter_parent(self, width: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Several columns share one input: it enters their region once, and its gradient is summed once."""
        region = module.__dict__["_weft_region"] = Region()
        for index, value in enumerate(args):
            if _is_hidden(value, width):
                return (*args[:index], self._enter(value, region), *args[index + 1 :]), kwargs
        for key, value in kwargs.items():
            if _is_hidden(value, width):
                return args, {**kwargs, key: self._enter(value, region)}
        raise PlanError(f"{type(module).__name__} got no tensor with {width} features as its input")

    def _column(self, module: Any, split: Split, value: Tensor) -> Tensor:
        if split.parent is None:
            region = Region()
            value = self._enter(value, region)
        else:
            region = self.model.get_submodule(split.parent).__dict__["_weft_region"]
        return _add_bias(leave(linear(value, module.weight, split.turned, region), self.y), module)

    def _row(self, module: Any, split: Split, value: Tensor) -> Tensor:
        region = Region()
        out = linear(enter(value, self.y, region), module.weight, split.turned, region)
        out = (
            scatter_sum(out, self.x, SEQUENCE_DIM)
            if self.sequence and _in_blocks(split, self.pairing)
            else leave(out, self.x)
        )
        return _add_bias(out, module)

    def _gathered(self, module: Any, split: Split, value: Tensor) -> Tensor:
        region = Region()
        out = linear(enter(value, self.x, region), module.weight, split.turned, region)
        return gather(_add_bias(out, module), self.x, -1, reduce=False)

    def _head(self, module: Any, split: Split, value: Tensor) -> Tensor:
        # Without a region: a weight that is tied to the embedding gets its gradient from autograd, once.
        out = linear(enter(value, self.x), module.weight, split.turned, None)
        return _add_bias(leave(out, self.y), module)

    def _split_norms(self) -> None:
        for name, module in self.model.named_modules():
            if is_norm(module) and not any(f"{name}.{leaf}" in self.pairing.inner for leaf in module._parameters):
                module.forward = partial(_norm, module, self.y)

    def _split_sequence(self) -> None:
        blocks = [self.model.get_submodule(name) for name in self.pairing.blocks]
        blocks[0].register_forward_pre_hook(
            lambda _, args, kwargs: _map_hidden(args, kwargs, self._scatter_sequence),
            with_kwargs=True,
        )
        blocks[-1].register_forward_hook(
            lambda _, __, out: _map_first(out, lambda h: gather(h, self.x, SEQUENCE_DIM, reduce=False))
        )

    def _scatter_sequence(self, hidden: Tensor) -> Tensor:
        if hidden.dim() != 3 or hidden.shape[SEQUENCE_DIM] % self.x.degree:
            raise PlanError(
                f"tensor.sequence = true splits [batch, sequence, features] over x = {self.x.degree}, but the first "
                f"block got {list(hidden.shape)}; use a sequence that x divides, or tensor.sequence = false"
            )
        return scatter(hidden, self.x, SEQUENCE_DIM)

    def _scale_attributes(self) -> None:
        for name, attributes in self.pairing.scaled.items():
            module = self.model.get_submodule(name)
            for attribute in attributes:
                setattr(module, attribute, getattr(module, attribute) // self.x.degree)
            keys = [part for split in self._columns(name) for part in split.parts if part.is_key]
            groups = getattr(module, "num_key_value_groups", None)
            if isinstance(groups, int) and keys and keys[0].num_units < self.x.degree:
                module.num_key_value_groups = groups * keys[0].num_units // self.x.degree  # type: ignore[assignment]


def _norm(module: Any, axis: Any, hidden: Tensor) -> Tensor:
    """A norm over features that are split over the axis: its moments are summed over it, forward and backward."""
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    size = hidden.shape[-1] * axis.degree
    centred = isinstance(module, nn.LayerNorm)
    if centred:
        wide = wide - _sum_over(wide.sum(-1, keepdim=True), axis) / size
    variance = _sum_over(wide.square().sum(-1, keepdim=True), axis) / size
    eps = getattr(module, "eps", None) or getattr(module, "variance_epsilon", None) or torch.finfo(hidden.dtype).eps
    normed = (wide * torch.rsqrt(variance + eps)).to(hidden.dtype)
    out = normed if module.weight is None else normed * module.weight
    return out if getattr(module, "bias", None) is None else out + module.bias


def _sum_over(value: Tensor, axis: Any) -> Tensor:
    return enter(leave(value, axis), axis)


def _add_bias(value: Tensor, module: Any) -> Tensor:
    return value if module.bias is None else value + module.bias


def _is_hidden(value: Any, width: int) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1] == width


def _map_hidden(args: Any, kwargs: Any, change: Any) -> Any:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    key = next(key for key, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point())
    return args, {**kwargs, key: change(kwargs[key])}


def _map_first(out: Any, change: Any) -> Any:
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


def _in_blocks(split: Split, pairing: Pairing) -> bool:
    return any(split.module.startswith(f"{block}.") for block in pairing.blocks)


def _refuse_labels(_: nn.Module, args: Any, kwargs: Any) -> None:
    if kwargs.get("labels") is not None:
        raise PlanError(
            "the model was given labels, but its logits are split over x and its own loss would be wrong; "
            "leave labels out and use weft.train_step or weft.cross_entropy"
        )


# --- refusals


def _refuse_sizes(profile: Profile, pairing: Pairing, plan: Plan) -> str | None:
    x, y = plan.tensor.x, plan.tensor.y
    shapes = {parameter.name: parameter.shape for block in profile.all for parameter in block.parameters}
    for split in pairing.splits.values():
        shape = shapes.get(f"{split.module}.weight") or shapes[next(n for n in shapes if n.endswith(".weight"))]
        reason = _refuse_split(split, shape, x, y)
        if reason is not None:
            return reason
    if y > 1:
        for name, shape in shapes.items():
            if name.rpartition(".")[0] not in pairing.splits and name not in pairing.inner and shape and shape[-1] % y:
                return f"tensor.y = {y} does not divide the {shape[-1]} features of '{name}'; use a divisor"
    if plan.tensor.sequence and not pairing.blocks:
        return "tensor.sequence = true works between blocks, and the model has none; use false"
    return None


def _refuse_split(split: Split, shape: tuple[int, ...], x: int, y: int) -> str | None:
    for part in split.parts:
        what = "heads" if part.unit > 1 else "features"
        if part.is_key and part.num_units < x and x % part.num_units:
            return (
                f"tensor.x = {x} and the {part.num_units} key-value heads of '{split.module}' do not divide each "
                f"other; use {_divisors(part.num_units)} or a multiple of {part.num_units}"
            )
        even = split.kind in ("column", "row", "gathered")
        if even and not (part.is_key and part.num_units < x) and part.num_units % x:
            return (
                f"tensor.x = {x} does not divide the {part.num_units} {what} of '{split.module}'; "
                f"use {_divisors(part.num_units)}"
            )
        if split.kind == "head" and part.num_units < x:
            return f"tensor.x = {x} is more than the {part.num_units} outputs of '{split.module}'"
    if y > 1:
        if split.kind == "gathered":
            return (
                f"tensor.y = {y}, but '{split.module}' has no partner to be paired with, and y needs pairs; use y = 1"
            )
        over_y = (
            (shape[1] if split.turned else shape[0])
            if split.kind == "row"
            else (shape[0] if split.turned else shape[1])
        )
        if over_y % y:
            return f"tensor.y = {y} does not divide the {over_y} features of '{split.module}'; use {_divisors(over_y)}"
    return None


def _divisors(number: int) -> str:
    found = [str(value) for value in range(1, min(number, 64) + 1) if number % value == 0]
    return ", ".join(found[:-1]) + " or " + found[-1] if len(found) > 1 else found[0]


# --- traffic of one micro-batch


def _traffic(profile: Profile, plan: Plan, x_index: int) -> Iterator[tuple[Key, int]]:
    """Every collective of one micro-batch, forward and backward, with the bytes of the whole tensor."""
    x, y = plan.tensor.x, plan.tensor.y
    size = COMPUTE_DTYPE[plan.precision].itemsize
    meter = _Meter(profile, plan, size, x_index)
    entered: set[str] = set()
    for split in profile.pairing.splits.values():
        if split.kind == "row":
            yield from meter.row(split)
            continue
        if split.parent is None or split.parent not in entered:
            yield from meter.enter(split)
            entered.add(split.parent or split.module)
        yield from meter.column(split)
    for name in profile.pairing.embeddings:
        if x > 1:
            yield ("x", "all_reduce"), profile.layers[name].rows * profile.layers[name].out_features // y * size
    if y > 1:
        yield from meter.norms()
    if plan.tensor.sequence and x > 1:
        yield from meter.sequence_ends()


class _Meter:
    """Bytes of the collectives of each split, with forward ones again where a block is recomputed."""

    def __init__(self, profile: Profile, plan: Plan, size: int, x_index: int) -> None:
        self.profile, self.plan, self.size, self.x_index = profile, plan, size, x_index
        self.x, self.y = plan.tensor.x, plan.tensor.y
        self.sequence = plan.tensor.sequence

    def enter(self, split: Split) -> Iterator[tuple[Key, int]]:
        """Into a region: dI summed over x."""
        if self.x == 1:
            return
        layer = self._layer(split)
        whole = layer.rows * layer.in_features // self.y * self.size
        if self.sequence and _in_blocks(split, self.profile.pairing):
            yield from [(("x", "all_gather"), whole)] * self._forwards(split)
            yield ("x", "reduce_scatter"), whole
        elif layer.needs_gradient:
            yield ("x", "all_reduce"), whole

    def column(self, split: Split) -> Iterator[tuple[Key, int]]:
        """Partial sums over y; the head's loss; the gathered outputs."""
        rows, out = self._layer(split).rows, self._layer(split).out_features
        local = sum(self._local_width(part) for part in split.parts)
        if self.y > 1:
            yield from [(("y", "all_reduce"), rows * local * self.size)] * self._forwards(split)
        if self.x > 1 and split.kind == "gathered":
            yield from [(("x", "all_gather"), rows * out * self.size)] * self._forwards(split)
        if self.x > 1 and split.kind == "head":
            for num_bytes in loss_bytes(rows, max(4, self.size)):
                yield ("x", "all_reduce"), num_bytes

    def row(self, split: Split) -> Iterator[tuple[Key, int]]:
        """Out of a region: partial sums over x; dI summed over y."""
        layer = self._layer(split)
        rows, whole = layer.rows, layer.rows * layer.out_features // self.y * self.size
        again = self._forwards(split) - layer.is_last  # recomputing stops at the last thing that backward needs
        if self.x > 1 and self.sequence and _in_blocks(split, self.profile.pairing):
            yield from [(("x", "reduce_scatter"), whole)] * max(1, again)
            yield ("x", "all_gather"), whole
        elif self.x > 1:
            yield from [(("x", "all_reduce"), whole)] * max(1, again)
        if self.y > 1:
            local = sum(self._local_width(part) for part in split.parts)
            yield ("y", "all_reduce"), rows * local * self.size

    def norms(self) -> Iterator[tuple[Key, int]]:
        """Moments over y, forward and backward."""
        assert self.profile.model is not None
        for name, layer in self.profile.layers.items():
            module, rows = self.profile.model.get_submodule(name), layer.rows
            if not is_norm(module) or f"{name}.weight" in self.profile.pairing.inner:
                continue
            moments = 2 if isinstance(module, nn.LayerNorm) else 1
            if self.sequence and any(name.startswith(f"{block}.") for block in self.profile.pairing.blocks):
                rows //= self.x
            one = (("y", "all_reduce"), rows * max(4, self.size))
            yield from [one] * moments * (self._forward_times(name) + 1)

    def sequence_ends(self) -> Iterator[tuple[Key, int]]:
        """The first block takes its part of the sequence, after the last one the parts are gathered."""
        whole = self.profile.stream_numel // self.y * self.size
        yield from [(("x", "all_gather"), whole)] * 2

    def _layer(self, split: Split) -> Layer:
        return self.profile.layers[split.module]

    def _local_width(self, part: Part) -> int:
        if part.is_key and part.num_units < self.x:
            return part.unit
        begin, end = share_units(part.num_units, part.unit, self.x, self.x_index)
        return end - begin

    def _forwards(self, split: Split) -> int:
        return self._forward_times(split.module)

    def _forward_times(self, name: str) -> int:
        in_block = any(name.startswith(f"{block}.") for block in self.profile.pairing.blocks)
        return 2 if in_block and self.plan.memory.recompute != "none" else 1
