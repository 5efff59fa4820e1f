"""K-FAC: gradients of linears and convolutions times inverses of Kronecker factors (Martens and Grosse 2015).

For a layer with rows of inputs a and gradients of outputs g, of M targets:

    A = mean of a aᵀ over rows      G = sum of g gᵀ / M, where g is the gradient of a loss summed over targets
    update = G⁻¹ · gradient · A⁻¹, with damping (`kfac_sub_grid.py`), then momentum

g is taken from the same backward as the gradient, with the true labels, so G is the empirical Fisher matrix. A training
loss is a mean, so what backward gives is scaled: `_fold` has the factor. All other parameters have AdamW's update.

Factors are sums over all ranks of `data` and `shard` (`kfac_ranks.py`). With `inline` each rank inverts all of them.
With `owner-sharded` each layer has an owner, which alone keeps and inverts its factors (`kfac_placement.py`). With
`sub-grid` ranks that do not train invert them (`kfac_sub_grid.py`). All give the same updates. `sub-grid-async` does
not wait for these ranks: it uses inverses some updates late, and is another optimizer.

With `shard` stage 1, whole gradients are gathered (`kfac_ranks.py`), and a rank keeps momentum and AdamW's moments
of its slices alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.errors import PlanError
from weft.optim.kfac_layers import KfacLayer, find_layers
from weft.optim.kfac_placement import NUM_ROWS, NUM_STATISTICS, make_slots, owners_of, slot_views
from weft.optim.kfac_ranks import BatchRanks, WholeGradients, refuse_buffers
from weft.optim.kfac_sub_grid import SubGrid, write_inverses
from weft.optim.update import apply_fused_update
from weft.parallel.model_state import all_flats, named_pieces
from weft.run_tables import Kfac

logger = logging.getLogger("weft")
MOMENTUM = "kfac_momentum"
# Kinds of a layer's own state in a checkpoint, under the name of its weight.
FACTORS, INVERSES = ("kfac_input", "kfac_output"), ("kfac_input_inverse", "kfac_output_inverse")
ReadState = Callable[[str, str], Tensor | None]  # the whole of a state by the name of its parameter and its kind


@dataclass
class _LayerState:
    """A layer's factors (None on ranks that do not keep them), inverses, and sums of the step that is sampled."""

    layer: KfacLayer
    factors: tuple[Tensor, Tensor] | None
    inverses: tuple[Tensor, Tensor]
    num_rows: int = 0


class KFAC(Optimizer):
    """K-FAC over a model that `weft.parallelize` has split over `data` and `shard` stage 1, or that one rank holds.

    Call `begin(num_targets)` before the forwards of each step, with the number of targets of all ranks. The loss of a
    rank is a mean over its share of them. `groups` are those of AdamW, for all trained parameters; those of K-FAC's
    layers are taken out of them, with their weight decay.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: BatchRanks,
        options: Kfac,
        groups: Sequence[Mapping[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        refuse_buffers(model)
        self.ranks, self.options, self.num_updates = ranks, options, 0
        trained = [(part, piece) for part, piece in named_pieces(model) if piece.requires_grad]
        self._pieces = {part.parameter.name: piece for part, piece in trained}
        self._intervals = {id(piece): (part.start, part.stop) for part, piece in trained}
        flats = [flat for flat in all_flats(model) if flat.trainable]
        names = {one.name for flat in flats for one in flat.layout.parameters} or self._pieces.keys()
        layers = find_layers(model, names, options.exclude, options.max_size)
        if not layers:
            raise PlanError(
                "train.kfac: the model has no trained linear or convolution that K-FAC takes (within max_size, not in "
                "exclude, called by its own forward); leave train.kfac out"
            )
        own_names = [name for layer in layers for name in layer.parameter_names]
        own = {id(self._pieces[name]) for name in own_names if name in self._pieces}
        nothing = {"params": [torch.zeros(0, requires_grad=True)]}  # a slice may be padding alone
        super().__init__(_split_groups(groups, own, options) or [nothing], {"lr": lr, "betas": betas, "eps": eps})
        self._gradients = WholeGradients(model, own_names, self._pieces)
        self._like = (flats[0].slice if flats else self._pieces[own_names[0]]).detach()[:0]
        self.owners = owners_of(layers, ranks.degree)
        is_sharded = options.mode == "owner-sharded"
        self.states = [
            self._initial(layer, not is_sharded or owner == ranks.index)
            for layer, owner in zip(layers, self.owners, strict=True)
        ]
        owners, degree = (self.owners, ranks.degree) if is_sharded else ([0] * len(layers), 1)
        self._sum_slots = make_slots(layers, owners, degree, NUM_ROWS)
        self._inverse_slots = make_slots(layers, owners, degree, NUM_STATISTICS)
        self._sums: Tensor | None = None
        self._num_targets: Tensor | None = None
        self._statistics: Tensor | None = None  # [layers, NUM_STATISTICS], of the last renewal
        self._of_update = self._used_at_update = 0  # of the last renewal: whose factors, and from which update on
        self.sub_grid: SubGrid | None = None
        if options.mode in ("sub-grid", "sub-grid-async"):
            self.sub_grid = SubGrid(layers, ranks, options.damping, options.mode == "sub-grid", self._like)
        for piece in self._pieces.values():
            self.state[piece] = _piece_state(piece, id(piece) in own)
        for index, layer in enumerate(layers):
            layer.module.register_forward_hook(partial(self._capture, index), with_kwargs=True)

    # --- a step

    def begin(self, num_targets: Tensor) -> None:
        """Start a step. Its forwards and backwards are sampled if factors are due."""
        self._num_targets, self._sums = num_targets, None
        if self.num_updates % self.options.factor_every == 0:
            self._sums = self._like.new_zeros(self._sum_slots.numel)
            for one in self.states:
                one.num_rows = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient. All ranks must call it."""
        if closure is not None:
            raise PlanError("K-FAC samples one backward, and a closure may make several; call step() without one")
        if self._num_targets is None:
            raise PlanError("KFAC.begin(num_targets) was not called before this step's forward")
        self._take_answer(waits=False)
        if self._sums is not None:
            self._fold(self._sums, self._num_targets)
            if self.num_updates % self.options.inverse_every == 0:
                self._renew()
        self._update_layers()
        for group in self.param_groups:
            if MOMENTUM not in group:
                for piece in group["params"]:
                    self._update_adamw(piece, group)
        self.num_updates += 1
        self.end()
        return None

    def end(self) -> None:
        """End a step, also one without an update."""
        self._num_targets = self._sums = None

    def _update_layers(self) -> None:
        """Precondition gradients and update the parameters of all layers."""
        changes, product = dict[int, Tensor](), torch.zeros((), dtype=torch.float64)
        gradients = self._gradients.read()
        for one in self.states:
            layer = one.layer
            if not gradients.keys() >= set(layer.parameter_names):
                continue
            matrix = layer.to_matrix(gradients)
            changed = one.inverses[1] @ matrix @ one.inverses[0]
            product = product.to(matrix.device) + (changed * matrix).sum().double()
            for name, value in layer.from_matrix(changed).items():
                if name in self._pieces:
                    piece = self._pieces[name]
                    changes[id(piece)] = value[slice(*self._intervals[id(piece)])]
        for group in self.param_groups:
            if MOMENTUM not in group:
                continue
            # The predicted change of the model's distribution is limited: lr² · update · gradient <= kl_clip.
            limit = self.options.kl_clip / (group["lr"] ** 2 * product).clamp(min=1e-300)
            factor = limit.sqrt().clamp(max=1.0)
            for piece in group["params"]:
                if id(piece) in changes:
                    state, change = self.state[piece], changes[id(piece)]
                    state["step"] += 1
                    state[MOMENTUM].mul_(group[MOMENTUM]).add_(change.view(piece.shape) * factor.to(change))
                    piece.mul_(1 - group["lr"] * group["weight_decay"]).sub_(state[MOMENTUM], alpha=group["lr"])

    def _update_adamw(self, piece: nn.Parameter, group: Mapping[str, Any]) -> None:
        if piece.grad is not None:
            state = self.state[piece]
            state["step"] += 1
            apply_fused_update(state["step"], group, piece, piece.grad, None, (state["exp_avg"], state["exp_avg_sq"]))

    # --- factors

    def _capture(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        """A forward hook: the sums grow when backward brings the gradient of the output."""
        if self._sums is not None and torch.is_grad_enabled() and module.training and output.requires_grad:
            given = args[0] if args else kwargs["input"]
            output.register_hook(partial(self._add, index, given.detach()))

    @torch.no_grad()
    def _add(self, index: int, given: Tensor, gradient: Tensor) -> None:
        if self._sums is None:
            return
        one, dtype = self.states[index], self._sums.dtype
        first, second, num_rows = self._sum_views(self._sums, index)
        rows = one.layer.input_rows(given.to(dtype))
        first.add_(rows.mT @ rows)
        one.num_rows += rows.shape[1]
        num_rows += rows.shape[1]
        rows = one.layer.output_rows(gradient.to(dtype))
        second.add_(rows.mT @ rows)

    def _sum_views(self, sums: Tensor, index: int, base: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a layer's places in a message of sums that begins at element `base` of the whole: Σ a aᵀ, Σ g gᵀ,
        rows.
        """
        return slot_views(sums, self._sum_slots.starts[index] - base, self.states[index].layer, NUM_ROWS)

    def _fold(self, sums: Tensor, num_targets: Tensor) -> None:
        """Sum over ranks, and add to the running averages that this rank keeps.

        A rank's loss is a mean over M / D targets, with M of all D ranks, so its g is D / M times that of a sum.
        """
        for one in self.states:
            if one.num_rows == 0:
                raise PlanError(
                    f"K-FAC saw no input of layer '{one.layer.name}': the model does not call it as a module in "
                    f"training; add its name to train.kfac.exclude"
                )
        base = 0
        if self.options.mode != "owner-sharded":
            self.ranks.sum(sums)
        else:
            sums, base = self.ranks.scatter(sums), self.ranks.index * self._sum_slots.part_numel
        number = self.num_updates // self.options.factor_every + 1
        keep = min(self.options.decay, 1 - 1 / number)  # the first sample is the average
        scale = (num_targets.double() / self.ranks.degree**2).to(sums)
        for index, one in enumerate(self.states):
            if one.factors is not None:
                first, second, num_rows = self._sum_views(sums, index, base)
                one.factors[0].mul_(keep).add_(first / num_rows, alpha=1 - keep)
                one.factors[1].mul_(keep).add_(second * scale, alpha=1 - keep)

    def _renew(self) -> None:
        """Invert the factors that this rank keeps and give the inverses to all ranks, or have them inverted."""
        if self.sub_grid is not None:
            self.sub_grid.ask(self.num_updates, [one.factors for one in self.states if one.factors is not None])
            if self.sub_grid.waits:
                self._take_answer(waits=True)
            elif self.num_updates == 0 and self.ranks.index == 0:
                logger.warning("weft: K-FAC does not precondition until the first inverses arrive (sub-grid-async)")
            return
        slots, is_sharded = self._inverse_slots, self.options.mode == "owner-sharded"
        part = self._like.new_zeros(slots.part_numel)
        base = self.ranks.index * slots.part_numel if is_sharded else 0
        for start, one in zip(slots.starts, self.states, strict=True):
            if one.factors is not None:
                views = slot_views(part, start - base, one.layer, NUM_STATISTICS)
                write_inverses(views, one.factors, self.options.damping)
        self._use(self.ranks.gather(part) if is_sharded else part, self.num_updates)

    def _take_answer(self, waits: bool) -> None:
        """Use the inverses that curvature ranks have computed, if there are any, or after a wait."""
        found = None if self.sub_grid is None else self.sub_grid.take(waits)
        if found is not None:
            self._use(found[1], found[0])

    def synchronize(self) -> None:
        """Wait for outstanding inverses. All ranks must call it."""
        self._take_answer(waits=True)

    def _use(self, whole: Tensor, of_update: int) -> None:
        """Use the inverses of a message, which are those of an update's factors, from the next update on."""
        found = [
            slot_views(whole, start, one.layer, NUM_STATISTICS)
            for start, one in zip(self._inverse_slots.starts, self.states, strict=True)
        ]
        self._statistics = torch.stack([statistics for _, _, statistics in found]).double().cpu()
        self._of_update, self._used_at_update = of_update, self.num_updates
        for one, (first, second, _), used in zip(self.states, found, self._statistics[:, 2].tolist(), strict=True):
            if math.isfinite(used):
                one.inverses[0].copy_(first)
                one.inverses[1].copy_(second)
            elif self.ranks.index == 0:
                logger.warning("weft: the factors of '%s' have no inverse; its last one stays", one.layer.name)

    def take_statistics(self) -> dict[str, float] | None:
        """Returns statistics of all layers at a renewal since the last call, equal on all ranks; None if there was
        none.

        `input` and `output` are mean diagonals of A and G over layers, `damping` the largest that was used, `retried`
        the number of layers that needed more than the given one, and `kept` those that have no new inverse. Updates
        are counted from 0: the factors are those of `of_update`, and the first update with these inverses is
        `used_at_update`. `skipped` is the number of renewals so far that were due while another was outstanding.
        """
        if self._statistics is None:
            return None
        (first, second, used), self._statistics = self._statistics.unbind(1), None
        fresh = used[used.isfinite()]
        return {
            "input": float(first.mean()),
            "output": float(second.mean()),
            "damping": float(fresh.max()) if len(fresh) else 0.0,
            "retried": int((fresh > 2 * self.options.damping).sum()),
            "kept": len(used) - len(fresh),
            "of_update": self._of_update,
            "used_at_update": self._used_at_update,
            "skipped": 0 if self.sub_grid is None else self.sub_grid.num_skipped,
        }

    # --- its state in checkpoints

    def _initial(self, layer: KfacLayer, keeps: bool) -> _LayerState:
        like = self._like

        def identity(shape: tuple[int, int, int]) -> Tensor:
            return torch.eye(shape[1], dtype=like.dtype, device=like.device).expand(shape).clone()

        shapes = layer.input_shape, layer.output_shape
        factors = (like.new_zeros(shapes[0]), like.new_zeros(shapes[1])) if keeps else None
        return _LayerState(layer, factors, (identity(shapes[0]), identity(shapes[1])))

    @property
    def beside(self) -> dict[str, list[Tensor]]:
        """Its tensors on the device beside `state`: factors and inverses."""
        held = [tensor for one in self.states for tensor in (*(one.factors or ()), *one.inverses)]
        return {"optimizer": held}

    def layer_state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yields the factors and inverses of the layers that this rank owns: the name of the weight, kind and value."""
        for one, owner in zip(self.states, self.owners, strict=True):
            if owner == self.ranks.index:
                assert one.factors is not None
                for kind, value in zip((*FACTORS, *INVERSES), (*one.factors, *one.inverses), strict=True):
                    yield one.layer.weight_name, kind, value

    @torch.no_grad()
    def write_piece(self, piece: nn.Parameter, state: Mapping[str, Tensor]) -> bool:
        """Set a piece's state. What is missing begins anew: returns False then."""
        fresh = _piece_state(piece, MOMENTUM in self.state[piece])
        for kind, value in fresh.items():
            self.state[piece][kind].copy_(state.get(kind, value).view(value.shape))
        return state.keys() >= fresh.keys() or not state

    @torch.no_grad()
    def write_layers(self, read: ReadState) -> bool:
        """Set the state of all layers, after that of all pieces. `read` returns a whole tensor by the name of a weight
        and its kind, or None. What is missing begins anew, and with it all intervals: returns False then.
        """
        counts, is_whole = list[int](), True
        for one in self.states:
            name, fresh = one.layer.weight_name, self._initial(one.layer, one.factors is not None)
            values = {kind: read(name, kind) for kind in (*FACTORS, *INVERSES)}
            count = read(name, "step")
            has_layer = count is not None and all(value is not None for value in values.values())
            is_whole &= has_layer or count is None  # there is no count before the first update
            pairs = [*zip(INVERSES, one.inverses, fresh.inverses, strict=True)]
            if one.factors is not None and fresh.factors is not None:
                pairs += zip(FACTORS, one.factors, fresh.factors, strict=True)
            for kind, own, initial in pairs:
                value = values[kind]
                own.copy_(value if has_layer and value is not None else initial)
            if not has_layer and name in self._pieces:
                self.state[self._pieces[name]]["step"].zero_()
            counts.append(int(count) if has_layer and count is not None else 0)
        self.num_updates = min(counts)
        return is_whole


def _split_groups(groups: Sequence[Mapping[str, Any]], own: set[int], options: Kfac) -> list[dict[str, Any]]:
    """AdamW's groups, each without the pieces of `own`, which follow in a group of K-FAC."""
    found: list[dict[str, Any]] = []
    for group in groups:
        parts = [[one for one in group["params"] if (id(one) in own) == is_own] for is_own in (False, True)]
        mine = {"lr": options.learning_rate, "peak": options.learning_rate, MOMENTUM: options.momentum}
        found += [{**group, "params": parts[0]}] * bool(parts[0])
        found += [{**group, **mine, "params": parts[1]}] * bool(parts[1])
    return found


def _piece_state(piece: nn.Parameter, is_own: bool) -> dict[str, Tensor]:
    """Returns the state of a piece before its first update: the number of updates, and K-FAC's momentum or AdamW's
    moments.
    """
    kinds = (MOMENTUM,) if is_own else ("exp_avg", "exp_avg_sq")
    step = torch.zeros((), dtype=torch.float32, device=piece.device)
    return {"step": step, **{kind: torch.zeros_like(piece, requires_grad=False) for kind in kinds}}
