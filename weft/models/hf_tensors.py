"""How the tensors of a Hugging Face folder make up weft's parameters.

Most are a parameter as it is. GPT-2's projections are stored transposed (Conv1D). The experts of a layer are stored one
by one, and are stacked in two parameters: the gates and ups of all experts, and their downs. Layers of LSTM and GRU
have the names of torch's `nn.LSTM` and `nn.GRU` (`rnn.weight_ih_l0`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from weft.architectures import DecoderConfig, GPT2Config, LanguageConfig, RecurrentConfig

HEAD_NAME = "lm_head.weight"
CONV1D_WEIGHTS = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")
# Names of an expert's gate, up and down projection in the folders of an architecture, and of what contains experts.
_QWEN_NAMES = ("mlp", "gate_proj", "up_proj", "down_proj")
EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen2_moe": _QWEN_NAMES,
    "qwen3_moe": _QWEN_NAMES,
}
RECURRENT_LAYER = re.compile(r"^layers\.(\d+)\.((?:weight|bias)_[ih]h)$")
Place = tuple[int | slice, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a folder: its name and shape there, and its place in a parameter (empty: all of it)."""

    name: str
    parameter: str
    shape: tuple[int, ...]
    place: Place = ()
    is_transposed: bool = False

    def of(self, parameter: Tensor) -> Tensor:
        """The tensor to store, from the whole parameter."""
        part = parameter[self.place] if self.place else parameter
        return part.t() if self.is_transposed else part


def stored_tensors(config: LanguageConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    """The tensors of a folder by their names there. `shapes` are those of weft's parameters."""
    made = (one for name, shape in shapes.items() for one in _stored(config, name, shape))
    return {one.name: one for one in made}


def _stored(config: LanguageConfig, name: str, shape: tuple[int, ...]) -> Iterator[StoredTensor]:
    if isinstance(config, RecurrentConfig):
        yield StoredTensor(RECURRENT_LAYER.sub(r"rnn.\2_l\1", name), name, shape)
        return
    if isinstance(config, GPT2Config):
        is_transposed = CONV1D_WEIGHTS.search(name) is not None
        yield StoredTensor(name, name, shape[::-1] if is_transposed else shape, is_transposed=is_transposed)
        return
    if ".mlp.experts." in name:
        yield from _experts(config, name, shape)
        return
    within, *_ = EXPERT_NAMES.get(config.architecture, ("mlp",))
    stored_name = name.replace(".mlp.gate.", f".{within}.gate.")
    yield StoredTensor(stored_name, name, shape)


def _experts(config: DecoderConfig, name: str, shape: tuple[int, ...]) -> Iterator[StoredTensor]:
    """The tensors of a parameter that stacks all experts of a layer."""
    within, gate, up, down = EXPERT_NAMES[config.architecture]
    layer, _, kind = name.partition(".mlp.experts.")
    num_experts, outputs, inputs = shape
    inner = outputs // 2
    parts: dict[str, tuple[slice, ...]] = (
        {down: ()} if kind == "down_proj" else {gate: (slice(0, inner),), up: (slice(inner, outputs),)}
    )
    for expert in range(num_experts):
        for part, rows in parts.items():
            stored_name = f"{layer}.{within}.experts.{expert}.{part}.weight"
            yield StoredTensor(stored_name, name, (outputs if not rows else inner, inputs), (expert, *rows))
