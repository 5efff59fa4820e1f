"""Finds how the heads of an attention module lie in its projections, by the names of the projections and attributes.

The result is a candidate: `pairing.py` proves it by computing the module in parts. Only weft's own attention and the
standard attention of transformers are trusted by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from weft.inspection.split_probe import SplitProof, linear_sizes
from weft.inspection.tensor_splits import ScaledAttributes, SplitPart, is_norm

QUERY, KEY, VALUE = ("q_proj", "query", "wq", "q"), ("k_proj", "key", "wk", "k"), ("v_proj", "value", "wv", "v")
FUSED = ("c_attn", "qkv", "Wqkv", "qkv_proj", "query_key_value")
OUT = ("o_proj", "out_proj", "c_proj", "proj", "wo", "dense", "out", "o")
HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads")
KEY_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
WIDTHS = ("embed_dim", "split_size", "hidden_size", "all_head_size", "inner_dim", "dim", "n_embd")
SECOND_INPUTS = ("key_value_states", "encoder_hidden_states")
KNOWN_ATTENTION = ("weft.models.", "transformers.models.")


@dataclass(frozen=True)
class AttentionHeads:
    """The projections of an attention module: the parts of each column's outputs, and the name of the row `out`.

    `heads` are the query heads, `scaled` the attributes that count heads, and `takes_two_inputs` says whether its
    forward has an argument for other hidden states to attend to.
    """

    columns: dict[str, tuple[SplitPart, ...]]
    out: str
    heads: SplitPart
    scaled: ScaledAttributes
    is_known: bool
    takes_two_inputs: bool

    def tables(self, module: nn.Module) -> frozenset[str]:
        """Returns the names of parameters [..., heads], such as relative positions, with a column for each head."""
        return frozenset(
            path
            for path, parameter in module.named_parameters()
            if path.rpartition(".")[0] not in (*self.columns, self.out)
            and parameter.dim() > 1
            and parameter.shape[-1] == self.heads.num_units
        )

    def trust(self, module: nn.Module) -> SplitProof | str:
        """Returns the proof of a known attention class.

        Or the reason, if it has more than norms of each head and tables with a column for each head.
        """
        inner, tables = set(), self.tables(module)
        for path, parameter in module.named_parameters():
            owner = path.rpartition(".")[0]
            if owner in (*self.columns, self.out) or path in tables:
                continue
            if not is_norm(module.get_submodule(owner)) or tuple(parameter.shape) != (self.heads.unit,):
                shape = tuple(parameter.shape)
                return f"its parameter '{path}' {shape} is not in a norm of one head ({self.heads.unit} features)"
            inner.add(path)
        return SplitProof(frozenset(inner), not self.takes_two_inputs, tables)


def find_attention(module: nn.Module, linears: Mapping[str, nn.Module]) -> AttentionHeads | str | None:
    """Returns the heads of an attention module, None if it is none, or the reason why its heads are not known."""
    query, key, value = (first_named(linears, names) for names in (QUERY, KEY, VALUE))
    fused, out = first_named(linears, FUSED), first_named(linears, OUT)
    if out is None or not (fused or (query and key and value)):
        return None
    if query and key and value:
        fused = None
        columns = _separate_heads(module, linears, (query, key, value))
    else:
        assert fused is not None
        columns = _fused_heads(module, linears, fused)
    if isinstance(columns, str):
        return columns
    heads = next(iter(columns.values()))[0]
    keys = next(part for parts in reversed(columns.values()) for part in parts)
    if linear_sizes(linears[out])[0] != heads.width:
        return f"its query heads have {heads.width} features, but '{out}' takes {linear_sizes(linears[out])[0]}"
    # The layout of q, k and v in other fused projections of transformers varies.
    is_known = type(module).__module__.startswith(KNOWN_ATTENTION) and fused in (None, "c_attn")
    arguments = inspect.signature(module.forward).parameters
    has_second = any(name in arguments for name in SECOND_INPUTS)
    return AttentionHeads(columns, out, heads, _find_scaled(module, heads, keys), is_known, has_second)


def mixes_tokens(linears: Iterable[str]) -> bool:
    """Do the names of a module's linears say that it is (a part of) attention?"""
    return any(name in linears for name in (*QUERY, *FUSED))


def first_named(linears: Iterable[str], names: Sequence[str]) -> str | None:
    """Returns the first of `names` that is among the names of linears."""
    return next((name for name in names if name in linears), None)


def _separate_heads(
    module: nn.Module, linears: Mapping[str, nn.Module], names: tuple[str, str, str]
) -> dict[str, tuple[SplitPart, ...]] | str:
    head_dim = _head_dim(module, linear_sizes(linears[names[0]])[1])
    if head_dim is None:
        return "neither head_dim nor a number of heads is among its attributes"
    return {
        child: (SplitPart(linear_sizes(linears[child])[1] // head_dim, head_dim, is_key),)
        for child, is_key in zip(names, (False, True, True), strict=True)
    }


def _fused_heads(
    module: nn.Module, linears: Mapping[str, nn.Module], fused: str
) -> dict[str, tuple[SplitPart, ...]] | str:
    width = linear_sizes(linears[fused])[1]
    head_dim = _head_dim(module, width // 3)
    if head_dim is None or width % 3:
        return f"the {width} outputs of '{fused}' are not three equal parts of whole heads"
    return {fused: (SplitPart(width // 3 // head_dim, head_dim),) * 3}


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
