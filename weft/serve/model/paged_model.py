"""The forward of weft's language models over pages of the key-value cache: the model's own modules and weights.

    embed -> in each block: norm, project to q, k, v, store k and v, attend, project; norm, MLP or experts -> norm, head

Projections that read the same input are one matmul: their weights are made to lie end to end, and the modules' own
parameters become views of them, so that no weight is held twice and the modules work as before. Elementwise steps are
the functions of `fused.py`, which are kernels on GPUs. A rank may hold some of the blocks, and parts of each block's
weights (`split_layers.py`); keys and values in its cache are those of its own blocks and heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.models import GPT2, Decoder
from weft.models.attention import RMSNorm
from weft.models.decoder import Attention, DecoderLayer, rotary_tables
from weft.models.experts import SparseMLP, SwiGLU
from weft.models.gpt2 import GPT2MLP, GPT2Layer
from weft.serve.attention.batch import PagedBatch
from weft.serve.attention.layer_cache import CacheFormat, CacheSizes, LayerCache, PlainFormat
from weft.serve.attention.shared_memory import has_room_for_tiles, shared_bytes
from weft.serve.model.fused import is_for_whole_kernel, rotate_and_store, rotate_by_angles, whole_attention
from weft.serve.model.split_layers import (
    ModelAxes,
    add_experts,
    add_row,
    column,
    gathered_features,
    gathered_logits,
    lookup,
    norm_column,
    norm_of,
    summed,
)
from weft.serve.parallel.rank_part import refuse_model
from weft.serve.weights.cpu_products import HALF_DTYPES, TAKES_VECTORS, takes_vectors
from weft.serve.weights.packed_experts import PackedStack
from weft.serve.weights.packed_linear import PackedLinear, end_to_end, join_packed
from weft.serve.weights.streamed_weights import StreamedWeights

Transform = Callable[[Tensor], Tensor]


@dataclass
class PagedBlock:
    """One block of a model. `head_norms` of q and k are None where the model has none."""

    input_norm: nn.Module
    projection: nn.Linear  # to q, k and v end to end
    output: nn.Linear
    add_mlp: Transform  # the residual stream [tokens, hidden] -> plus the MLP of its norm
    head_dim: int
    num_heads: int
    num_key_heads: int
    head_norms: tuple[RMSNorm, RMSNorm] | None
    window: int | None
    mlp_linears: tuple[nn.Linear, ...]  # that `add_mlp` computes with
    layer: nn.Module  # of the model, which this is made of

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        """All linears but those of experts."""
        return self.projection, self.output, *self.mlp_linears


class PagedModel:
    """A Decoder or GPT2 that computes tokens of many requests at once, with their keys and values in pages.

    `model` may be a rank's part: blocks of other stages are missing (nn.Identity), and the rest is cut over `axes`.
    """

    keeps_pages = True

    def __init__(
        self,
        model: nn.Module,
        context_length: int,
        axes: ModelAxes = ModelAxes(),  # noqa: B008
        cache_format: CacheFormat | None = None,
        device: torch.device | None = None,
        streamed: StreamedWeights | None = None,
    ) -> None:
        """`device`: where it computes, if some of its weights are elsewhere. `streamed` copies them there in time."""
        if not isinstance(model, Decoder | GPT2):
            raise ConfigError(
                f"the engine cannot serve a {type(model).__name__}; it serves Decoder and GPT2 of weft.models, which "
                f"load_for_generation gives for run folders and Hugging Face folders"
            )
        refuse_model(model.config)
        self.model, self.axes = model, axes
        self.cache_format = cache_format or PlainFormat()
        self._streamed = streamed
        self.vocab_size = int(model.config.vocab_size)
        self.body = model.model if isinstance(model, Decoder) else model.transformer
        weight = next(model.parameters())
        self.device, self.dtype = device or weight.device, weight.dtype
        self.rotary: tuple[Tensor, Tensor] | None = None  # cos and sin of every position [context, head_dim]
        with torch.no_grad():
            if isinstance(model, Decoder):
                layers = [layer for layer in model.model.layers if isinstance(layer, DecoderLayer)]
                self.blocks = [_decoder_block(layer, axes) for layer in layers]
                self.final_norm: nn.Module = model.model.norm
                positions = torch.arange(context_length, device=self.device)
                self.rotary = rotary_tables(model.config, positions, self.dtype)
            else:
                self.blocks = [
                    _gpt2_block(layer, axes) for layer in model.transformer.h if isinstance(layer, GPT2Layer)
                ]
                self.final_norm = model.transformer.ln_f

    def new_cache(self, num_blocks: int, block_size: int, num_rows: int) -> list[LayerCache]:
        """Room for `num_blocks` pages of `block_size` tokens, and for `num_rows` requests that run at once."""
        one = self.blocks[0]
        shape = (num_blocks, block_size, num_rows, one.num_key_heads, one.head_dim)
        sizes = CacheSizes(*shape, self.dtype, self.device, self.axes.context)
        return [self.cache_format.layer(index, sizes) for index in range(len(self.blocks))]

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token in the pages of this rank."""
        one, item_bytes = self.blocks[0], self.dtype.itemsize
        return len(self.blocks) * self.cache_format.bytes_per_token(one.num_key_heads, one.head_dim, item_bytes)

    def bytes_beside_pages(self, num_rows: int) -> int:
        """Bytes of the cache on this rank beside its pages, if `num_rows` requests may run at once."""
        one, item_bytes = self.blocks[0], self.dtype.itemsize
        sizes = (one.num_key_heads, one.head_dim, item_bytes)
        of_rows = (num_rows + 1) * self.cache_format.bytes_per_row(*sizes)  # one is that of padding
        return len(self.blocks) * (of_rows + self.cache_format.bytes_of_layer(*sizes))

    @property
    def has_decode_kernel(self) -> bool:
        """Are decodes on a GPU one kernel, which reads a request's own tokens alone?"""
        return self.cache_format.has_kernel and self.dtype in (torch.float16, torch.bfloat16)

    @property
    def has_prompt_kernel(self) -> bool:
        """Can prompts be attended to by a kernel that reads pages?"""
        one = self.blocks[0]
        has_room = has_room_for_tiles(one.num_heads, one.num_key_heads, one.head_dim, shared_bytes(self.device))
        return has_room and self.has_decode_kernel and isinstance(self.cache_format, PlainFormat)

    @property
    def stream_width(self) -> int:
        """Features of the residual stream on this rank."""
        return int(self.blocks[0].input_norm.weight.shape[0])  # type: ignore[union-attr, index, arg-type]

    def residual(self, batch: PagedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """The residual stream [tokens, hidden] after all blocks. Keys and values of the batch go into the cache."""
        return self.through_blocks(self.embed(batch), batch, cache)

    def embed(self, batch: PagedBatch) -> Tensor:
        """The residual stream before the first block."""
        if isinstance(self.model, GPT2):
            body = self.model.transformer
            rows = lookup(body.wte, batch.tokens, self.axes) + lookup(body.wpe, batch.positions, self.axes)
        else:
            rows = lookup(self.model.model.embed_tokens, batch.tokens, self.axes)
        return summed(rows, self.axes.x)

    def through_blocks(self, residual: Tensor, batch: PagedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """The residual stream after this rank's blocks, or after the first of them if `cache` is that of fewer."""
        for index, (block, layer) in enumerate(zip(self.blocks[: len(cache)], cache, strict=True)):
            if self._streamed is not None:
                self._streamed.need(index)
            projected = norm_column(residual, block.input_norm, block.projection, self.axes)
            mixed = self._attended(projected, block, batch, layer)
            residual = block.add_mlp(add_row(residual, mixed.flatten(1), block.output, self.axes))
            if self._streamed is not None:
                self._streamed.done(index)
        return residual

    def _attended(self, projected: Tensor, block: PagedBlock, batch: PagedBatch, layer: LayerCache) -> Tensor:
        """The attention [tokens, heads, head_dim] of a block. Keys and values of the batch go into its cache."""
        slots, keys, values = layer.room(batch)
        sizes = (block.num_heads, block.num_key_heads, block.head_dim)
        if projected.device.type == "cpu":
            angles = None if self.rotary is None else batch.angles(self.rotary)
            query = rotate_by_angles(projected, sizes, block.head_norms, angles, slots, keys, values)
            return layer.attend(query, keys, values, batch, block.window)
        given = (projected, sizes, block.head_norms, self.rotary, batch.positions, slots, keys, values)
        if layer.counts is not None and self.rotary is not None and is_for_whole_kernel(projected, batch):
            return whole_attention(*given, batch, block.window, layer.counts)
        return layer.attend(rotate_and_store(*given), keys, values, batch, block.window)

    @property
    def block_modules(self) -> list[tuple[nn.Module, ...]]:
        """What each block's weights are in."""
        return [(block.layer, *block.linears) for block in self.blocks]

    def arrange_for_cpu(self, agree: Callable[[list[int]], list[int]]) -> None:
        """Choose a CPU's products, and keep weights in fewer bits as they take them. Call it again when weights have
        changed.

        `agree` is given, for each weight, the most rows of its product with codes, or whether one row is multiplied as
        a vector. It returns what is used.
        """
        packed = list(self._packed())
        plain = [
            one for one in self._linears() if one.weight.dtype in HALF_DTYPES and not isinstance(one, PackedLinear)
        ]
        for one in packed:
            one.arrange_for_cpu(self.dtype)
        used = agree([*(one.max_rows for one in packed), *(int(takes_vectors(one)) for one in plain)])
        for one, max_rows in zip(packed, used, strict=False):
            one.limit_rows(max_rows)
        for linear, is_vector in zip(plain, used[len(packed) :], strict=True):
            TAKES_VECTORS.set(linear, bool(is_vector))

    def _linears(self) -> Iterator[nn.Linear]:
        """All linears but those of experts, in an order that all ranks with the same blocks share."""
        for linear in (*(one for block in self.blocks for one in block.linears), self.model.lm_head):
            if isinstance(linear, nn.Linear):  # only the last stage has a head
                yield linear

    def _packed(self) -> Iterator[PackedLinear | PackedStack]:
        """The weights in fewer bits that are multiplied, in an order that all ranks with the same blocks share."""
        yield from (one for one in self._linears() if isinstance(one, PackedLinear))
        for module in self.body.modules():
            if isinstance(module, PackedStack):
                yield module
            elif isinstance(module, SparseMLP):  # the expert that all tokens use is beside the stack
                yield from (one for one in module.modules() if isinstance(one, PackedLinear))

    def logits(self, residual: Tensor) -> Tensor:
        """The logits [rows, vocab] of rows of the residual stream."""
        part = norm_column(residual, self.final_norm, self.model.lm_head, self.axes)
        return gathered_logits(part, self.vocab_size, self.axes)

    def hidden_states(self, residual: Tensor) -> Tensor:
        """The hidden states [rows, hidden] that the head is given."""
        return gathered_features(norm_of(residual, self.final_norm, self.axes), self.axes)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model that this rank has."""
    if isinstance(model, Decoder):
        return [layer for layer in model.model.layers if isinstance(layer, DecoderLayer)]
    return [layer for layer in model.transformer.h if isinstance(layer, GPT2Layer)] if isinstance(model, GPT2) else []


def _decoder_block(layer: DecoderLayer, axes: ModelAxes) -> PagedBlock:
    attention = layer.self_attn
    assert isinstance(attention, Attention), "refuse_model lets it pass"
    head_dim = attention.head_dim
    add_mlp, mlp_linears = _add_mlp(layer.mlp, layer.post_attention_layernorm, axes)
    norms = (attention.q_norm, attention.k_norm)
    return PagedBlock(
        layer.input_layernorm,
        join_linears((attention.q_proj, attention.k_proj, attention.v_proj)),
        attention.o_proj,
        add_mlp,
        head_dim,
        attention.q_proj.weight.shape[0] // head_dim,
        attention.k_proj.weight.shape[0] // head_dim,
        norms if isinstance(norms[0], RMSNorm) and isinstance(norms[1], RMSNorm) else None,  # type: ignore[arg-type]
        attention.core.sliding_window,
        mlp_linears,
        layer,
    )


def _add_mlp(mlp: nn.Module, norm: nn.Module, axes: ModelAxes) -> tuple[Transform, tuple[nn.Linear, ...]]:
    """A function that adds the MLP, and the linears that it uses."""
    if isinstance(mlp, SwiGLU):
        gate_up, down = join_linears((mlp.gate_proj, mlp.up_proj)), mlp.down_proj

        def add_swiglu(residual: Tensor) -> Tensor:
            return add_row(residual, norm_column(residual, norm, gate_up, axes, is_gated=True), down, axes)

        return add_swiglu, (gate_up, down)
    if isinstance(mlp, GPT2MLP):
        inner, outer = mlp.c_fc, mlp.c_proj

        def add_gelu(residual: Tensor) -> Tensor:
            hidden = F.gelu(column(norm_of(residual, norm, axes), inner, axes), approximate="tanh")
            return add_row(residual, hidden, outer, axes)

        return add_gelu, (inner, outer)
    assert isinstance(mlp, SparseMLP)
    return lambda residual: add_experts(residual, norm, mlp, axes), ()


def _gpt2_block(layer: GPT2Layer, axes: ModelAxes) -> PagedBlock:
    attention = layer.attn
    num_heads = attention.c_attn.weight.shape[0] // 3 // attention.head_dim
    sizes = (attention.head_dim, num_heads, num_heads)
    add_mlp, mlp_linears = _add_mlp(layer.mlp, layer.ln_2, axes)
    return PagedBlock(layer.ln_1, attention.c_attn, attention.c_proj, add_mlp, *sizes, None, None, mlp_linears, layer)


def join_linears(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One linear that gives the results of all, end to end. Their parameters become views of its own."""
    packed = [one for one in linears if isinstance(one, PackedLinear)]
    if packed:
        return join_packed(packed)
    sizes = [one.weight.shape[0] for one in linears]
    biases: list[Tensor] = [one.bias for one in linears if one.bias is not None]
    joined = nn.Linear(linears[0].weight.shape[1], sum(sizes), bias=bool(biases), device="meta")
    joined.weight = nn.Parameter(end_to_end([one.weight for one in linears]), requires_grad=False)
    if biases:
        joined.bias = nn.Parameter(end_to_end(biases), requires_grad=False)
    for name, parameter in joined.named_parameters():
        for one, part in zip(linears, parameter.split(sizes), strict=True):
            setattr(one, name, nn.Parameter(part, requires_grad=False))
    return joined
