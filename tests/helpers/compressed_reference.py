"""1-bit and 0/1 Adam of N workers in one process, on plain tensors: what ranks are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.optim.sign_compression import part_numel
from weft.optim.zero_one_adam import sync_interval, variance_steps

FREEZE = 5
OPTIONS: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "freeze_step": FREEZE}
LOCAL: dict[str, Any] = {"kappa": 2, "local_scaler": 3, "most_local": 4}
BLOCK = 16  # of sizes of gradients: smaller than in runs, so that these small models have several


def compress(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(scale · weights · signs, what they leave out), 0 where weights are."""
    mask = weights > 0
    relative = values[mask] / weights[mask]
    scale = relative.double().abs().mean().float() if mask.any() else torch.zeros(())
    signs = scale * weights * torch.where(values < 0, -1.0, 1.0)
    return torch.where(mask, signs, 0.0), torch.where(mask, values - signs, 0.0)


def without_error(compressor: Any, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """`compressor` with its error left out, for controls."""
    return compressor(values, weights)[0], torch.zeros_like(values)


class Reference:
    """The optimizer of one slice on N workers: lists have a value for each."""

    def __init__(self, kind: str, weight: Tensor, decay: Tensor, workers: int) -> None:
        self.kind, self.workers, self.decay = kind, workers, decay
        self.weights = [weight.clone() for _ in range(workers)]
        self.moments = [torch.zeros_like(weight) for _ in range(workers)]
        self.second, self.num_variances = torch.zeros_like(weight), 0
        self.anchor, self.sums, self.rates = weight.clone(), [torch.zeros_like(weight) for _ in range(workers)], 0.0
        self.sizes = weight.new_zeros(-(-len(weight) // BLOCK))  # a running mean by block, and its number of steps
        self.num_sizes = 0
        self.squares: list[Tensor] = []  # since the last exchange
        self.forget()

    def forget(self) -> None:
        part = part_numel(len(self.second), self.workers)
        self.errors = [torch.zeros_like(self.second) for _ in range(self.workers)]
        self.server_errors = self.second.new_zeros(part * self.workers)

    def mean(self, vectors: list[Tensor], weights: Tensor) -> Tensor:
        total = torch.zeros_like(self.second)
        for worker, vector in enumerate(vectors):
            given = torch.where(weights > 0, vector + self.errors[worker], 0.0)
            sent, self.errors[worker] = compress(given, weights)
            total += sent
        numel, result = len(weights), torch.zeros_like(self.server_errors)
        padded, wide = torch.zeros_like(result), torch.zeros_like(result)
        padded[:numel], wide[:numel] = total / self.workers, weights
        parts = zip((padded + self.server_errors).chunk(self.workers), wide.chunk(self.workers), strict=True)
        pairs = [compress(torch.where(w > 0, one, 0.0), w) for one, w in parts]
        self.server_errors = torch.cat([error for _, error in pairs])
        return torch.cat([one for one, _ in pairs])[:numel]

    def follow(self, gradients: list[Tensor], exchanges: bool, follows: bool) -> None:
        """Take in the mean squares of a step; at an exchange, renew the sizes, and let the second moment follow."""
        squares = torch.stack(gradients).square().mean(0)
        self.squares.append(torch.stack([block.mean() for block in squares.split(BLOCK)]))
        if not exchanges:
            return
        steps, mean, decay = len(self.squares), torch.stack(self.squares).mean(0), OPTIONS["betas"][1]
        before = self.sizes / (1 - decay**self.num_sizes) if self.num_sizes else None
        self.sizes = decay**steps * self.sizes + (1 - decay**steps) * mean
        self.num_sizes, self.squares = self.num_sizes + steps, []
        if follows:
            assert before is not None
            change = self.sizes / (1 - decay**self.num_sizes) / before
            self.second = self.second * change.repeat_interleave(BLOCK)[: len(self.second)]

    def step(self, gradients: list[Tensor], number: int, lr: float) -> None:
        beta1, beta2 = OPTIONS["betas"]
        rate = lr / (1 - beta1**number)
        is_full = number <= FREEZE and (self.kind == "1bit" or number in variance_steps(FREEZE, LOCAL["kappa"]))
        average = torch.stack(gradients).mean(0)
        is_local = self.kind == "0/1" and number > FREEZE
        interval = sync_interval(number, FREEZE, LOCAL["local_scaler"], LOCAL["most_local"]) if is_local else 1
        is_exchange = (number - FREEZE) % interval == 0
        if is_full:
            self.second = beta2 * self.second + (1 - beta2) * average**2
            self.num_variances += 1
        if is_full or number > FREEZE:
            self.follow(gradients, is_exchange, number > FREEZE)
        root = (self.second / (1 - beta2**self.num_variances)).sqrt() + OPTIONS["eps"]
        below = torch.where(self.second > 0, root, 0.0)
        if number <= FREEZE and not is_full:
            average = self.mean(gradients, below)
        if number <= FREEZE:
            self.moments = [beta1 * m + (1 - beta1) * average for m in self.moments]
        else:
            self.moments = [
                torch.where(below > 0, beta1 * m + (1 - beta1) * g, 0.0)
                for m, g in zip(self.moments, gradients, strict=True)
            ]
        if self.kind == "1bit" and number > FREEZE:
            self.moments = [self.mean(self.moments, below)] * self.workers
        self.anchor = (self.anchor if is_local else self.weights[0]) * (1 - lr * self.decay)
        self.weights = [
            w * (1 - lr * self.decay) - rate * torch.where(below > 0, m / root, 0.0)
            for w, m in zip(self.weights, self.moments, strict=True)
        ]
        if not is_local:
            self.anchor = self.weights[0].clone()
            return
        if number == FREEZE + 1:
            self.forget()
        self.sums = [s + rate * m for s, m in zip(self.sums, self.moments, strict=True)]
        self.rates += rate
        if is_exchange:
            mean = self.mean([one / self.rates for one in self.sums], below)
            self.moments = [mean] * self.workers
            self.anchor = self.anchor - torch.where(below > 0, self.rates * mean / root, 0.0)
            self.weights = [self.anchor.clone()] * self.workers
            self.sums, self.rates = [torch.zeros_like(mean)] * self.workers, 0.0
