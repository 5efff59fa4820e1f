"""Finds how a model's linears and convolutions can be split over the tensor axes, without editing the model.

Two linears with only element-wise operations (or attention heads) between them make a pair. The first ("column") is
split by its outputs and the second ("row") by its inputs, and no communication is needed in between. Candidates are
attention and gated MLPs, found by the names of their projections, and modules with two linears. A candidate is *proved*
by computing it whole and in parts (`split_probe.py`). Only weft's own attention and the standard attention of
transformers are trusted by name, because they need more arguments than the probe can make up. A linear without a
partner, also one of attention that cannot be proved, is "gathered": it is split by outputs, which are then gathered.
Convolutions are split by channels in the same way, and make pairs in an `nn.Sequential` only.

What cannot be split (a matrix outside of a known layer, a grouped convolution) is left whole: every rank of x holds it
and computes with it alike, which is exact for any module outside of a pair. The pairing lists it with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from weft.errors import PlanError
from weft.inspection.attention_heads import (
    AttentionHeads,
    find_attention,
    first_named,
    is_named_attention,
    made_up_arguments,
)
from weft.inspection.blocks import find_blocks
from weft.inspection.embedding_lookup import reason_lookup_not_split
from weft.inspection.logits_use import find_logits_use
from weft.inspection.module_key import module_key
from weft.inspection.sequential_pairs import CHANNEL_WISE, ELEMENT_WISE, reason_not_splittable, sequential_pairs
from weft.inspection.split_probe import (
    MAX_PROBED_WIDTH,
    NUM_TOKENS,
    PROBED_WIDTH,
    PairShares,
    SplitProof,
    has_transposed_weight,
    is_convolution,
    is_linear,
    linear_sizes,
    mixes_tokens,
    narrowed,
    num_spatial_dims,
    prove_pair,
)
from weft.inspection.tensor_splits import Kind, Pairing, ScaledAttributes, Split, SplitPart, stacked_intervals

GATE, UP, DOWN = ("gate_proj", "w1", "gate"), ("up_proj", "w3", "up"), ("down_proj", "w2", "down")


def pair(model: nn.Module, proofs: dict[Any, SplitProof | str] | None = None) -> Pairing:
    """Returns the pairing of a model, or raises a PlanError that names a weight that would be split in two ways.

    `proofs` caches the results of probes by module; pipeline stages of one model share it.
    """
    finder = _Finder(model, {} if proofs is None else proofs)
    for name, module in model.named_modules():
        finder.visit(name, module)
    finder.resolve_ties()
    finder.check_logits()
    finder.check_tokens()
    finder.list_whole_matrices()
    return finder.result()


class _Finder:
    def __init__(self, model: nn.Module, proofs: dict[Any, SplitProof | str]) -> None:
        self.model, self.proofs = model, proofs
        self.splits: dict[str, Split] = {}
        self.embeddings: list[str] = []
        self.inner: set[str] = set()
        self.tables: set[str] = set()
        self.assumption: str | None = None
        self.scaled: dict[str, ScaledAttributes] = {}
        self.kept: dict[str, str] = {}
        self.mixers: dict[str, str] = {}
        self.mixing: dict[Any, bool] = {}  # results of `mixes_tokens`
        self.done: set[str] = set()
        self.places: dict[int, Kind] = {}
        self.names = {id(module): name for name, module in model.named_modules()}
        self.blocks = tuple(find_blocks(model))
        layers = [name for name, module in model.named_modules() if is_linear(module) or is_convolution(module)]
        self.last = layers[-1] if layers else ""

    def visit(self, name: str, module: nn.Module) -> None:
        if any(name.startswith(f"{whole}.") for whole in self.kept):
            return
        if isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
            self.kept[name] = f"{type(module).__name__} reads its parameters without calling layers"
            return
        if isinstance(module, nn.modules.conv._ConvNd) and not is_convolution(module):
            self.kept[name] = reason_not_splittable(module)
            return
        if isinstance(module, nn.Embedding) and f"{name}.weight" not in self.tables:
            self._embedding(name, module)
        children = {child: inner for child, inner in module.named_children() if _join(name, child) not in self.kept}
        convolutions = {child: inner for child, inner in children.items() if is_convolution(inner)}
        used = self._chain(name, module, convolutions, is_convolution, CHANNEL_WISE)
        for child, inner in convolutions.items():
            if child not in used:
                self._add(_join(name, child), inner, "gathered", (SplitPart(linear_sizes(inner)[1]),))
        linears = {child: inner for child, inner in children.items() if is_linear(inner)}
        if linears:
            used = (
                self._attention(name, module, linears)
                or self._gated(name, module, linears)
                or self._pairs(name, module, linears)
            )
            for child in linears:
                if child not in used:
                    whole = _join(name, child)
                    kind: Kind = "head" if whole == self.last and not self._is_in_block(whole) else "gathered"
                    self._add(whole, linears[child], kind, (SplitPart(linear_sizes(linears[child])[1]),))

    def result(self) -> Pairing:
        return Pairing(
            self.splits,
            tuple(self.embeddings),
            frozenset(self.inner),
            self.scaled,
            self.blocks,
            self.kept,
            self.mixers,
            self._places_of_tied(),
            frozenset(self.tables),
            self.assumption,
            self.model,
        )

    def check_logits(self) -> None:
        """Gather the logits if the model does anything with them that needs all classes."""
        for name, split in self.splits.items():
            if split.kind != "head":
                continue
            use = find_logits_use(self.model, self.model.get_submodule(name))
            self.assumption = use.assumption or self.assumption
            if use.reason:
                self.splits[name] = replace(split, kind="gathered")

    def check_tokens(self) -> None:
        """List modules in blocks whose linears are gathered, and in which tokens are seen to depend on each other."""
        for name, split in list(self.splits.items()):
            parent = name.rpartition(".")[0]
            if split.kind != "gathered" or split.num_spatial or parent in self.mixers or not self._is_in_block(parent):
                continue
            if any(other.kind == "column" and other.module.startswith(f"{parent}.") for other in self.splits.values()):
                continue  # tokens may meet between a column and its row, which get whole sequences
            module = self.model.get_submodule(parent)
            width = linear_sizes(self.model.get_submodule(name))[0]
            key = module_key(module), width
            if key not in self.mixing:
                self.mixing[key] = mixes_tokens(module, width, made_up_arguments(module, width, NUM_TOKENS))
            if self.mixing[key]:
                self.mixers[parent] = "its tokens depend on each other, and weft does not know it as attention"

    def _is_in_block(self, name: str) -> bool:
        return any(name == block or name.startswith(f"{block}.") for block in self.blocks)

    def list_whole_matrices(self) -> None:
        """List the matrices outside of split layers. Vectors (norms, biases, tokens) are not worth a line."""
        tied = self._places_of_tied()
        for name, parameter in self.model.named_parameters():
            owner, _, _ = name.rpartition(".")
            large = [size for size in parameter.shape if size > 1]
            if tied.get(name, name) in self.done or len(large) < 2:
                continue
            if parameter.dim() >= 3 and parameter.shape[0] == 1:
                continue  # a table of positions or tokens that is added, not multiplied
            if not any(owner == whole or owner.startswith(f"{whole}.") for whole in self.kept):
                module = type(self.model.get_submodule(owner)).__name__
                self.kept[name] = f"a matrix of {module} outside any layer that weft can split"

    def resolve_ties(self) -> None:
        """Check that a weight that several layers share is split in the same way in all of them.

        If not, the layers are left whole; a pair cannot be, and raises a PlanError.
        """
        ways: dict[str, Any] = dict.fromkeys(self.embeddings, "rows")
        for split in self.splits.values():
            ways[split.module] = "rows" if split.kind in ("gathered", "head") else (split.kind, split.parts)
        places: dict[int, list[tuple[str, Any]]] = {}
        for name, module in self.model.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None and parameter.dim() > 1:
                    places.setdefault(id(parameter), []).append((name, ways.get(name, "whole")))
        for layers in places.values():
            if len({way for _, way in layers}) > 1:
                self._leave_tied_whole(layers)

    def _leave_tied_whole(self, layers: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in layers]
        if any(way not in ("rows", "whole") for _, way in layers):
            raise PlanError(
                f"'{names[0]}' and '{names[1]}' share one weight, but the tensor axes would split it in different "
                f"ways; give each its own weight, or use tensor.x = tensor.y = 1"
            )
        for name in names:
            others = [other for other in names if other != name]
            if self.splits.pop(name, None) is None and name not in self.embeddings:
                continue  # it is whole already
            self.embeddings = [one for one in self.embeddings if one != name]
            self.done -= {f"{name}.weight", f"{name}.bias"}
            self.kept[name] = f"its weight is also that of '{others[0]}', which is left whole"

    def _places_of_tied(self) -> dict[str, str]:
        """Returns the name of a parameter in the layer that splits it, by its own name where that is another one."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        found: dict[str, str] = {}
        for layer in (*self.embeddings, *self.splits):
            for leaf, parameter in self.model.get_submodule(layer)._parameters.items():
                if parameter is not None and names[id(parameter)] != f"{layer}.{leaf}":
                    found.setdefault(names[id(parameter)], f"{layer}.{leaf}")
        return found

    # --- kinds of layers

    def _embedding(self, name: str, module: nn.Embedding) -> None:
        reason = reason_lookup_not_split(module)
        if reason is not None:
            self.kept[name] = reason
            return
        self.embeddings.append(name)
        self.done.add(f"{name}.weight")

    def _attention(self, name: str, module: nn.Module, linears: dict[str, nn.Module]) -> set[str]:
        candidates = find_attention(module, linears)
        if isinstance(candidates, str):
            self.mixers[name] = candidates
            return set()
        for found in candidates:
            proof = found.trust(module) if found.is_known else self._prove_heads(module, found)
            if isinstance(proof, str):
                self.mixers.setdefault(name, proof)  # unless another layout fits, its linears are gathered
                continue
            self.mixers.pop(name, None)
            self.scaled[name] = found.scaled
            if found.takes_two_inputs:
                self.mixers[name] = "it may attend to a second input"
            self._add_pair(name, linears, found.columns, found.out, (found.heads,), proof)
            return {*found.columns, found.out}
        if not candidates and is_named_attention(linears):
            self.mixers[name] = "it has projections of attention and no output projection"
        return set()

    def _prove_heads(self, module: nn.Module, found: AttentionHeads) -> SplitProof | str:
        proof = self._prove(module, found.columns, found.out, (found.heads,), found.scaled)
        tables = found.tables(module)
        if isinstance(proof, str) and tables:
            proof = self._prove(module, found.columns, found.out, (found.heads,), found.scaled, tables)
        return proof

    def _gated(self, name: str, module: nn.Module, linears: dict[str, nn.Module]) -> set[str]:
        gate, up, down = (first_named(linears, names) for names in (GATE, UP, DOWN))
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
        part = SplitPart(linear_sizes(linears[row])[0])
        widths = {column: linear_sizes(linears[column])[1] for column in columns}
        if part.num_units < 2 or any(width % part.width for width in widths.values()):
            return set()
        # A column may have several parts, one after another: gate and up in one linear.
        parts = {column: (part,) * (width // part.width) for column, width in widths.items()}
        proof: SplitProof | str = "not tried"
        if part.width > MAX_PROBED_WIDTH:
            few = SplitPart(PROBED_WIDTH)
            narrow = narrowed(module, {linears[column]: len(own) for column, own in parts.items()}, linears[row])
            fewer = {column: (few,) * len(own) for column, own in parts.items()}
            proof = self._prove(narrow, fewer, row, (few,), ScaledAttributes((), 0))
        if isinstance(proof, str):  # also a module that names its width: then the probe needs all of it
            proof = self._prove(module, parts, row, (part,), ScaledAttributes((), 0))
        if isinstance(proof, str):
            return set()
        self._add_pair(name, linears, parts, row, (part,), proof)
        return {*columns, row}

    def _prove(
        self,
        module: nn.Module,
        columns: dict[str, tuple[SplitPart, ...]],
        row: str,
        row_parts: tuple[SplitPart, ...],
        scaled: ScaledAttributes,
        tables: frozenset[str] = frozenset(),
    ) -> SplitProof | str:
        """Probe a pair, or return the cached result of a module with the same key.

        It is split into the smallest number of parts that its units allow.
        """
        key = module_key(module), tuple(columns.items()), row, row_parts, scaled, tables
        if key not in self.proofs:
            every = [part for parts in (*columns.values(), row_parts) for part in parts]
            num_units = math.gcd(*(part.num_units for part in every if part.num_units > 1 or not part.is_key))
            # Parts of features need not be equal. One head is not split, but the probe still checks other parameters.
            divisors = (number for number in range(2, num_units + 1) if num_units % number == 0)
            degree = 2 if every[0].unit == 1 else next(divisors, 1)
            shares = PairShares(
                degree,
                {name: partial(stacked_intervals, parts, degree) for name, parts in columns.items()},
                row,
                partial(stacked_intervals, row_parts, degree),
                scaled.apply,
                tables,
                made_up_arguments(module, row_parts[0].unit, NUM_TOKENS),
            )
            self.proofs[key] = prove_pair(module, shares)
        return self.proofs[key]

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
        self.tables |= {_join(name, path) for path in proof.tables}
        self.done |= self.tables

    def _add(
        self, name: str, module: nn.Module, kind: Kind, parts: tuple[SplitPart, ...], parent: str | None = None
    ) -> None:
        name = self.names[id(module)]
        other = self.places.setdefault(id(module), kind)
        if name in self.splits and other == kind == "gathered":
            return  # one layer in two places
        if name in self.splits:
            raise PlanError(
                f"'{name}' is one layer in two places and part of a pair, which the tensor axes do not split; give "
                f"each place its own, or use tensor.x = tensor.y = 1"
            )
        self.splits[name] = Split(name, kind, parts, parent, has_transposed_weight(module), num_spatial_dims(module))
        self.done |= {f"{name}.{leaf}" for leaf in module._parameters}


def _join(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent else child
