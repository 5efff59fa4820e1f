"""Counts where a split model sends its tokens. The bytes of the all-to-alls of `expert` depend on it.

A plan's cost is for experts that all get the same number of tokens. A proof adds what the counted tokens change.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import Axis, all_gather
from weft.comm.ledger import Key
from weft.mesh import Mesh
from weft.parallel.expert.layers import axis_of_rows, distributed_layers, routed_counts
from weft.parallel.expert.traffic import ExpertTraffic, layer_traffics
from weft.pipeline.rank_model import rank_model
from weft.profiling import Profile


class RoutedRows:
    """Counts the rows that this rank's tokens send to each expert in training, in each call of each layer.

    Recompute does not count.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._mesh = mesh
        self._counts: dict[str, list[Tensor]] = {}  # of all calls of a layer, in their order
        self._axes: dict[str, Axis] = {}
        for own in rank_model(model).models:
            for name, layer in distributed_layers(own).items():
                self._axes[name] = axis_of_rows(layer)
                layer.register_forward_pre_hook(self._counter(name, own), with_kwargs=True)

    def _counter(self, name: str, model: nn.Module) -> Any:
        def count(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if model.training and torch._C._current_graph_task_id() == -1:
                given = inspect.signature(layer.forward).bind(*args, **kwargs).args  # in the order of its parameters
                counts = routed_counts(layer, *given)
                if counts is not None:
                    self._counts.setdefault(name, []).append(counts)

        return count

    def added_bytes(self, profile: Profile) -> dict[Key, int]:
        """Returns the bytes that this rank sent in addition to those of equal routing; negative if it sent fewer."""
        traffics: dict[str, list[ExpertTraffic]] = {}
        for one in layer_traffics(profile, self._mesh.plan):
            traffics.setdefault(one.name, []).append(one)
        added: dict[Key, int] = {}
        for name, counts in self._counts.items():
            axis, calls, none = self._axes[name], traffics.get(name, []), torch.zeros_like(counts[0])
            for number, call in enumerate(calls):  # of one micro-batch; every micro-batch has the same
                own = sum(counts[number :: len(calls)], none).view(axis.degree, -1).sum(-1)  # for each rank's experts
                whole = own.new_empty(axis.degree, axis.degree)
                all_gather(whole.view(-1), own, axis).wait()
                rows = int(whole[:, axis.index].sum() - own.sum())
                if rows:
                    added[call.key] = added.get(call.key, 0) + rows * call.row_bytes * call.num_sends_of_arrived
        return added
