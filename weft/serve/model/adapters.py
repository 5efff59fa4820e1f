"""LoRA adapters in PEFT's format: merged into a model, or chosen by each request while all share the model's weights.

The updates of all adapters to one linear lie end to end: `down` [ranks, in] and `up` [out, ranks]. For each token, the
ranks of other adapters are set to zero between the two, so one pair of matmuls serves a batch of any mixture:

    y = x·W' + (x·down' where the rank is of the token's adapter, else 0)·up'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.architectures.lora import Lora
from weft.errors import ConfigError
from weft.models import GPT2, Decoder, build
from weft.models.adapter import adapter_reader, with_adapter
from weft.models.tuning import A_SUFFIX, B_SUFFIX, Read, add_lora, is_adapter, merged
from weft.serve.attention.batch import to_device
from weft.serve.weights.packed_linear import PackedLinear
from weft.serve.weights.usable_weights import finite

NO_ADAPTER = -1


class TokenAdapters:
    """The adapter of each token of the step that is computed: its number, or NO_ADAPTER. None: of no token."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.of_tokens: Tensor | None = None

    def choose(self, tokens_by_adapter: Iterable[tuple[str, int]], device: torch.device) -> None:
        """Say how many tokens of each adapter ("" for none) come next, in the order of the step's tokens."""
        if not self.names:
            return
        runs = [(self.names.index(name) if name else NO_ADAPTER, count) for name, count in tokens_by_adapter]
        if all(number == NO_ADAPTER for number, _ in runs):
            self.of_tokens = None
            return
        numbers, counts = (torch.tensor(column) for column in zip(*runs, strict=True))
        self.of_tokens = to_device(numbers.repeat_interleave(counts), device)


class LowRankUpdates:
    """The updates of all adapters to one linear."""

    def __init__(self, adapters: TokenAdapters, layer: nn.Linear) -> None:
        self._adapters = adapters
        self.down = layer.weight.new_empty(0, layer.weight.shape[1])
        self.up = layer.weight.new_empty(layer.weight.shape[0], 0)
        self._owners = torch.empty(0, dtype=torch.int64, device=layer.weight.device)  # the adapter of each rank

    def add(self, number: int, down: Tensor, up: Tensor, first_row: int) -> None:
        """Add an adapter's update to the outputs from `first_row` on."""
        padded = self.up.new_zeros(len(self.up), len(down))
        padded[first_row : first_row + len(up)] = up
        self.down, self.up = torch.cat([self.down, down.to(self.down)]), torch.cat([self.up, padded], dim=1)
        self._owners = torch.cat([self._owners, self._owners.new_full((len(down),), number)])

    def of(self, hidden: Tensor) -> Tensor | None:
        """Return what is added to the result for inputs [tokens, in]; None if no token has an adapter."""
        if self._adapters.of_tokens is None:
            return None
        low = F.linear(hidden, self.down)
        return F.linear(low.masked_fill(self._owners != self._adapters.of_tokens[:, None], 0), self.up)


def attach_adapters(
    model: nn.Module, linears: Sequence[nn.Linear], folders: Mapping[str, Path]
) -> tuple[TokenAdapters, dict[nn.Module, LowRankUpdates]]:
    """Return the adapters of tokens, and the updates of all adapters to each of `linears`, which compute the model's
    blocks: weights of the model's own linears are rows of theirs.
    """
    adapters, found = TokenAdapters(list(folders)), dict[nn.Module, LowRankUpdates]()
    starts = {layer.weight.untyped_storage().data_ptr(): layer for layer in linears}
    for number, (name, folder) in enumerate(folders.items()):
        lora, names, read = read_adapter(model, folder)
        for module_name in sorted(one.removesuffix(A_SUFFIX) for one in names if one.endswith(A_SUFFIX)):
            weight = model.get_parameter(f"{module_name}.weight")
            layer = starts.get(weight.untyped_storage().data_ptr())
            if layer is None:
                raise ConfigError(
                    f"the adapter {name} ({folder}) changes {module_name}, which cannot be chosen by a request; "
                    f"give it by --merge-adapter"
                )
            offset = weight.storage_offset() - layer.weight.storage_offset()
            updates = found.setdefault(layer, LowRankUpdates(adapters, layer))
            up = read(module_name + B_SUFFIX) * lora.scaling
            updates.add(number, read(module_name + A_SUFFIX), up, offset // layer.weight.shape[1])
    return adapters, found


def read_adapter(model: nn.Module, folder: Path) -> tuple[Lora, set[str], Read]:
    """Return an adapter's settings, the names of its A and B, and a function that reads them. It must fit the model."""
    assert isinstance(model, Decoder | GPT2)
    lora = with_adapter(Lora(adapter=str(folder)), {})
    with torch.device("meta"):
        adapted = build(model.config)
    add_lora(adapted, lora)
    shapes = {name: tuple(parameter.shape) for name, parameter in adapted.named_parameters()}
    return lora, {name for name in shapes if is_adapter(name)}, finite(adapter_reader(folder, shapes), folder)


@torch.no_grad()
def merge_adapter(model: nn.Module, folder: Path) -> None:
    """Add an adapter's updates to the weights of a model. Raises ConfigError if some are in fewer bits."""
    if any(isinstance(one, PackedLinear) for one in model.modules()):
        raise ConfigError(
            "an adapter cannot be merged into weights in fewer bits; leave out --merge-adapter, or give a model whose "
            "weights have all their bits"
        )
    lora, names, read = read_adapter(model, folder)
    parameters = dict(model.named_parameters())
    device = next(iter(parameters.values())).device
    read_all = merged(lambda name: read(name).to(device) if name in names else parameters[name], lora, names)
    for name, parameter in parameters.items():
        parameter.copy_(read_all(name))
