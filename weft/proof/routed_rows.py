"""Counts where a split model sends its tokens. The bytes of the all-to-alls of `expert` depend on it.

A plan's cost is for experts that all get the same number of tokens. A proof adds what the counted tokens change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import all_gather
from weft.mesh import Mesh
from weft.parallel.expert.layers import distributed_layers, routed_counts
from weft.parallel.expert.traffic import layer_traffics
from weft.pipeline.rank_model import rank_model
from weft.profiling import Profile


class RoutedRows:
    """Counts the rows that this rank's tokens send to each expert in training, by layer. Recompute does not count."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._mesh = mesh
        self._counts: dict[str, Tensor] = {}
        for own in rank_model(model).models:
            for name, layer in distributed_layers(own).items():
                layer.register_forward_pre_hook(self._counter(name))

    def _counter(self, name: str) -> Any:
        def count(layer: nn.Module, args: tuple[Any, ...]) -> None:
            if layer.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                counts = routed_counts(layer, *args)
                if counts is not None:
                    self._counts[name] = self._counts.get(name, 0) + counts

        return count

    def added_bytes(self, profile: Profile) -> int:
        """Returns the bytes that this rank sent in addition to those of equal routing; negative if it sent fewer."""
        if not self._counts:
            return 0
        axis = self._mesh[self._mesh.plan.expert_axis]
        traffics = {one.name: one for one in layer_traffics(profile, self._mesh.plan)}
        # The rows for each rank's experts [layers, ranks]; layers may have different numbers of experts.
        own = torch.stack([counts.view(axis.degree, -1).sum(-1) for counts in self._counts.values()])
        whole = own.new_empty(axis.degree, *own.shape)
        all_gather(whole.view(-1), own.view(-1), axis).wait()
        added = (whole.sum(0)[:, axis.index] - own.sum(-1)).tolist()
        return sum(
            rows * traffics[name].row_bytes * traffics[name].num_sends_of_arrived
            for name, rows in zip(self._counts, added, strict=True)
        )
