"""The collectives of layers of experts and their routers in one micro-batch, which the ledger of a run must equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from weft.comm.ledger import Key
from weft.models.experts import StackedExperts
from weft.models.router import Router
from weft.parallel.expert.layers import expert_axis, expert_degree, expert_layers, row_parts
from weft.plan import Plan
from weft.profiling import Block, ExpertCall, Experts, Profile
from weft.profiling.structure import PER_TOKEN_NAMES
from weft.sharding.layout import COMPUTE_DTYPE

COUNT_BYTES = 8  # of the number of rows for one expert
GATHER_KEY: Key = ("x", "all_gather")
ROWS_KEY: Key = ("y", "all_to_all")  # features of rows for whole rows
SCORES_KEY: Key = ("y", "all_reduce")


@dataclass(frozen=True)
class ExpertTraffic:
    """The collectives of one call of a layer of experts in a micro-batch. A rank sends `num_rows` rows of `row_bytes`.

    Rows go by the all-to-all `key` over `num_ranks` ranks. `is_even`: all experts have equally many rows, so no counts
    are sent. Forward runs `num_forwards` times. `has_row_gradient`, `has_result_gradient`: are gradients of the rows,
    and of the experts' results, sent in backward? `over_x`, `over_y`: into how many parts ranks of x and y divide their
    rows before. `score_bytes` and `weight_bytes`: bytes of the router's logits, and of the weights of the chosen
    experts, for all tokens.
    """

    name: str
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

    def collectives(self, num_arrived: int) -> Iterator[tuple[Key, int]]:
        """Yields each collective with its bytes, if `num_arrived` rows arrive at this rank."""
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
    """Yields the traffic of every call of every layer of experts in a rank's profile of one micro-batch."""
    assert profile.model is not None
    layers = expert_layers(profile.model)
    for block in profile.blocks:
        for experts in block.experts:
            if experts.name in layers and experts.per_token is not None:
                is_sorted = isinstance(layers[experts.name], StackedExperts)
                for call in profile.expert_calls.get(experts.name, ()):
                    num_rows = call.num_rows * (1 if is_sorted else experts.per_token)
                    yield _traffic_of(profile, plan, block, experts, replace(call, num_rows=num_rows))


def _traffic_of(profile: Profile, plan: Plan, block: Block, experts: Experts, call: ExpertCall) -> ExpertTraffic:
    """Returns the traffic of a call in which the experts of the whole model compute `call.num_rows` rows."""
    assert profile.model is not None and experts.per_token is not None  # noqa: PT018
    over_x, over_y = row_parts(plan)
    size, hidden = COMPUTE_DTYPE[plan.precision].itemsize, _hidden_size(block, experts.name)
    num_rows = call.num_rows // (plan.context.degree * (plan.tensor.x if plan.tensor.sequence else 1))
    # With a capacity, the rows do not say how many tokens there are.
    tokens = num_rows // experts.per_token if experts.capacity is None else profile.stream_numel // hidden
    is_again = plan.memory.repeats_collectives and block.in_backward and not call.is_last
    router = f"{experts.name.rpartition('.')[0]}.gate"
    has_router = isinstance(profile.model.get_submodule(router), Router) if over_y > 1 else False
    has_weight_gradient = call.needs_gradient or (call.in_backward and _is_trained(block, f"{router}."))
    return ExpertTraffic(
        experts.name,
        (expert_axis(plan, experts.num_experts), "all_to_all"),
        expert_degree(plan, experts.num_experts) or 1,
        experts.num_experts,
        experts.capacity is not None,
        num_rows // (over_x * over_y),
        hidden * size,
        2 if is_again else 1,
        call.needs_gradient,
        call.needs_gradient or (call.in_backward and _is_trained(block, f"{experts.name}.")),
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


def _is_trained(block: Block, inside: str) -> bool:
    return any(p.trainable for p in block.parameters if p.name.startswith(inside))
