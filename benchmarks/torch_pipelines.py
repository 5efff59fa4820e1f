"""A Llama under torch.distributed.pipelining, by hand: stage modules, and the step that one would write around them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from side_by_side import CLIP, LEARNING_RATE
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.optim import AdamW
from torch_layouts import CountCalls, Totals

from weft.models import Decoder, token_loss
from weft.models.decoder import rotary_tables
from weft.step.batch import Batch

MakeSchedule = Callable[..., _PipelineSchedule]


class LlamaStage(nn.Module):
    """Equal parts of the layers; the first stage embeds, the last has norm and head."""

    def __init__(self, model: Decoder, index: int, num_stages: int) -> None:
        super().__init__()
        num_layers = len(model.model.layers) // num_stages
        self.config = model.config
        self.embedding = model.model.embed_tokens if index == 0 else nn.Identity()
        self.layers = model.model.layers[index * num_layers : (index + 1) * num_layers]
        is_last = index == num_stages - 1
        self.head = nn.Sequential(model.model.norm, model.lm_head) if is_last else nn.Identity()

    def forward(self, given: Tensor) -> Tensor:
        """Tokens [batch, sequence] to the first stage, else hidden [batch, sequence, hidden]."""
        hidden = self.embedding(given)
        cos, sin = rotary_tables(self.config, torch.arange(hidden.shape[1]), hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        out: Tensor = self.head(hidden)
        return out


class TorchPipeline:
    """One side of a comparison. Rank r holds the stages r, r + ranks, ..."""

    def __init__(self, model: Decoder, make: MakeSchedule, chunks: int, num_micro_batches: int) -> None:
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        self.is_first, self.is_last = self.rank == 0, self.rank == ranks - 1
        num_stages = ranks * chunks
        stages = [
            PipelineStage(LlamaStage(model, index, num_stages), index, num_stages, torch.device("cpu"))
            for index in range(self.rank, num_stages, ranks)
        ]
        takes_one = make.__name__ in ("ScheduleGPipe", "Schedule1F1B")
        self.schedule = make(
            stages[0] if takes_one else stages, num_micro_batches, loss_fn=self._loss, scale_grads=False
        )
        self.scale = 1.0
        self.parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
        self.optimizer = AdamW(self.parameters, lr=LEARNING_RATE, fused=True)

    def step(self, batch: Batch) -> tuple[float, float]:
        tokens, labels = batch
        num_targets = (labels != -100).sum().double()
        self.scale = 1 / num_targets.item()
        losses: list[Tensor] = []
        self.schedule.step(
            *([tokens] if self.is_first else []),
            target=labels if self.is_last else None,
            losses=losses,
            return_outputs=False,
        )
        loss = torch.stack(losses).detach().double().sum() if losses else torch.zeros((), dtype=torch.float64)
        dist.all_reduce(loss)
        norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm.item()

    def count(self, batch: Batch) -> Totals:
        with CountCalls() as calls:
            self.step(batch)
        return of_all_ranks(calls)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return token_loss(logits, labels)[0] * self.scale

    def _clip(self) -> Tensor:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        squared = nn.utils.get_total_norm(gradients, foreach=True).double().square()
        dist.all_reduce(squared)
        norm = squared.sqrt()
        nn.utils.clip_grads_with_norm_(self.parameters, CLIP, norm, foreach=True)
        return norm


def of_all_ranks(counted: CountCalls) -> Totals:
    """The messages that were sent, summed over all ranks, because ranks in the middle of a pipeline send twice."""
    totals = counted.tally.totals
    sums = torch.tensor([totals[kind]["send"] for kind in ("calls", "bytes")])
    dist.all_reduce(sums)
    return {
        kind: type(totals[kind])(send=number) for kind, number in zip(("calls", "bytes"), sums.tolist(), strict=True)
    }
