"""Cost of the tensor axes: every collective of one micro-batch, and a rank's part of the profile.

Traffic follows the formulas of `axis.py`, layer by layer, and equals the ledger to the byte. A rank's saved bytes are
those of the whole model, divided by where they are saved (after Korthikanti et al. 2022). Activations between a column
and its row (a *region*) are divided by x. Those saved by norms, and the inputs of regions, are the residual stream,
which is divided by y, and with `tensor.sequence` also by x. FLOPs of matmuls are divided by x and y, those of attention
by x only, because all ranks of y have the same heads.

Values between convolutions are whole on every rank: of the activations saved there, only those inside regions are
divided by x.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from weft.comm.ledger import Key
from weft.inspection.parameter_cut import share
from weft.inspection.tensor_splits import Split, is_norm
from weft.parallel.cut_parameters import cut_profile
from weft.parallel.tensor.cuts import ends_of, parameter_cuts
from weft.parallel.tensor.norm import NormMemory
from weft.parallel.tensor.split_logits import gather_bytes
from weft.parallel.tensor.vocabulary import loss_bytes
from weft.plan import Plan
from weft.profiling import BackwardShares, Block, LayerShape, Profile
from weft.sharding.layout import COMPUTE_DTYPE

Calls = Iterator[tuple[Key, int]]


# --- traffic of one micro-batch


def traffic(profile: Profile, plan: Plan, x_index: int, y_index: int = 0) -> Calls:
    """Yields every collective of one micro-batch, forward and backward, with the bytes of the whole tensor."""
    layer_traffic = _LayerTraffic(profile, plan, x_index, y_index)
    entered: set[str] = set()
    for split in profile.pairing.splits.values():
        is_entered = split.parent is not None and split.parent in entered
        for layer in profile.layer_calls.get(split.module, ()):  # a layer that is not called communicates nothing
            if split.kind == "row":
                yield from layer_traffic.row(split, layer)
                continue
            if not is_entered:
                yield from layer_traffic.enter(split, layer)
            yield from layer_traffic.column(split, layer)
        entered.add(split.parent or split.module)
    yield from layer_traffic.embeddings()
    yield from layer_traffic.norms()
    yield from layer_traffic.sequence_ends()


class _LayerTraffic:
    """Bytes of the collectives of each split layer's calls. Forward ones count twice where a block is recomputed."""

    def __init__(self, profile: Profile, plan: Plan, x_index: int, y_index: int) -> None:
        self.profile, self.pairing, self.plan = profile, profile.pairing, plan
        self.x_index, self.y_index = x_index, y_index
        self.x, self.y = plan.tensor.x, plan.tensor.y
        self.size = COMPUTE_DTYPE[plan.precision].itemsize
        self.sequence = plan.tensor.sequence and self.x > 1
        self.ends = ends_of(self.pairing, plan)
        self.blocks = {block.name: block for block in profile.blocks}
        self.frozen = {p.name for block in profile.all for p in block.parameters if not p.trainable}

    def enter(self, split: Split, layer: LayerShape) -> Calls:
        """Yields the collectives of a column's input: dI is summed over x.

        With `sequence`, I is gathered, and with `regather` once more for dW. If the stream is whole over y, each rank
        takes its part of I, and dI is gathered over y.
        """
        if self.y > 1 and self.pairing.is_whole:
            operation = "all_reduce" if layer.in_features % self.y else "all_gather"
            num_bytes = layer.in_rows * layer.in_features * self.size // self._over_sequence(split.module)
            yield from [(("y", operation), num_bytes)] * layer.needs_gradient
        if self.x == 1:
            return
        begin, end = share(layer.in_features, self.y, self.y_index)
        whole = layer.in_rows * (end - begin) * self.size
        if not (self.sequence and (self._in_block(split.module) or split.module == self.ends.head)):
            yield from [(("x", "all_reduce"), whole)] * layer.needs_gradient
            return
        same = [s for s in self.pairing.splits.values() if s is split or (split.parent and s.parent == split.parent)]
        again = self.plan.tensor.regather and layer.needs_gradient and any(self._trains(s.module) for s in same)
        yield from self._in_chunks("all_gather", whole, self._forwards(split.module, layer) + again)
        yield from self._in_chunks("reduce_scatter", whole, layer.needs_gradient)

    def column(self, split: Split, layer: LayerShape) -> Calls:
        """Yields the collectives of a column's output: partial sums over y, gathered outputs, and the head's loss."""
        forwards = self._results(split.module, layer)
        if self.y > 1:
            yield from [(("y", "all_reduce"), layer.rows * self._local_width(split) * self.size)] * forwards
        if self.x > 1 and split.kind == "gathered":
            yield from [(("x", "all_gather"), layer.rows * layer.out_features * self.size)] * forwards
            if self.sequence and self._in_block(split.module) and self._has_backward(split, layer):
                yield ("x", "all_gather"), layer.rows * layer.out_features * self.size
        if self.x == 1 or split.kind != "head" or not layer.in_backward:  # no loss is computed of other logits
            return
        if self.profile.gathers_logits:
            yield ("x", "all_gather"), gather_bytes(layer.rows, layer.out_features, self.x, self.size)
        else:
            for num_bytes in loss_bytes(layer.rows, max(4, self.size)):
                yield ("x", "all_reduce"), num_bytes

    def row(self, split: Split, layer: LayerShape) -> Calls:
        """Yields the collectives of a row: partial sums over x, and dI summed over y.

        If the stream is whole over y, the output is also gathered over y.
        """
        whole, results = layer.rows * layer.out_features // self.y * self.size, self._results(split.module, layer)
        if self.x > 1 and self.sequence and self._in_block(split.module):
            yield from self._in_chunks("reduce_scatter", whole, results)
            yield from self._in_chunks("all_gather", whole, self._has_backward(split, layer))
        elif self.x > 1:
            yield from [(("x", "all_reduce"), whole)] * results
        if self.y > 1 and self.pairing.is_whole:
            num_bytes = layer.rows * layer.out_features * self.size // self._over_sequence(split.module)
            yield from [(("y", "all_gather"), num_bytes)] * results
        if self.y > 1 and layer.needs_gradient:
            yield ("y", "all_reduce"), layer.in_rows * self._local_width(split) * self.size

    def embeddings(self) -> Calls:
        """Yields the collectives of embeddings: sums over x, and gathers over y if the stream is whole over y."""
        for name in self.pairing.embeddings:
            for layer in self.profile.layer_calls.get(name, ()):
                forwards = self._results(name, layer)
                whole = layer.rows * layer.out_features * self.size
                operation = "reduce_scatter" if name == self.ends.embedding else "all_reduce"
                if self.x > 1:
                    yield from [(("x", operation), whole // self.y)] * forwards
                if self.y > 1 and self.pairing.is_whole:
                    yield from [(("y", "all_gather"), whole)] * forwards

    def norms(self) -> Calls:
        """Yields the all-reduces of norms' moments over y, forward and backward."""
        assert self.profile.model is not None
        if self.y == 1 or self.pairing.is_whole:
            return
        for name, calls in self.profile.layer_calls.items():
            module = self.profile.model.get_submodule(name)
            if not is_norm(module) or f"{name}.weight" in self.pairing.inner:
                continue
            over = self.x if self.sequence and (self._in_block(name) or name == self.ends.norm) else 1
            for layer in calls:
                times = self._forwards(name, layer) + layer.needs_gradient
                one = (("y", "all_reduce"), layer.rows // over * max(4, self.size))
                yield from [one] * times * (2 if isinstance(module, nn.LayerNorm) else 1)

    def sequence_ends(self) -> Calls:
        """Yields the gather after the last block, unless the head does it, and that of gradients before the first."""
        if not self.sequence or not self.pairing.blocks:  # the condition for `SequenceSplitter.attach`
            return
        whole = self.profile.stream_numel // (1 if self.pairing.is_whole else self.y) * self.size
        num_gathers = (self.ends.head is None) + self.blocks[self.pairing.blocks[0]].needs_gradient
        yield from [(("x", "all_gather"), whole)] * num_gathers

    def _in_chunks(self, operation: str, whole: int, times: int) -> Calls:
        chunks = self.plan.tensor.chunks
        yield from [(("x", operation), whole // chunks)] * chunks * times

    def _local_width(self, split: Split) -> int:
        return sum(end - begin for begin, end in split.over_x(self.x, self.x_index))

    def _in_block(self, name: str) -> bool:
        return self.pairing.block_of(name) is not None

    def _trains(self, module: str) -> bool:
        return f"{module}.weight" not in self.frozen

    def _has_backward(self, split: Split, layer: LayerShape) -> bool:
        """Does the layer's result require a gradient?"""
        return layer.needs_gradient or (layer.in_backward and self._trains(split.module))

    def _over_sequence(self, name: str) -> int:
        """Returns over how many ranks of x the stream around a layer is split along the sequence."""
        return self.x if self.sequence and self._in_block(name) else 1

    def _results(self, name: str, layer: LayerShape) -> int:
        """Returns how often a call's result is communicated. Recompute stops at the last saved tensor of a block."""
        return 1 if layer.is_last else self._forwards(name, layer)

    def _forwards(self, name: str, layer: LayerShape) -> int:
        """Returns how often the forward of one call runs in a micro-batch."""
        block = self.pairing.block_of(name)
        if layer.is_last and not layer.in_backward:  # neither it nor what follows in its block is computed again
            return 1
        is_again = block is not None and self.plan.memory.repeats_collectives and self.blocks[block].in_backward
        return 2 if is_again else 1


# --- a rank's part of the profile


def localise(profile: Profile, plan: Plan, coordinates: Mapping[str, int]) -> Profile:
    """Returns the profile of the rank at `coordinates` of x and y: its parameters, FLOPs and saved bytes."""
    if plan.tensor.x == plan.tensor.y == 1:
        return profile
    before = {parameter.name: parameter.cut for block in profile.all for parameter in block.parameters}
    shapes = {
        parameter.name: parameter.cut.shape if parameter.cut else parameter.shape
        for block in profile.all
        for parameter in block.parameters
    }
    cuts = parameter_cuts(profile.pairing, shapes, plan, coordinates)
    cuts = {name: cut.beside(before[name]) for name, cut in cuts.items()}
    stream = _LocalCounts(profile, plan)

    return replace(cut_profile(profile, cuts, stream.local), shares=_shares(profile, plan, stream.over(True)))


def assumptions(profile: Profile, plan: Plan) -> tuple[str, ...]:
    """Returns, as sentences, what `localise` assumes because it could not be measured."""
    if plan.tensor.x == plan.tensor.y == 1 or profile.model is None:
        return ()
    return _LocalCounts(profile, plan).assumptions()


def _shares(profile: Profile, plan: Plan, over: int) -> BackwardShares:
    """Returns a rank's shares of backward's memory. With split classes the loss has one gradient buffer, not two."""
    x, (inner, outer, head, loss) = plan.tensor.x, profile.shares
    if not any(split.kind == "head" for split in profile.pairing.splits.values()):
        return BackwardShares(inner / x, outer / over, head, loss)
    narrow = COMPUTE_DTYPE[plan.precision].itemsize
    wide = max(4, narrow)
    loss *= (wide + (narrow if narrow < wide else 0)) / (2 * wide) if x > 1 else 1.0
    return BackwardShares(inner / x, outer / over, head / x, loss / x)


def transient_bytes(profile: Profile, plan: Plan) -> int:
    """Returns the temporary bytes of a row's backward with `sequence`; 0 without.

    These are the gradient of its output, gathered and this rank's part, and its input in pieces.
    """
    if not plan.tensor.sequence or plan.tensor.x == 1:
        return 0
    size, x = COMPUTE_DTYPE[plan.precision].itemsize, plan.tensor.x
    rows = [
        profile.layers[split.module]
        for split in profile.pairing.splits.values()
        if split.kind == "row" and split.module in profile.layers
    ]
    inputs = max((layer.in_rows * layer.in_features for layer in rows), default=0) // x
    stream = profile.stream_numel // (1 if profile.pairing.is_whole else plan.tensor.y)
    return (stream + stream // x + inputs) * size


class _LocalCounts:
    """Computes a rank's FLOPs and saved bytes of a block, from how much of the block is residual stream."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self.profile, self.pairing, self.plan = profile, profile.pairing, plan
        self.x, self.y = plan.tensor.x, plan.tensor.y
        self.dtype = COMPUTE_DTYPE[plan.precision]
        self.ends = ends_of(self.pairing, plan)
        self.norms = NormMemory(profile, self.dtype, self.y > 1 and not self.pairing.is_whole)

    def local(self, block: Block) -> Block:
        """Returns the block with a rank's FLOPs and saved bytes."""
        attention = block.attention_flops // self.x
        flops = (block.flops - block.attention_flops) // (self.x * self.y) + attention
        backward = block.backward_flops * flops // max(1, block.flops)  # in proportion
        block = replace(block, flops=flops, attention_flops=attention, backward_flops=backward)
        if block.saved_bytes is None:
            return block
        if self._is_around_convolutions(block):
            return replace(block, saved_bytes=self._around_convolutions(block))
        over = self.over(bool(block.name) or self.ends.head is not None)
        inputs, outputs = self._inputs(block.name), self._outputs(block.name)
        norms = local_norms = 0
        if self._has_norms(block):
            norms, local_norms = (self._norms(block.name, is_local) for is_local in (False, True))
        none, selective, full = (block.saved_bytes[kind] for kind in ("none", "selective", "full"))
        inside = min(max(0, none - norms - inputs), self._behind_columns(block))
        beside = max(0, none - norms - inputs - inside)  # on the stream: masks of dropout, inputs of compiled norms
        parts = self.x if self.plan.tensor.sequence and self.plan.tensor.regather else 1
        saved = {"none": inside // self.x + beside // over + local_norms + inputs // (self.y * parts)}
        if block.name:
            inside = max(0, selective - full - outputs)
            saved |= {"selective": full // over + outputs // self.y + inside // self.x, "full": full // over}
        else:
            saved |= {"selective": saved["none"], "full": saved["none"]}  # the root is not recomputed
        return replace(block, saved_bytes=saved)

    def assumptions(self) -> tuple[str, ...]:
        """Returns sentences about norms whose bytes on a rank could not be measured."""
        counted = [block for block in self.profile.all if block.saved_bytes is not None and self._has_norms(block)]
        return self.norms.assumed(block.name for block in counted if not self._is_around_convolutions(block))

    def _has_norms(self, block: Block) -> bool:
        """Are the block's norms counted apart? Compiled norms save their input, which is the stream."""
        return block.backward_bytes is None

    def _is_around_convolutions(self, block: Block) -> bool:
        is_spatial = not block.name or any(split.num_spatial for split in self._splits(block.name))
        return self.pairing.is_whole and is_spatial

    def _behind_columns(self, block: Block) -> int:
        """Returns the bytes saved inside of regions: after columns and the head, not after rows and gathered layers."""
        behind, none = block.saved_by_layer.get("none", {}), (block.saved_bytes or {}).get("none", 0)
        regions = [name for name, split in self.pairing.splits.items() if split.kind in ("column", "head")]
        outside = sum(size for name, size in behind.items() if name not in regions)
        return none - outside * none // max(1, sum(behind.values()))

    def _around_convolutions(self, block: Block) -> dict[str, int]:
        inside = [split.module for split in self.pairing.splits.values() if split.kind in ("column", "head")]
        assert block.saved_bytes is not None
        saved = {}
        for kind, num_bytes in block.saved_bytes.items():
            in_regions = sum(block.saved_by_layer[kind].get(name, 0) for name in inside)
            saved[kind] = num_bytes - in_regions + in_regions // self.x
        if self.y > 1:  # this rank's part of each input is saved, and the whole input if other layers save it, too
            saved["none"] += sum(self._change_over_y(split) for split in self._splits(block.name))
        if block.name:  # selective recompute saves results before they are summed or gathered
            outputs = self._outputs(block.name)
            kept = max(0, block.saved_bytes["selective"] - block.saved_bytes["full"] - outputs)
            return saved | {"selective": saved["full"] + outputs // self.y + kept // self.x}
        return dict.fromkeys(saved, saved["none"])  # the root is not recomputed

    def _change_over_y(self, split: Split) -> int:
        layer = self.profile.layers[split.module]
        if split.kind == "row" or layer.in_features % self.y:  # an uneven part is a view of the whole
            return 0
        if layer.saved_bytes:
            return layer.saved_bytes // self.y - layer.saved_bytes
        return layer.in_rows * layer.in_features * self.dtype.itemsize // self.y

    def _inputs(self, block: str) -> int:
        """Returns the bytes of the inputs of regions; several columns with the same input count once."""
        entered = {split.parent or split.module: split for split in self._splits(block) if split.kind != "row"}
        layers = [self.profile.layers[split.module] for split in entered.values()]
        return sum(layer.in_rows * layer.in_features for layer in layers) * self.dtype.itemsize

    def _outputs(self, block: str) -> int:
        """Returns the bytes of the rows' results before they are summed, which selective recompute saves."""
        layers = [self.profile.layers[split.module] for split in self._splits(block) if split.kind == "row"]
        return sum(layer.rows * layer.out_features for layer in layers) * self.dtype.itemsize

    def over(self, is_split: bool) -> int:
        """Returns over how many ranks the stream is split; `is_split`: here `sequence` splits it, too."""
        over_y = 1 if self.pairing.is_whole else self.y
        return over_y * (self.x if self.plan.tensor.sequence and is_split else 1)

    def _norms(self, block: str, is_local: bool) -> int:
        total = 0
        for name, layer in self.norms.norms_of(block):
            over = self.over(bool(block) or name == self.ends.norm) if is_local else 1
            total += self.norms.whole_bytes(name, layer, is_local) // over
        return total

    def _splits(self, block: str) -> Iterator[Split]:
        """Yields the splits of layers of a block ("" for the root) that its forward calls."""
        called = (split for split in self.pairing.splits.values() if split.module in self.profile.layers)
        return (split for split in called if (self.pairing.block_of(split.module) or "") == block)
