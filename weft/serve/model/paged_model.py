"""The forward of weft's language models over pages of the key-value cache: the model's own modules and weights.

    embed -> in each block: norm, project to q, k, v, store k and v, attend, project; norm, MLP or experts -> norm, head

Projections that read the same input are one matmul: their weights are made to lie end to end, and the modules' own
parameters become views of them, so that no weight is held twice and the modules work as before. How each linear and
norm is computed is chosen once, here (`linear.py`). A rank may hold some of the blocks, and parts of each block's
weights; keys and values in its cache are those of its own blocks and heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm import Axis, all_gather
from weft.errors import ConfigError
from weft.inspection.parameter_cut import share
from weft.models import GPT2, Decoder
from weft.models.attention import RMSNorm
from weft.models.decoder import Attention, DecoderLayer, rotary_tables
from weft.models.experts import SparseMLP, SwiGLU
from weft.models.gpt2 import GPT2MLP, GPT2Layer
from weft.serve.attention.attend import has_room_for_tiles, shared_bytes
from weft.serve.attention.batch import CacheSizes, PagedBatch, angles_at
from weft.serve.attention.formats import CacheFormat, CacheLayer
from weft.serve.attention.plain import MAX_WHOLE_DECODES
from weft.serve.model.experts import ServedExperts
from weft.serve.model.linear import (
    Linear,
    ModelAxes,
    Transform,
    Updates,
    adapted,
    plain_of,
    served_linear,
    served_norm,
    summed,
)
from weft.serve.parallel.rank_part import refuse_model
from weft.serve.weights.cpu_products import HALF_DTYPES, takes_vectors
from weft.serve.weights.fast_path import Place, fast_path, kernel_of, place_of
from weft.serve.weights.packed_experts import PackedStack
from weft.serve.weights.packed_linear import PackedLinear, choose_kernels, end_to_end, join_packed
from weft.serve.weights.steps import rotate_by_angles
from weft.serve.weights.streamed_weights import StreamedWeights


class DenseMLP:
    """Adds the MLP of the norm of the residual stream to it."""

    def __init__(self, inner: Linear, outer: Linear, activation: Transform | None = None) -> None:
        self.linears = (inner, outer)
        self._activation = activation

    def __call__(self, residual: Tensor) -> Tensor:
        inner, outer = self.linears
        hidden = inner(residual)
        return outer(hidden if self._activation is None else self._activation(hidden), residual)


@dataclass
class PagedBlock:
    """One block of a model. `head_norms` of q and k are None where the model has none."""

    projection: Linear  # to q, k and v end to end, of the norm
    output: Linear
    mlp: DenseMLP | ServedExperts
    head_dim: int
    num_heads: int
    num_key_heads: int
    head_norms: tuple[RMSNorm, RMSNorm] | None
    window: int | None
    layer: nn.Module  # of the model, which this is made of

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All linears but those of experts."""
        return self.projection, self.output, *self.mlp.linears

    def adapt(self, updates: Mapping[nn.Module, Updates]) -> None:
        """Compute linears with the updates of adapters to them."""
        self.projection, self.output = adapted(self.projection, updates), adapted(self.output, updates)
        if isinstance(self.mlp, DenseMLP):
            inner, outer = (adapted(one, updates) for one in self.mlp.linears)
            self.mlp.linears = inner, outer


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
        self.cache_format = cache_format or CacheFormat()
        self._streamed = streamed
        self.vocab_size = int(model.config.vocab_size)
        self.body = model.model if isinstance(model, Decoder) else model.transformer
        weight = next(model.parameters())
        self.device, self.dtype = device or weight.device, weight.dtype
        self._place = place = place_of(self.device, self.dtype)
        choose_kernels(model, place)
        self.rotary: tuple[Tensor, Tensor] | None = None  # cos and sin of every position [context, head_dim]
        with torch.no_grad():
            if isinstance(model, Decoder):
                layers = [layer for layer in model.model.layers if isinstance(layer, DecoderLayer)]
                self.blocks = [_decoder_block(layer, place, axes) for layer in layers]
                self.final_norm: nn.Module = model.model.norm
                positions = torch.arange(context_length, device=self.device)
                self.rotary = rotary_tables(model.config, positions, self.dtype)
            else:
                gpt2_layers = [layer for layer in model.transformer.h if isinstance(layer, GPT2Layer)]
                self.blocks = [_gpt2_block(layer, place, axes) for layer in gpt2_layers]
                self.final_norm = model.transformer.ln_f
        head = model.lm_head  # only the last stage has one
        self._head = served_linear(head, place, axes.y, self.final_norm) if isinstance(head, nn.Linear) else None
        self._final_norm = served_norm(self.final_norm, place, axes.y)
        self._rotates_by_kernel = self.rotary is not None and kernel_of(fast_path("rotate", place), 1) == "kernel"

    def new_cache(self, num_blocks: int, block_size: int, num_rows: int) -> list[CacheLayer]:
        """Return room for `num_blocks` pages of `block_size` tokens, and for `num_rows` requests that run at once."""
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
        """Return the bytes of the cache on this rank beside its pages, if `num_rows` requests may run at once."""
        one, item_bytes = self.blocks[0], self.dtype.itemsize
        sizes = (one.num_key_heads, one.head_dim, item_bytes)
        of_rows = (num_rows + 1) * self.cache_format.bytes_per_row(*sizes)  # one is that of padding
        return len(self.blocks) * (of_rows + self.cache_format.bytes_of_layer(*sizes))

    @property
    def has_decode_kernel(self) -> bool:
        """Are decodes on a GPU one kernel, which reads a request's own tokens alone?"""
        is_shared = self.axes.context is not None
        return self.cache_format.has_kernel(is_shared) and self.dtype in (torch.float16, torch.bfloat16)

    @property
    def has_prompt_kernel(self) -> bool:
        """Can prompts be attended to by a kernel that reads pages?"""
        one = self.blocks[0]
        has_room = has_room_for_tiles(one.num_heads, one.num_key_heads, one.head_dim, shared_bytes(self.device))
        return has_room and self.has_decode_kernel and self.cache_format.kind == "plain"

    @property
    def stream_width(self) -> int:
        """Features of the residual stream on this rank."""
        return int(self.blocks[0].output.layer.weight.shape[0])

    def residual(self, batch: PagedBatch, cache: Sequence[CacheLayer]) -> Tensor:
        """Return the residual stream [tokens, hidden] after all blocks. Keys and values of the batch go into
        the cache.
        """
        return self.through_blocks(self.embed(batch), batch, cache)

    def embed(self, batch: PagedBatch) -> Tensor:
        """Return the residual stream before the first block."""
        if isinstance(self.model, GPT2):
            body = self.model.transformer
            rows = _lookup(body.wte, batch.tokens, self.axes.x) + _lookup(body.wpe, batch.positions, self.axes.x)
        else:
            rows = _lookup(self.model.model.embed_tokens, batch.tokens, self.axes.x)
        return summed(rows, self.axes.x)

    def through_blocks(self, residual: Tensor, batch: PagedBatch, cache: Sequence[CacheLayer]) -> Tensor:
        """Return the residual stream after this rank's first `len(cache)` blocks."""
        for index, (block, layer) in enumerate(zip(self.blocks[: len(cache)], cache, strict=True)):
            if self._streamed is not None:
                self._streamed.need(index)
            mixed = self._attended(block.projection(residual), block, batch, layer)
            residual = block.mlp(block.output(mixed.flatten(1), residual))
            if self._streamed is not None:
                self._streamed.done(index)
        return residual

    def _attended(self, projected: Tensor, block: PagedBlock, batch: PagedBatch, layer: CacheLayer) -> Tensor:
        """Return the attention [tokens, heads, head_dim] of a block. Keys and values of the batch go into its cache."""
        slots, keys, values = layer.room(batch)
        sizes, norms = (block.num_heads, block.num_key_heads, block.head_dim), block.head_norms
        if self.rotary is None or not self._rotates_by_kernel:
            query = rotate_by_angles(projected, sizes, norms, self._angles(batch), slots, keys, values)
            return layer.attend(query, keys, values, batch, block.window)
        given = (projected, sizes, norms, self.rotary, batch.positions, slots, keys, values)
        if (
            layer.counts is not None
            and batch.tiles is None
            and batch.num_decodes == len(projected) <= MAX_WHOLE_DECODES
        ):
            from weft.serve.attention.whole_attention_kernel import whole_attention_by_kernel

            pages = (batch.tables, batch.lengths, batch.block_size, block.window)
            return whole_attention_by_kernel(*given, *pages, layer.counts)
        from weft.serve.model.fused_kernel import rotate_and_store_by_kernel

        return layer.attend(rotate_and_store_by_kernel(*given), keys, values, batch, block.window)

    def _angles(self, batch: PagedBatch) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of the tokens' positions. On a CPU, all blocks share them."""
        if self.rotary is None:
            return None
        return batch.angles(self.rotary) if self.device.type == "cpu" else angles_at(self.rotary, batch.positions)

    @property
    def block_modules(self) -> list[tuple[nn.Module, ...]]:
        """What each block's weights are in."""
        return [(block.layer, *(one.layer for one in block.linears)) for block in self.blocks]

    def adapt(self, updates: Mapping[nn.Module, Updates]) -> None:
        """Compute linears of blocks with the updates of adapters to them."""
        for block in self.blocks:
            block.adapt(updates)

    def arrange_for_cpu(self, agree: Callable[[list[int]], list[int]]) -> None:
        """Choose a CPU's products, and arrange quantised weights as these take them. Call it again when weights have
        changed.

        `agree` takes a number for each weight: the most rows of its product with codes, or whether one row is
        multiplied as a vector (1 or 0). It returns the numbers to use, which ranks with the same weights share.
        """
        packed, linears = list(self._packed()), list(self._linears())
        plain = [own for one in linears if (own := plain_of(one)) and own.layer.weight.dtype in HALF_DTYPES]
        for one in packed:
            one.arrange_for_cpu(self.dtype)
        used = agree([*(one.max_rows for one in packed), *(int(takes_vectors(one.layer)) for one in plain)])
        for one, max_rows in zip(packed, used, strict=False):
            one.limit_rows(max_rows)
        for linear, is_vector in zip(plain, used[len(packed) :], strict=True):
            linear.choose(bool(is_vector))

    def _linears(self) -> Iterator[Linear]:
        """All linears but those of experts, in an order that all ranks with the same blocks share."""
        yield from (one for block in self.blocks for one in block.linears)
        if self._head is not None:
            yield self._head

    def _packed(self) -> Iterator[PackedLinear | PackedStack]:
        """The weights in fewer bits that are multiplied, in an order that all ranks with the same blocks share."""
        yield from (one.layer for one in self._linears() if isinstance(one.layer, PackedLinear))
        for module in self.body.modules():
            if isinstance(module, PackedStack):
                yield module
            elif isinstance(module, SparseMLP):  # the expert that all tokens use is beside the stack
                yield from (one for one in module.modules() if isinstance(one, PackedLinear))

    def logits(self, residual: Tensor) -> Tensor:
        """Return the logits [rows, vocab] of rows of the residual stream."""
        assert self._head is not None, "this stage has no head"
        return _gathered_logits(self._head(residual), self.vocab_size, self.axes.x)

    def hidden_states(self, residual: Tensor) -> Tensor:
        """Return the hidden states [rows, hidden] that the head is given."""
        return _gathered_features(self._final_norm(residual), self.axes.y)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model that this rank has."""
    if isinstance(model, Decoder):
        return [layer for layer in model.model.layers if isinstance(layer, DecoderLayer)]
    return [layer for layer in model.transformer.h if isinstance(layer, GPT2Layer)] if isinstance(model, GPT2) else []


def _lookup(table: nn.Embedding, ids: Tensor, axis: Axis | None) -> Tensor:
    """Return the rows of a table [tokens, hidden / y]; zeros where another rank of x has the row. Their sum is the
    lookup.
    """
    if axis is None:
        return F.embedding(ids, table.weight)
    begin, end = share(table.num_embeddings, axis.degree, axis.index)
    is_here = (ids >= begin) & (ids < end)
    rows = F.embedding(torch.where(is_here, ids - begin, 0), table.weight)
    return rows * is_here[:, None]


def _gathered_logits(part: Tensor, vocab_size: int, axis: Axis | None) -> Tensor:
    """Return the logits [rows, vocab] from this rank's part of the vocabulary. Parts are padded to the largest."""
    if axis is None:
        return part
    sizes = [end - begin for begin, end in (share(vocab_size, axis.degree, i) for i in range(axis.degree))]
    padded = F.pad(part, (0, sizes[0] - part.shape[1])).contiguous()
    parts = part.new_empty(axis.degree, *padded.shape)
    all_gather(parts.view(-1), padded.view(-1), axis).wait()
    return torch.cat([one[:, :size] for one, size in zip(parts, sizes, strict=True)], dim=1)


def _gathered_features(part: Tensor, axis: Axis | None) -> Tensor:
    """Return hidden states [rows, hidden] from this rank's features."""
    if axis is None:
        return part
    parts = part.new_empty(axis.degree, *part.shape)
    all_gather(parts.view(-1), part.contiguous().view(-1), axis).wait()
    return torch.cat(list(parts), dim=1)


def _decoder_block(layer: DecoderLayer, place: Place, axes: ModelAxes) -> PagedBlock:
    attention = layer.self_attn
    assert isinstance(attention, Attention), "refuse_model lets it pass"
    head_dim, norms = attention.head_dim, (attention.q_norm, attention.k_norm)
    projection = join_linears((attention.q_proj, attention.k_proj, attention.v_proj))
    return PagedBlock(
        served_linear(projection, place, axes.y, layer.input_layernorm),
        served_linear(attention.o_proj, place, axes.x),
        _served_mlp(layer.mlp, layer.post_attention_layernorm, place, axes),
        head_dim,
        attention.q_proj.weight.shape[0] // head_dim,
        attention.k_proj.weight.shape[0] // head_dim,
        norms if isinstance(norms[0], RMSNorm) and isinstance(norms[1], RMSNorm) else None,  # type: ignore[arg-type]
        attention.core.sliding_window,
        layer,
    )


def _served_mlp(mlp: nn.Module, norm: nn.Module, place: Place, axes: ModelAxes) -> DenseMLP | ServedExperts:
    if isinstance(mlp, SwiGLU):
        gate_up = join_linears((mlp.gate_proj, mlp.up_proj))
        inner = served_linear(gate_up, place, axes.y, norm, is_gated=True)
        return DenseMLP(inner, served_linear(mlp.down_proj, place, axes.x))
    if isinstance(mlp, GPT2MLP):
        inner, outer = served_linear(mlp.c_fc, place, axes.y, norm), served_linear(mlp.c_proj, place, axes.x)
        return DenseMLP(inner, outer, partial(F.gelu, approximate="tanh"))
    assert isinstance(mlp, SparseMLP)
    return ServedExperts(mlp, norm, place, axes)


def _gpt2_block(layer: GPT2Layer, place: Place, axes: ModelAxes) -> PagedBlock:
    attention = layer.attn
    num_heads = attention.c_attn.weight.shape[0] // 3 // attention.head_dim
    return PagedBlock(
        served_linear(attention.c_attn, place, axes.y, layer.ln_1),
        served_linear(attention.c_proj, place, axes.x),
        _served_mlp(layer.mlp, layer.ln_2, place, axes),
        *(attention.head_dim, num_heads, num_heads),
        None,
        None,
        layer,
    )


def join_linears(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Return one linear that gives the results of all, end to end. Their parameters become views of its own."""
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
