"""Experts over CPU ranks: weft beside FSDP2 with a hand-written all-to-all, as torchtitan lays them out, in one run.

    python benchmarks/peers_experts.py [--steps 40] [--cases "expert 2"]

The peer shards all parameters but experts over all ranks with FSDP2, and splits the experts of each layer over `expert`
ranks; over the remaining ranks FSDP2 shards them, too. Tokens are sorted by expert, the numbers of rows travel first,
then the rows; torch's grouped matmul computes all experts of a rank at once. `side_by_side.py` says how the two are
held against each other: losses and gradient norms must agree, and steps alternate. The aim, weft over peer: step time
at most 1.0. Bytes are counted as in `peers.py`. Writes benchmarks/results/peers-experts-cpu.json.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peers import BATCH, COUNTED, SEQUENCE, Peer, Weft, local, show
from side_by_side import (
    CLIP,
    CONVENTIONS,
    Comparison,
    Side,
    environment,
    make_model,
    measure,
    random_batches,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from weft.models import Decoder, DecoderConfig
from weft.models.experts import SparseMLP
from weft.plan import Plan, Shard
from weft.schema import to_table
from weft.step.batch import Batch

AIMS = {"step_ratio": 1.0}
CONFIG = DecoderConfig(
    architecture="qwen3_moe",
    vocab_size=2048,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    tie_word_embeddings=False,
)


@dataclass(frozen=True)
class Case:
    """A plan of weft, and FSDP2 over as many ranks, of which `expert` split the experts."""

    plan: Plan

    @property
    def comparison(self) -> Comparison:
        peer = f"FSDP2, experts over {self.plan.expert}"
        return Comparison(self.plan.describe_axes(), peer, self.plan.num_ranks, self._sides, self._batches)

    def _sides(self) -> dict[str, Side]:
        return {"weft": Weft(self.plan, CONFIG), "peer": ExpertPeer(self.plan.expert)}

    def _batches(self) -> Iterator[Batch]:
        return random_batches(CONFIG.vocab_size, (BATCH, SEQUENCE), dist.get_rank())


CASES = [Case(Plan(expert=2)), Case(Plan(expert=4)), Case(Plan(expert=2, shard=Shard(2, 3)))]


# --- the peer


class ExpertPeer(Peer):
    """The step that one would write by hand around FSDP2."""

    def __init__(self, expert: int) -> None:
        model, world = make_model(CONFIG), dist.get_world_size()
        mesh = init_device_mesh("cpu", (world // expert, expert), mesh_dim_names=("rest", "expert"))
        self.experts = mesh["expert"].get_group()
        shard_model(model, mesh)
        named = dict(model.named_parameters())
        others, of_experts = (
            [one for name, one in named.items() if (".experts." in name) is own] for own in (False, True)
        )
        super().__init__(model, [others, of_experts], world)

    def _clip(self) -> Tensor:
        gradients = [[one.grad for one in kind if one.grad is not None] for kind in self.kinds]
        torch._foreach_div_(gradients[1], self.experts.size())  # sums over `expert`, means over the rest: by FSDP2
        others, own = (local(nn.utils.get_total_norm(kind, foreach=True)).square() for kind in gradients)
        dist.all_reduce(own, group=self.experts)
        norm = (others + own).sqrt()
        for kind in self.kinds:
            nn.utils.clip_grads_with_norm_(kind, CLIP, norm, foreach=True)
        return norm


def shard_model(model: Decoder, mesh: DeviceMesh) -> None:
    """Split experts over `expert`, and shard all parameters with FSDP2: a unit for each block and the root."""
    world = init_device_mesh("cpu", (mesh.size(),))
    ignored = set[nn.Parameter]()
    for block in model.model.layers:
        moe = PlainExperts(block.mlp, mesh["expert"].get_group())
        block.mlp = moe
        if mesh["rest"].size() > 1:
            fully_shard(moe.experts, mesh=mesh["rest"], reshard_after_forward=True)
        else:
            ignored |= set(moe.experts.parameters())
        fully_shard(block, mesh=world, reshard_after_forward=True, ignored_params=ignored)
    fully_shard(model, mesh=world, ignored_params=ignored)


class PlainExperts(nn.Module):
    """A router and this rank's experts. Tokens travel to their experts' ranks and back."""

    def __init__(self, whole: SparseMLP, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.k, self.num_experts = whole.gate.num_experts_per_tok, whole.gate.num_experts
        self.gate = nn.Linear(CONFIG.hidden_size, self.num_experts, bias=False)
        self.gate.weight = nn.Parameter(whole.gate.weight.detach().clone())
        self.experts = OwnExperts(whole, group)

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)
        weights, chosen = self.gate(tokens).softmax(-1).topk(self.k)
        if CONFIG.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts)
        results = self.experts(tokens[order // self.k], counts)
        by_pair = torch.zeros_like(results).index_copy(0, order, results).unflatten(0, (-1, self.k))
        return torch.bmm(weights[:, None], by_pair).view_as(hidden)


class OwnExperts(nn.Module):
    def __init__(self, whole: SparseMLP, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, degree, rank = group, group.size(), group.rank()
        own = slice(rank * whole.gate.num_experts // degree, (rank + 1) * whole.gate.num_experts // degree)
        self.gate_up_proj = nn.Parameter(whole.experts.gate_up_proj.detach()[own].clone())
        self.down_proj = nn.Parameter(whole.experts.down_proj.detach()[own].clone())

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Returns the results for rows, sorted by expert, of which `counts` go to each expert of all ranks."""
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        by_rank = arriving.view(self.group.size(), -1)
        sent, received = counts.view(self.group.size(), -1).sum(1).tolist(), by_rank.sum(1).tolist()
        own = _Exchange.apply(rows, self.group, sent, received)
        experts = torch.arange(by_rank.shape[1]).repeat(self.group.size()).repeat_interleave(arriving)
        order = experts.argsort(stable=True)
        results = self._compute(own[order], by_rank.sum(0).cumsum(0).int())
        back = torch.empty_like(results).index_copy(0, order, results)
        out: Tensor = _Exchange.apply(back, self.group, received, sent)
        return out

    def _compute(self, rows: Tensor, ends: Tensor) -> Tensor:
        gate, up = torch._grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=ends)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        back = gradient.new_empty(sum(ctx.sent), gradient.shape[1])
        dist.all_to_all_single(back, gradient.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return back, None, None, None


def main() -> None:
    parser = harness.options(__doc__, "peers-experts-cpu.json")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cases", nargs="*", help="only layouts whose names start so; printed, not written")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "aims": AIMS,
        "conventions": CONVENTIONS | COUNTED,
        "model": to_table(CONFIG),
        "batch": {"sequences_per_rank": BATCH, "tokens": SEQUENCE, "precision": "fp32"},
        "steps_measured": arguments.steps,
        **environment(),
    }
    print(f"{'layout':36}{'peer':26}{'step':>6}{'quartiles':>11}{'cpu':>7}{'bytes':>7}{'wire':>7}")
    results = []
    for case in CASES:
        if case.comparison.layout.startswith(tuple(arguments.cases or ("",))):
            results.append(measure(case.comparison, arguments.steps))
            print(show(results[-1]), flush=True)
    if not arguments.cases:
        result |= {"load_average_after": os.getloadavg()[0], "results": results}
        harness.write(arguments.out, result, device="cpu")


if __name__ == "__main__":
    main()
