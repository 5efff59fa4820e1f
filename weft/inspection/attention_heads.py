"""Finds how the heads of an attention module lie in its projections, by the names of the projections and attributes.

The result is a candidate: `pairing.py` proves it by computing the module in parts. Only weft's own attention and the
standard attention of transformers are trusted by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from weft.inspection.split_probe import SplitProof, is_linear, linear_sizes
from weft.inspection.tensor_splits import ScaledAttributes, SplitPart, is_norm

QUERY = ("q_proj", "query", "wq", "q_lin", "q")
KEY = ("k_proj", "key", "wk", "k_lin", "k")
VALUE = ("v_proj", "value", "wv", "v_lin", "v")
FUSED = ("c_attn", "qkv", "Wqkv", "qkv_proj", "query_key_value")
OUT = ("o_proj", "out_proj", "c_proj", "proj", "wo", "dense", "out_lin", "out", "o")
HEAD_SIZES = ("head_dim", "head_size")
HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads")
KEY_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
WIDTHS = ("embed_dim", "split_size", "hidden_size", "all_head_size", "inner_dim", "dim", "n_embd")
SECOND_INPUTS = ("key_value_states", "encoder_hidden_states")
NO_ARGUMENT = ("attention_mask", "alibi")  # that may be None
OWN_ATTENTION = "weft.models."
KNOWN_ATTENTION = (OWN_ATTENTION, "transformers.models.")  # if q, k and v are separate: layouts of fused ones vary


@dataclass(frozen=True)
class AttentionHeads:
    """The projections of an attention module: the parts of each column's outputs, and the name of the row `out`.

    `heads` are the query heads, and `scaled` the attributes that count heads. `is_known`: it is trusted by its names.
    `takes_two_inputs`: it is, and its forward has an argument for other hidden states to attend to.
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
            if not is_linear(module.get_submodule(path.rpartition(".")[0]))
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


def find_attention(module: nn.Module, linears: Mapping[str, nn.Module]) -> list[AttentionHeads] | str:
    """Returns how the heads of an attention module may lie, most common first; empty if it is not attention.

    Or the reason why its heads are not known.
    """
    query, key, value = (first_named(linears, names) for names in (QUERY, KEY, VALUE))
    fused, out = first_named(linears, FUSED), first_named(linears, OUT)
    if out is None or not (fused or (query and key and value)):
        return []
    width = linear_sizes(linears[out])[0]
    head_dim = _head_dim(module, width)
    if head_dim is None:
        return "neither head_dim nor a number of heads is among its attributes"
    heads = SplitPart(width // head_dim, head_dim)
    layouts: list[dict[str, tuple[SplitPart, ...]]]
    if query and key and value:
        fused = None
        sizes = [linear_sizes(linears[name])[1] for name in (query, key, value)]
        if sizes[0] != width or any(size % head_dim for size in sizes):
            return f"its projections have {sizes} outputs, but '{out}' takes {width} of heads of {head_dim}"
        layouts = [
            {
                name: (SplitPart(size // head_dim, head_dim, name != query),)
                for name, size in zip((query, key, value), sizes, strict=True)
            }
        ]
    else:
        assert fused is not None
        layouts = [{fused: parts} for parts in _fused_layouts(linear_sizes(linears[fused])[1], heads)]
        if not layouts:
            return f"the {linear_sizes(linears[fused])[1]} outputs of '{fused}' are not q, k and v of whole heads"
    is_known = type(module).__module__.startswith(KNOWN_ATTENTION if fused is None else OWN_ATTENTION)
    arguments = inspect.signature(module.forward).parameters
    has_second = is_known and any(name in arguments for name in SECOND_INPUTS)
    return [
        AttentionHeads(columns, out, heads, scaled, is_known, has_second)
        for columns in layouts
        for scaled in _find_scaled(module, heads, columns)
    ]


def _fused_layouts(width: int, heads: SplitPart) -> list[tuple[SplitPart, ...]]:
    """Returns the layouts of q, k and v in one projection: one after another, or next to each other for each head.

    With fewer key heads, the heads that share one key head lie next to each other (as in Falcon).
    """
    num_keys, rest = divmod(width // heads.unit - heads.num_units, 2)
    if width % heads.unit or rest or num_keys < 2 or heads.num_units % num_keys:
        return []  # a single key head in a fused projection cannot be on several ranks beside different query heads
    keys = SplitPart(num_keys, heads.unit)
    return [(heads, keys, keys), (SplitPart(num_keys, width // num_keys),)]


def is_named_attention(linears: Iterable[str]) -> bool:
    """Do the names of a module's linears say that it is (a part of) attention?"""
    return any(name in linears for name in (*QUERY, *FUSED))


def first_named(linears: Iterable[str], names: Sequence[str]) -> str | None:
    """Returns the first of `names` that is among the names of linears."""
    return next((name for name in names if name in linears), None)


def _find_scaled(
    module: nn.Module, heads: SplitPart, columns: Mapping[str, tuple[SplitPart, ...]]
) -> list[ScaledAttributes]:
    """Returns the attributes that count heads: those of the module, and then also those of its config."""
    num_keys = list(columns.values())[-1][-1].num_units
    found = [key for key in HEAD_COUNTS if getattr(module, key, None) == heads.num_units]
    found += [key for key in WIDTHS if getattr(module, key, None) == heads.width]
    found += [key for key in KEY_HEAD_COUNTS if getattr(module, key, None) == num_keys]
    config = getattr(module, "config", None)
    counts = ((HEAD_COUNTS, heads.num_units), (KEY_HEAD_COUNTS, num_keys))
    of_config = tuple(key for keys, count in counts for key in keys if getattr(config, key, None) == count)
    own = ScaledAttributes(tuple(found), num_keys)
    return [own, replace(own, of_config=of_config)] if of_config else [own]


def made_up_arguments(module: nn.Module, head_dim: int, num_tokens: int) -> dict[str, Any]:
    """Returns arguments for the forward of an attention module beside its input: rotations, and None for masks.

    None is not given for what the module's config turns on (`config.alibi`).
    """
    config = getattr(module, "config", None)
    generator = torch.Generator().manual_seed(1)
    given: dict[str, Any] = {}
    for name, argument in inspect.signature(type(module).forward).parameters.items():
        if name == "position_embeddings":
            angles = torch.randn(2, 1, num_tokens, head_dim, dtype=torch.float64, generator=generator)
            given[name] = (angles[0].cos(), angles[1].sin())
        elif name in NO_ARGUMENT and argument.default is argument.empty and not getattr(config, name, False):
            given[name] = None
    return given


def _head_dim(module: Any, width: int) -> int | None:
    for key in HEAD_SIZES:
        found = getattr(module, key, None)
        if isinstance(found, int) and found > 0 and width % found == 0:
            return found
    for key in HEAD_COUNTS:
        count = getattr(module, key, None)
        if isinstance(count, int) and count > 0 and width % count == 0:
            return width // count
    return None
