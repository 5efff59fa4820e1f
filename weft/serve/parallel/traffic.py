"""The collectives of a step of a served model on one rank: which, over which axis, with how many bytes.

They are those that `serve/model/linear.py`, `serve/attention/attend.py` and `serve/model/ranks.py` make;
the inputs of steps, which are small, are not among them. `weft plan --serve` times them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.architectures import DecoderConfig, TransformerConfig
from weft.comm import Key
from weft.inspection.parameter_cut import share
from weft.plan import Plan
from weft.serve.attention.attend import merge_bytes


@dataclass(frozen=True)
class ServedSizes:
    """The sizes of a language model that serving depends on."""

    num_layers: int
    hidden: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    inner: int  # of the MLP; of one expert in layers of experts
    vocab: int
    is_gated: bool
    num_moments: int  # that a norm sums over its features
    num_experts: int = 0
    num_experts_per_tok: int = 0
    shared_inner: int = 0  # of the expert that all tokens use
    expert_layers: tuple[bool, ...] = ()
    window: int | None = None  # of the newest tokens, to which a token attends; None: to all

    @staticmethod
    def of(config: TransformerConfig) -> ServedSizes:
        if not isinstance(config, DecoderConfig):
            head_dim = config.n_embd // config.n_head
            heads = (config.n_head, config.n_head, head_dim)
            return ServedSizes(
                config.n_layer, config.n_embd, *heads, config.inner_size, config.vocab_size, False, 2,
                expert_layers=(False,) * config.n_layer,
            )  # fmt: skip
        layers = tuple(config.has_experts(index) for index in range(config.num_hidden_layers))
        return ServedSizes(
            config.num_hidden_layers,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.intermediate_size,
            config.vocab_size,
            True,
            1,
            config.num_experts if any(layers) else 0,
            config.num_experts_per_tok if any(layers) else 0,
            (config.shared_expert_intermediate_size or 0) if any(layers) else 0,
            layers,
            config.sliding_window,
        )

    def key_heads(self, x: int) -> int:
        """Key heads of one rank of x; several ranks may have the same."""
        return max(1, self.num_key_heads // x)

    def projected(self, x: int) -> int:
        """Outputs of the projection to q, k and v on one rank of x."""
        return (self.num_heads // x + 2 * self.key_heads(x)) * self.head_dim

    def stage_layers(self, plan: Plan, stage: int) -> range:
        """The layers of a stage."""
        return range(*share(self.num_layers, plan.pipe.degree, stage))


def step_calls(
    sizes: ServedSizes, plan: Plan, stage: int, num_tokens: int, num_sampled: int, item_bytes: int
) -> Iterator[tuple[Key, int]]:
    """Yields the collectives of the first rank of x and y on a stage, for a step of `num_tokens` tokens of which
    `num_sampled` sample. An element has `item_bytes`; moments of norms have 4 at least.
    """
    x, y, is_last = plan.tensor.x, plan.tensor.y, stage == plan.pipe.degree - 1
    stream = num_tokens * sizes.hidden // y * item_bytes
    moments = sizes.num_moments * [(("y", "all_reduce"), num_tokens * max(4, item_bytes))]
    merge = merge_bytes(num_tokens, sizes.num_heads // x, sizes.head_dim, plan.context.degree, item_bytes)
    calls: list[tuple[Key, int]] = [(("x", "all_reduce"), stream)] if stage == 0 else []
    for layer in sizes.stage_layers(plan, stage):
        has_experts = sizes.expert_layers[layer]
        calls += [*moments, (("y", "all_reduce"), num_tokens * sizes.projected(x) * item_bytes)]
        calls += [(("context", "all_gather"), merge)]
        calls += [(("x", "all_reduce"), stream)]
        if has_experts:
            calls += [(("expert", "all_reduce"), stream)]
            calls += [(("x", "all_reduce"), stream)] * bool(sizes.shared_inner)
        else:
            inner = (1 + sizes.is_gated) * sizes.inner // x
            calls += [*moments, (("y", "all_reduce"), num_tokens * inner * item_bytes), (("x", "all_reduce"), stream)]
    if not is_last:
        calls += [(("pipe", "send"), stream)]
    elif num_sampled:
        part = num_sampled * -(-sizes.vocab // x) * item_bytes
        calls += [(key, num_sampled * max(4, item_bytes)) for key, _ in moments]
        calls += [(("y", "all_reduce"), part), (("x", "all_gather"), part * x)]
    degrees = {"x": x, "y": y, "expert": plan.expert, "pipe": plan.pipe.degree, "context": plan.context.degree}
    yield from ((key, num_bytes) for key, num_bytes in calls if degrees[key[0]] > 1)
