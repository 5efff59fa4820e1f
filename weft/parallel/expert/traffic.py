"""The collectives of layers of experts and their routers in one micro-batch, which the ledger of a run must equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weft.comm.ledger import Key
from weft.models.router import Router
from weft.parallel.expert.layers import expert_axis, expert_degree, expert_layers, row_parts
from weft.plan import Plan
from weft.profiling import Block, Profile
from weft.profiling.structure import PER_TOKEN_NAMES
from weft.sharding.layout import COMPUTE_DTYPE

COUNT_BYTES = 8  # of the number of rows for one expert
GATHER_KEY: Key = ("x", "all_gather")
ROWS_KEY: Key = ("y", "all_to_all")  # features of rows for whole rows
SCORES_KEY: Key = ("y", "all_reduce")


@dataclass(frozen=True)
class ExpertTraffic:
    """The collectives of one layer in one micro-batch, in which the model calls it `num_calls` times.

    In each call a rank's experts are sent `num_rows` rows of `row_bytes`.
    `key` is the all-to-all of rows, over `num_ranks` ranks. `is_even`: all experts have equally many rows, so no counts
    are sent. Forward runs `num_forwards` times. `has_row_gradient`, `has_result_gradient`: gradients of the rows, and
    of the experts' results, are sent in backward. `over_x`, `over_y`: into how many parts ranks of x and y split their
    rows before. `score_bytes` and `weight_bytes` are those of the router's logits, and of the weights of the chosen
    experts, of all tokens.
    """

    name: str
    num_calls: int
    key: Key
    num_ranks: int
    num_experts: int
    is_even: bool
    num_rows: int
    row_bytes: int
    num_forwards: int
    has_row_gradient: bool
    has_result_gradient: bool
    over_x: int
    over_y: int
    score_bytes: int
    weight_bytes: int

    def calls(self, num_arrived: int) -> list[tuple[Key, int]]:
        """Returns each collective with its bytes, if `num_arrived` rows arrive at this rank in each call."""
        return [*self._of_one_call(num_arrived)] * self.num_calls

    def _of_one_call(self, num_arrived: int) -> Iterator[tuple[Key, int]]:
        if self.num_ranks > 1:
            if not self.is_even:
                yield from [(self.key, COUNT_BYTES * self.num_experts)] * self.num_forwards
            yield from [(self.key, self.num_rows * self.row_bytes)] * (self.num_forwards + self.has_result_gradient)
            yield from [(self.key, num_arrived * self.row_bytes)] * self.num_sends_of_arrived
        if self.over_y > 1:
            both = 2 * self.num_forwards + self.has_row_gradient + self.has_result_gradient
            yield from [(ROWS_KEY, self.num_rows * self.row_bytes)] * both
            yield from [(SCORES_KEY, self.score_bytes)] * self.num_forwards
            yield from [(SCORES_KEY, self.weight_bytes)] * bool(self.weight_bytes)
        if self.over_x > 1:
            yield from [(GATHER_KEY, self.over_x * self.num_rows * self.row_bytes)] * self.num_sends_of_arrived

    @property
    def num_sends_of_arrived(self) -> int:
        """How often as many rows are sent as arrived: the results, and the gradients of the rows."""
        return self.num_forwards + self.has_row_gradient


def layer_traffics(profile: Profile, plan: Plan) -> Iterator[ExpertTraffic]:
    """Yields the traffic of every layer of experts in a rank's profile of one micro-batch."""
    assert profile.model is not None
    layers = expert_layers(profile.model)
    over_x, over_y = row_parts(plan)
    size = COMPUTE_DTYPE[plan.precision].itemsize
    for block in profile.blocks:
        for experts in block.experts:
            if experts.name not in layers or experts.per_token is None:
                continue
            hidden = _hidden_size(block, experts.name)
            tokens = profile.stream_numel // hidden // (plan.tensor.x if plan.tensor.sequence else 1)
            batch = profile.stream_shape[0] if profile.stream_shape else 1
            is_again = plan.memory.repeats_collectives and block.in_backward
            has_row_gradient = block.in_backward and _is_differentiated(profile, block, experts.name)
            router = f"{experts.name.rpartition('.')[0]}.gate"
            has_router = isinstance(profile.model.get_submodule(router), Router) if over_y > 1 else False
            has_weight_gradient = has_row_gradient or (block.in_backward and _is_trained(block, f"{router}."))
            yield ExpertTraffic(
                experts.name,
                block.calls,
                (expert_axis(plan, experts.num_experts), "all_to_all"),
                expert_degree(plan, experts.num_experts) or 1,
                experts.num_experts,
                experts.capacity is not None,
                experts.num_rows(batch, tokens // batch) // (over_x * over_y),
                hidden * size,
                2 if is_again else 1,
                has_row_gradient,
                has_row_gradient or (block.in_backward and _is_trained(block, f"{experts.name}.")),
                over_x,
                over_y,
                tokens * experts.num_experts * max(4, size) * has_router,
                tokens * experts.per_token * max(4, size) * has_router * has_weight_gradient,
            )


def refuse_uncounted(profile: Profile, layers: Iterable[str]) -> str | None:
    """Returns why the rows that a layer of experts sends cannot be counted before a run; None if all can be."""
    known = {
        experts.name: experts
        for block in profile.blocks
        for experts in block.experts
        if any(parameter.name.startswith(f"{experts.name}.") for parameter in block.parameters)
    }
    for name in layers:
        if name not in known:
            return (
                f"weft counts the rows of experts that lie in one block of the model and whose name has 'expert' and "
                f"not 'shared' in it, and '{name}' is not such a layer; name it 'experts', inside a block"
            )
        if known[name].per_token is None:
            return (
                f"neither '{name}', nor the module around it or the modules beside it, nor the model's config says to "
                f"how many experts a token goes; set one of {', '.join(PER_TOKEN_NAMES)} there, to a whole number"
            )
    return None


def _hidden_size(block: Block, name: str) -> int:
    """Returns the features of a token in the layer of experts: those of the results of `down_proj`."""
    return next(p.shape[1] for p in block.parameters if p.name == f"{name}.down_proj")


def _is_differentiated(profile: Profile, block: Block, name: str) -> bool:
    """Do the tokens that enter the layer require gradients? Some parameter before it, or the block's input, does."""
    parent = f"{name.rpartition('.')[0]}."
    before = [p.trainable for p in block.parameters if not p.name.startswith(parent)]
    layers = (layer.needs_gradient for key, layer in profile.layers.items() if key.startswith(f"{block.name}."))
    return any(before) or next(layers, True)


def _is_trained(block: Block, inside: str) -> bool:
    return any(p.trainable for p in block.parameters if p.name.startswith(inside))
