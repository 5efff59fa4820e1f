"""Finds how a model's linears can be split over the tensor axes, from outside, without editing it.

Two linears with only element-wise work (or attention heads) between them make a pair: the first ("column") is split by
its outputs, the second ("row") by its inputs, and nothing is said in between. Attention with separate or fused
projections and gated MLPs are known by the names of their projections; any other module with two linears is *probed*:
it is computed once whole and once as two halves whose partial results are added, and is a pair only if both agree. What
has no partner is "gathered": split by outputs and put together again. What hides its weights is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.blocks import find_blocks
from weft.errors import PlanError

Kind = Literal["column", "row", "gathered", "head"]
QUERY, KEY, VALUE = ("q_proj", "query", "wq", "q"), ("k_proj", "key", "wk", "k"), ("v_proj", "value", "wv", "v")
FUSED = ("c_attn", "qkv", "Wqkv", "qkv_proj", "query_key_value")
OUT = ("o_proj", "out_proj", "c_proj", "proj", "wo", "dense", "out")
GATE, UP, DOWN = ("gate_proj", "w1", "gate"), ("up_proj", "w3", "up"), ("down_proj", "w2", "down")
HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads")
WIDTHS = ("embed_dim", "split_size", "hidden_size", "all_head_size", "inner_dim", "dim", "n_embd")
ELEMENT_WISE = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.LeakyReLU,
    nn.ELU,
    nn.Dropout,
    nn.Identity,
    nn.Softplus,
)


@dataclass(frozen=True)
class Part:
    """A fused part of the dim that goes over x: so many units (heads, or features) of so many features each."""

    num_units: int
    unit: int = 1
    is_key: bool = False  # key and value heads may be fewer than x, and are then repeated

    @property
    def width(self) -> int:
        """Features."""
        return self.num_units * self.unit


@dataclass(frozen=True)
class Split:
    """How one linear is split. `parent` holds several columns with one input, which enter the region together."""

    module: str
    kind: Kind
    parts: tuple[Part, ...]
    parent: str | None = None
    turned: bool = False  # weight is [in, out], as in transformers' Conv1D


@dataclass(frozen=True)
class Pairing:
    """All that the tensor axes touch. `scaled` are integer attributes (head counts, widths) of attention modules."""

    splits: dict[str, Split] = field(default_factory=dict)
    embeddings: tuple[str, ...] = ()
    inner: frozenset[str] = frozenset()  # parameters used by each rank for its own heads only
    scaled: dict[str, tuple[str, ...]] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()


def pair(model: nn.Module) -> Pairing:
    """The pairing of a model, or a PlanError that names what cannot be split."""
    finder = _Finder(model)
    for name, module in model.named_modules():
        finder.visit(name, module)
    finder.check_nothing_hidden()
    return finder.result()


def is_linear(module: nn.Module) -> bool:
    """nn.Linear itself, or transformers' Conv1D."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def is_norm(module: nn.Module) -> bool:
    """LayerNorm, or any kind of RMSNorm."""
    return isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or "RMSNorm" in type(module).__name__


def sizes(module: nn.Module) -> tuple[int, int]:
    """Input and output features of a linear."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return (weight.shape[0], weight.shape[1]) if _is_turned(module) else (weight.shape[1], weight.shape[0])


class _Finder:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.splits: dict[str, Split] = {}
        self.embeddings: list[str] = []
        self.inner: set[str] = set()
        self.scaled: dict[str, tuple[str, ...]] = {}
        self.done: set[str] = set()

    def visit(self, name: str, module: nn.Module) -> None:
        if isinstance(module, nn.MultiheadAttention):
            raise PlanError(
                f"'{name}' is an nn.MultiheadAttention, which keeps q, k and v in one raw parameter, so its heads "
                f"cannot be split from outside; use separate nn.Linear projections, or tensor.x = tensor.y = 1"
            )
        if isinstance(module, nn.Embedding):
            self.embeddings.append(name)
            self.done.add(f"{name}.weight")
        linears = {child: inner for child, inner in module.named_children() if is_linear(inner)}
        if linears:
            used = (
                self._attention(name, module, linears)
                or self._gated(name, linears)
                or self._pairs(name, module, linears)
            )
            for child in linears:
                if child not in used:
                    self._single(_join(name, child), linears[child])

    def result(self) -> Pairing:
        return Pairing(
            self.splits, tuple(self.embeddings), frozenset(self.inner), self.scaled, tuple(find_blocks(self.model))
        )

    def check_nothing_hidden(self) -> None:
        """Every matrix must be in a layer that was recognised; vectors (norms, biases, tokens) may stay whole."""
        for name, parameter in self.model.named_parameters():
            large = [size for size in parameter.shape if size > 1]
            module = self.model.get_submodule(name.rpartition(".")[0])
            if name in self.done or len(large) < 2 or isinstance(module, nn.modules.conv._ConvNd):
                continue
            if parameter.dim() >= 3 and parameter.shape[0] == 1:
                continue  # a table of positions or tokens that is added, not multiplied
            raise PlanError(
                f"'{name}' {tuple(parameter.shape)} of {type(module).__name__} is a matrix outside any nn.Linear or "
                f"nn.Embedding, so weft cannot tell how it is used; put it into an nn.Linear, or use tensor.x = 1"
            )

    # --- kinds of pairs

    def _attention(self, name: str, module: nn.Module, linears: dict[str, nn.Module]) -> set[str]:
        query, key, value = (_first(linears, names) for names in (QUERY, KEY, VALUE))
        fused, out = _first(linears, FUSED), _first(linears, OUT)
        if out is None or not (fused or (query and key and value)):
            return set()
        if query and key and value:
            head_dim = _head_dim(module, sizes(linears[query])[1])
            if head_dim is None:
                raise PlanError(f"'{name}': neither head_dim nor a number of heads is an attribute; add self.head_dim")
            for child, is_key in ((query, False), (key, True), (value, True)):
                part = Part(sizes(linears[child])[1] // head_dim, head_dim, is_key)
                self._add(_join(name, child), linears[child], "column", (part,), name)
            heads = Part(sizes(linears[out])[0] // head_dim, head_dim)
            columns = {query, key, value}
        else:
            assert fused is not None
            width = sizes(linears[fused])[1]
            head_dim = _head_dim(module, width // 3)
            if head_dim is None or width % 3:
                raise PlanError(f"'{name}.{fused}' has {width} outputs, which are not three equal parts of whole heads")
            heads = Part(width // 3 // head_dim, head_dim)
            self._add(_join(name, fused), linears[fused], "column", (heads,) * 3, name)
            columns = {fused}
        self._add(_join(name, out), linears[out], "row", (heads,))
        self._scale(name, module, heads)
        for inner_name, _ in module.named_parameters():
            if inner_name.split(".")[0] not in linears:
                self.inner.add(_join(name, inner_name))
        return {*columns, out}

    def _gated(self, name: str, linears: dict[str, nn.Module]) -> set[str]:
        gate, up, down = (_first(linears, names) for names in (GATE, UP, DOWN))
        if not (gate and up and down):
            return set()
        parts = (Part(sizes(linears[down])[0]),)
        for child in (gate, up):
            self._add(_join(name, child), linears[child], "column", parts, name)
        self._add(_join(name, down), linears[down], "row", parts)
        return {gate, up, down}

    def _pairs(self, name: str, module: nn.Module, linears: dict[str, nn.Module]) -> set[str]:
        if isinstance(module, nn.Sequential):
            couples = list(_sequential_couples(module))
        else:
            names = list(linears)
            couples = [(names[0], names[1])] if len(names) == 2 and _probe(module, names[0], names[1]) else []
        used: set[str] = set()
        for first, second in couples:
            parts = (Part(sizes(linears[second])[0]),)
            self._add(_join(name, first), linears[first], "column", parts)
            self._add(_join(name, second), linears[second], "row", parts)
            used |= {first, second}
        return used

    def _single(self, name: str, module: nn.Module) -> None:
        in_block = any(name == block or name.startswith(f"{block}.") for block in find_blocks(self.model))
        last = [path for path, inner in self.model.named_modules() if is_linear(inner)][-1]
        self._add(name, module, "head" if name == last and not in_block else "gathered", (Part(sizes(module)[1]),))

    def _add(
        self, name: str, module: nn.Module, kind: Kind, parts: tuple[Part, ...], parent: str | None = None
    ) -> None:
        self.splits[name] = Split(name, kind, parts, parent, _is_turned(module))
        self.done |= {f"{name}.weight", f"{name}.bias"}

    def _scale(self, name: str, module: nn.Module, heads: Part) -> None:
        found = [key for key in HEAD_COUNTS if getattr(module, key, None) == heads.num_units]
        found += [key for key in WIDTHS if getattr(module, key, None) == heads.width]
        if found:
            self.scaled[name] = tuple(found)


def _sequential_couples(module: nn.Sequential) -> Iterator[tuple[str, str]]:
    """Linears of a chain with only element-wise layers between them, each used once."""
    open_name: str | None = None
    for name, child in module.named_children():
        if is_linear(child):
            if open_name is not None and sizes(module.get_submodule(open_name))[1] == sizes(child)[0]:
                yield open_name, name
                open_name = None
            else:
                open_name = name
        elif not isinstance(child, ELEMENT_WISE):
            open_name = None


def _probe(module: nn.Module, first: str, second: str) -> bool:
    """Whether halves of two linears give the whole result: compute both, on random values in float64."""
    inputs, middle = sizes(module.get_submodule(first))
    if middle != sizes(module.get_submodule(second))[0] or middle < 2:
        return False
    whole = _random_copy(module)
    halves = [_half(whole, first, second, index) for index in range(2)]
    value = torch.randn(2, 3, inputs, dtype=torch.float64)
    seen: list[Tensor] = []
    try:
        with torch.no_grad():
            expected = whole(value)
            tail = halves[1].get_submodule(second)
            tail_forward = tail.forward
            tail.forward = lambda hidden: seen.append(tail_forward(hidden)) or seen[-1]  # type: ignore[func-returns-value]
            halves[1](value)
            head = halves[0].get_submodule(second)
            head_forward = head.forward
            head.forward = lambda hidden: head_forward(hidden) + seen[0]
            found = halves[0](value)
    except Exception:  # a module that wants other arguments or shapes: not a pair that we can prove
        return False
    return len(seen) == 1 and isinstance(found, Tensor) and torch.allclose(found, expected, rtol=1e-9, atol=1e-9)


def _random_copy(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        made = copy.deepcopy(module).to_empty(device="cpu").double().eval()
        for tensor in (*made.parameters(), *made.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, dtype=torch.float64) + 0.1)
    return made


def _half(whole: nn.Module, first: str, second: str, index: int) -> nn.Module:
    half = copy.deepcopy(whole)
    column, row = half.get_submodule(first), half.get_submodule(second)
    middle = sizes(column)[1]
    begin, end = (0, middle // 2) if index == 0 else (middle // 2, middle)
    _narrow(column, 1 if _is_turned(column) else 0, begin, end)
    if getattr(column, "bias", None) is not None:
        column.bias = nn.Parameter(column.bias[begin:end])  # type: ignore[index]
    _narrow(row, 0 if _is_turned(row) else 1, begin, end)
    if index == 1 and getattr(row, "bias", None) is not None:
        nn.init.zeros_(row.bias)  # type: ignore[arg-type]
    return half


def _narrow(linear: nn.Module, dim: int, begin: int, end: int) -> None:
    assert isinstance(linear.weight, Tensor)
    linear.weight = nn.Parameter(linear.weight.narrow(dim, begin, end - begin).clone())
    if _is_turned(linear) and dim == 1:
        linear.nf = end - begin  # type: ignore[assignment]


def _head_dim(module: Any, width: int) -> int | None:
    found = getattr(module, "head_dim", None)
    if isinstance(found, int) and found > 0 and width % found == 0:
        return found
    for key in HEAD_COUNTS:
        count = getattr(module, key, None)
        if isinstance(count, int) and count > 0 and width % count == 0:
            return width // count
    return None


def _is_turned(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def _first(linears: dict[str, nn.Module], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in linears), None)


def _join(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent else child
