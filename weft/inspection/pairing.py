"""Finds how a model's linears and convolutions can be split over the tensor axes, without editing the model.

Two linears with only element-wise operations (or attention heads) between them make a pair. The first ("column") is
split by its outputs and the second ("row") by its inputs, and no communication is needed in between. Candidates are
attention and gated MLPs, found by the names of their projections, and modules with two linears. A candidate is *proved*
by computing it whole and in parts (`split_probe.py`). Only weft's own attention and the standard attention of
transformers are trusted by name, because they need more arguments than the probe can make up. A linear without a
partner is "gathered": it is split by outputs, which are then gathered. Convolutions are split by channels in the same
way, and make pairs in an `nn.Sequential` only. A matrix outside of a known layer, and attention that cannot be proved,
are refused with their name and the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from weft.errors import PlanError
from weft.inspection.blocks import find_blocks
from weft.inspection.module_key import module_key
from weft.inspection.sequential_pairs import CHANNEL_WISE, ELEMENT_WISE, reason_not_splittable, sequential_pairs
from weft.inspection.split_probe import (
    PairShares,
    SplitProof,
    has_transposed_weight,
    is_convolution,
    is_linear,
    linear_sizes,
    num_spatial_dims,
    prove_pair,
)
from weft.inspection.tensor_splits import Kind, Pairing, ScaledAttributes, Split, SplitPart, is_norm, stacked_intervals

QUERY, KEY, VALUE = ("q_proj", "query", "wq", "q"), ("k_proj", "key", "wk", "k"), ("v_proj", "value", "wv", "v")
FUSED = ("c_attn", "qkv", "Wqkv", "qkv_proj", "query_key_value")
OUT = ("o_proj", "out_proj", "c_proj", "proj", "wo", "dense", "out", "o")
GATE, UP, DOWN = ("gate_proj", "w1", "gate"), ("up_proj", "w3", "up"), ("down_proj", "w2", "down")
HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads")
KEY_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
WIDTHS = ("embed_dim", "split_size", "hidden_size", "all_head_size", "inner_dim", "dim", "n_embd")
KNOWN_ATTENTION = ("weft.models.", "transformers.models.")


def pair(model: nn.Module, proofs: dict[Any, SplitProof | str] | None = None) -> Pairing:
    """Returns the pairing of a model, or raises a PlanError that names the module that cannot be split.

    `proofs` caches the results of probes by module; pipeline stages of one model share it.
    """
    finder = _Finder(model, {} if proofs is None else proofs)
    for name, module in model.named_modules():
        finder.visit(name, module)
    finder.check_nothing_hidden()
    finder.check_ties()
    return finder.result()


class _Finder:
    def __init__(self, model: nn.Module, proofs: dict[Any, SplitProof | str]) -> None:
        self.model, self.proofs = model, proofs
        self.splits: dict[str, Split] = {}
        self.embeddings: list[str] = []
        self.inner: set[str] = set()
        self.scaled: dict[str, ScaledAttributes] = {}
        self.done: set[str] = set()
        self.places: dict[int, str] = {}
        self.blocks = tuple(find_blocks(model))
        layers = [name for name, module in model.named_modules() if is_linear(module) or is_convolution(module)]
        self.last = layers[-1] if layers else ""

    def visit(self, name: str, module: nn.Module) -> None:
        if isinstance(module, nn.MultiheadAttention):
            raise PlanError(
                f"'{name}' is an nn.MultiheadAttention, which keeps q, k and v in one raw parameter, so its heads "
                f"cannot be split from outside; use separate nn.Linear projections, or tensor.x = tensor.y = 1"
            )
        if isinstance(module, nn.modules.conv._ConvNd) and not is_convolution(module):
            raise PlanError(reason_not_splittable(name, module))
        if isinstance(module, nn.Embedding):
            self._embedding(name, module)
        convolutions = {child: inner for child, inner in module.named_children() if is_convolution(inner)}
        used = self._chain(name, module, convolutions, is_convolution, CHANNEL_WISE)
        for child in convolutions:
            if child not in used:
                self._add(
                    _join(name, child),
                    convolutions[child],
                    "gathered",
                    (SplitPart(linear_sizes(convolutions[child])[1]),),
                )
        linears = {child: inner for child, inner in module.named_children() if is_linear(inner)}
        if linears:
            used = (
                self._attention(name, module, linears)
                or self._gated(name, module, linears)
                or self._pairs(name, module, linears)
            )
            for child in linears:
                if child not in used:
                    self._single(_join(name, child), linears[child])

    def result(self) -> Pairing:
        return Pairing(self.splits, tuple(self.embeddings), frozenset(self.inner), self.scaled, self.blocks, self.model)

    def check_nothing_hidden(self) -> None:
        """Check that every matrix is in a known layer. Vectors (norms, biases, tokens) may stay whole."""
        for name, parameter in self.model.named_parameters():
            large = [size for size in parameter.shape if size > 1]
            module = self.model.get_submodule(name.rpartition(".")[0])
            if name in self.done or len(large) < 2:
                continue
            if parameter.dim() >= 3 and parameter.shape[0] == 1:
                continue  # a table of positions or tokens that is added, not multiplied
            raise PlanError(
                f"'{name}' {tuple(parameter.shape)} of {type(module).__name__} is a matrix outside any nn.Linear or "
                f"nn.Embedding, so weft cannot tell how it is used; put it into an nn.Linear, or use tensor.x = 1"
            )

    def check_ties(self) -> None:
        """Check that a weight that two layers share is split in the same way in both."""
        seen: dict[int, tuple[str, Any]] = {}
        layers = [(name, None) for name in self.embeddings] + [(s.module, s) for s in self.splits.values()]
        for name, split in layers:
            by_rows = split is None or split.kind in ("gathered", "head")
            how = None if by_rows or split is None else (split.kind, split.parts)
            weight = self.model.get_submodule(name).weight
            other, earlier = seen.setdefault(id(weight), (name, how))
            if earlier != how:
                raise PlanError(
                    f"'{other}' and '{name}' share one weight, but the tensor axes would split it in different ways; "
                    f"give each its own weight, or use tensor.x = tensor.y = 1"
                )

    # --- kinds of layers

    def _embedding(self, name: str, module: nn.Embedding) -> None:
        odd = [option for option in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, option)]
        if type(module).forward is not nn.Embedding.forward:
            odd = [f"the forward of {type(module).__name__}"]
        if odd:
            raise PlanError(
                f"the embedding '{name}' has {odd[0]}, which weft does not split over x; use a plain nn.Embedding (and "
                f"work on its result in another module), or tensor.x = tensor.y = 1"
            )
        self.embeddings.append(name)
        self.done.add(f"{name}.weight")

    def _attention(self, name: str, module: nn.Module, linears: dict[str, nn.Module]) -> set[str]:
        query, key, value = (_first(linears, names) for names in (QUERY, KEY, VALUE))
        fused, out = _first(linears, FUSED), _first(linears, OUT)
        if out is None or not (fused or (query and key and value)):
            return set()
        if query and key and value:
            fused = None
            columns = self._separate_heads(name, module, linears, (query, key, value))
        else:
            assert fused is not None
            columns = self._fused_heads(name, module, linears, fused)
        heads = next(iter(columns.values()))[0]
        keys = next(part for parts in reversed(columns.values()) for part in parts)
        if linear_sizes(linears[out])[0] != heads.width:
            raise PlanError(
                f"attention '{name}': its query heads have {heads.width} features but '{out}' takes "
                f"{linear_sizes(linears[out])[0]}, so weft cannot tell how its heads are laid out; use tensor.x = "
                f"tensor.y = 1"
            )
        scaled = _find_scaled(module, heads, keys)
        if _is_known(module, fused):
            proof = self._trust(name, module, {*columns, out}, heads.unit)
        else:
            found = self._prove(module, columns, out, (heads,), scaled)
            if isinstance(found, str):
                raise PlanError(
                    f"attention '{name}' ({type(module).__name__}) cannot be split by heads: {found}; take sizes from "
                    f"the projections' results or from self.num_heads and self.head_dim (not from the input's width), "
                    f"or use tensor.x = tensor.y = 1"
                )
            proof = found
        self.scaled[name] = scaled
        self._add_pair(name, linears, columns, out, (heads,), proof)
        return {*columns, out}

    def _separate_heads(
        self, name: str, module: nn.Module, linears: dict[str, nn.Module], names: tuple[str, str, str]
    ) -> dict[str, tuple[SplitPart, ...]]:
        head_dim = _head_dim(module, linear_sizes(linears[names[0]])[1])
        if head_dim is None:
            raise PlanError(f"'{name}': neither head_dim nor a number of heads is an attribute; add self.head_dim")
        return {
            child: (SplitPart(linear_sizes(linears[child])[1] // head_dim, head_dim, is_key),)
            for child, is_key in zip(names, (False, True, True), strict=True)
        }

    def _fused_heads(
        self, name: str, module: nn.Module, linears: dict[str, nn.Module], fused: str
    ) -> dict[str, tuple[SplitPart, ...]]:
        width = linear_sizes(linears[fused])[1]
        head_dim = _head_dim(module, width // 3)
        if head_dim is None or width % 3:
            raise PlanError(
                f"'{_join(name, fused)}' has {width} outputs, which are not three equal parts of whole heads; use "
                f"separate q, k and v projections, or tensor.x = tensor.y = 1"
            )
        return {fused: (SplitPart(width // 3 // head_dim, head_dim),) * 3}

    def _trust(self, name: str, module: nn.Module, used: set[str], head_dim: int) -> SplitProof:
        """Returns the proof of a known attention class, which has projections and norms of each head, nothing else."""
        inner = set()
        for path, parameter in module.named_parameters():
            owner = path.rpartition(".")[0]
            if owner in used:
                continue
            if not is_norm(module.get_submodule(owner)) or tuple(parameter.shape) != (head_dim,):
                raise PlanError(
                    f"'{_join(name, path)}' {tuple(parameter.shape)} is inside attention and not a norm of one head "
                    f"({head_dim} features), so weft cannot tell how it is split; use tensor.x = tensor.y = 1"
                )
            inner.add(path)
        return SplitProof(frozenset(inner), takes_only_input=True)

    def _gated(self, name: str, module: nn.Module, linears: dict[str, nn.Module]) -> set[str]:
        gate, up, down = (_first(linears, names) for names in (GATE, UP, DOWN))
        if not (gate and up and down):
            return set()
        return self._try(name, module, linears, (gate, up), down)

    def _pairs(self, name: str, module: nn.Module, linears: dict[str, nn.Module]) -> set[str]:
        names = list(linears)
        if type(module).forward is not nn.Sequential.forward:
            return self._try(name, module, linears, (names[0],), names[1]) if len(names) == 2 else set()
        return self._chain(name, module, linears, is_linear, ELEMENT_WISE)

    def _chain(
        self,
        name: str,
        module: nn.Module,
        layers: dict[str, nn.Module],
        is_layer: Callable[[nn.Module], bool],
        between: tuple[type[nn.Module], ...],
    ) -> set[str]:
        """Adds the pairs of an nn.Sequential, which follow from the classes of the modules between two layers.

        Returns the names of the layers in pairs.
        """
        if type(module).forward is not nn.Sequential.forward:
            return set()
        used: set[str] = set()
        for first, second in sequential_pairs(module, is_layer, between):
            parts = (SplitPart(linear_sizes(layers[second])[0]),)
            self._add_pair(name, layers, {first: parts}, second, parts, SplitProof(frozenset(), takes_only_input=False))
            used |= {first, second}
        return used

    def _try(
        self, name: str, module: nn.Module, linears: dict[str, nn.Module], columns: tuple[str, ...], row: str
    ) -> set[str]:
        """Add a pair if it can be proved. Returns the names of its linears, or an empty set."""
        parts = (SplitPart(linear_sizes(linears[row])[0]),)
        if parts[0].num_units < 2 or any(linear_sizes(linears[column])[1] != parts[0].width for column in columns):
            return set()
        proof = self._prove(module, dict.fromkeys(columns, parts), row, parts, ScaledAttributes((), 0))
        if isinstance(proof, str):
            return set()
        self._add_pair(name, linears, dict.fromkeys(columns, parts), row, parts, proof)
        return {*columns, row}

    def _prove(
        self,
        module: nn.Module,
        columns: dict[str, tuple[SplitPart, ...]],
        row: str,
        row_parts: tuple[SplitPart, ...],
        scaled: ScaledAttributes,
    ) -> SplitProof | str:
        """Probe a pair, or return the cached result of a module with the same key."""
        key = module_key(module), tuple(columns.items()), row, row_parts, scaled
        if key not in self.proofs:
            self.proofs[key] = _prove(module, columns, row, row_parts, scaled)
        return self.proofs[key]

    def _single(self, name: str, module: nn.Module) -> None:
        in_block = any(name == block or name.startswith(f"{block}.") for block in self.blocks)
        self._add(
            name,
            module,
            "head" if name == self.last and not in_block else "gathered",
            (SplitPart(linear_sizes(module)[1]),),
        )

    def _add_pair(
        self,
        name: str,
        linears: dict[str, nn.Module],
        columns: dict[str, tuple[SplitPart, ...]],
        row: str,
        row_parts: tuple[SplitPart, ...],
        proof: SplitProof,
    ) -> None:
        for child, parts in columns.items():
            self._add(_join(name, child), linears[child], "column", parts, name if proof.takes_only_input else None)
        self._add(_join(name, row), linears[row], "row", row_parts)
        self.inner |= {_join(name, path) for path in proof.inner}

    def _add(
        self, name: str, module: nn.Module, kind: Kind, parts: tuple[SplitPart, ...], parent: str | None = None
    ) -> None:
        other = self.places.setdefault(id(module), name)
        if other != name:
            raise PlanError(
                f"'{other}' and '{name}' are one layer in two places, which the tensor axes do not split; "
                f"give each place its own, or use tensor.x = tensor.y = 1"
            )
        self.splits[name] = Split(name, kind, parts, parent, has_transposed_weight(module), num_spatial_dims(module))
        self.done |= {f"{name}.weight", f"{name}.bias"}


def _prove(
    module: nn.Module,
    columns: dict[str, tuple[SplitPart, ...]],
    row: str,
    row_parts: tuple[SplitPart, ...],
    scaled: ScaledAttributes,
) -> SplitProof | str:
    """Probe a pair, split into the smallest number of parts that its units allow."""
    every = [part for parts in (*columns.values(), row_parts) for part in parts]
    num_units = math.gcd(*(part.num_units for part in every if part.num_units > 1 or not part.is_key))
    # Parts of features need not be equal. A single head is not split, but the probe still checks other parameters.
    divisors = (number for number in range(2, num_units + 1) if num_units % number == 0)
    degree = 2 if every[0].unit == 1 else next(divisors, 1)
    shares = PairShares(
        degree,
        {name: partial(stacked_intervals, parts, degree) for name, parts in columns.items()},
        row,
        partial(stacked_intervals, row_parts, degree),
        scaled.apply,
    )
    return prove_pair(module, shares)


def _is_known(module: nn.Module, fused: str | None) -> bool:
    """Is this an attention class that is trusted by its names, without a probe?

    These are weft's, and transformers' with separate projections or GPT-2's fused one. The layout of q, k and v in
    other fused projections of transformers varies.
    """
    return type(module).__module__.startswith(KNOWN_ATTENTION) and fused in (None, "c_attn")


def _find_scaled(module: nn.Module, heads: SplitPart, keys: SplitPart) -> ScaledAttributes:
    found = [key for key in HEAD_COUNTS if getattr(module, key, None) == heads.num_units]
    found += [key for key in WIDTHS if getattr(module, key, None) == heads.width]
    found += [key for key in KEY_HEAD_COUNTS if getattr(module, key, None) == keys.num_units]
    return ScaledAttributes(tuple(found), keys.num_units)


def _head_dim(module: Any, width: int) -> int | None:
    found = getattr(module, "head_dim", None)
    if isinstance(found, int) and found > 0 and width % found == 0:
        return found
    for key in HEAD_COUNTS:
        count = getattr(module, key, None)
        if isinstance(count, int) and count > 0 and width % count == 0:
            return width // count
    return None


def _first(linears: dict[str, nn.Module], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in linears), None)


def _join(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent else child
