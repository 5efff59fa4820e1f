"""This rank's part of a served model: its blocks over pages, its cache, and its share of each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.models import GPT2, Decoder
from weft.models.recurrent import RecurrentModel
from weft.plan import Plan
from weft.serve.attention.batch import PagedBatch, PageShare
from weft.serve.attention.formats import CacheFormat, CacheLayer, model_identity
from weft.serve.model.adapters import attach_adapters
from weft.serve.model.cache_memory import (
    CPU_SHARE,
    GPU_SHARE,
    CacheBytes,
    HostPages,
    free_device_bytes,
    refuse_cache_blocks,
    refuse_swap_blocks,
    step_bytes,
)
from weft.serve.model.linear import ModelAxes
from weft.serve.model.paged_model import PagedModel
from weft.serve.model.ranks import ServingRanks
from weft.serve.model.recurrent import RecurrentRows
from weft.serve.model.step_inputs import PageLayout, StepInputs
from weft.serve.model.streamed_model import StreamedModel, stream_model
from weft.serve.parallel.rank_part import cuts_of, own_key_heads, own_layers
from weft.serve.refusals import ServingCase, refuse, refuse_following
from weft.serve.scheduling.request import TokenLogprobs
from weft.serve.scheduling.speculation import MAX_DRAFTS
from weft.serve.spec import EngineOptions
from weft.serve.weights.packed_linear import PackedLinear
from weft.serve.weights.streamed_weights import StreamedWeights

_SCORED_ROWS = 256  # of a text whose logits are computed at a time


class ModelPart:
    """A model, or a rank's part of one if there are `ranks`, with the cache of its keys and values.

    All ranks must create it with the same options: the number of blocks is the least that fits any of them. `load`
    reads this rank's part of another checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        options: EngineOptions,
        ranks: ServingRanks | None = None,
        load: Callable[[Path], nn.Module] | None = None,
    ) -> None:
        parameter = next(model.parameters())
        self.device = torch.device(options.device or parameter.device)
        self._case = _case(model, options, ranks, self.device)
        refuse(self._case)
        if options.stream_weights and ranks is not None:
            is_told = (ranks.readers is not None) == (ranks.mesh.plan.data > 1)
            assert is_told, "the ranks must know that weights are streamed"
        model, self.streamed = _in_place(model, options, self.device, ranks)
        self.ranks = ranks
        self.load = load
        self.context_length = _context_length(model, options.context_length)
        has_shares = ranks is not None and ranks.readers is not None  # of each block's weights
        with nullcontext() if self.streamed is None or has_shares else self.streamed.values():
            _refuse_cache(options, model, ranks)
        _refuse_head(options, model, self.device)
        self._head = options.head
        axes = ModelAxes() if ranks is None else ranks.axes
        if isinstance(model, RecurrentModel):
            self.paged: PagedModel | RecurrentRows = RecurrentRows(model)
        else:
            form = _own_format(options, model, ranks)
            self.paged = PagedModel(model, self.context_length, axes, form, self.device, self.streamed)
        self._arrange_weights()
        linears = [linear.layer for block in self.paged.blocks for linear in block.linears]
        self.adapters, updates = attach_adapters(model, linears, options.adapters)
        if isinstance(self.paged, PagedModel):
            self.paged.adapt(updates)
        num_blocks = options.num_blocks or self._blocks_that_fit(options)
        if self.paged.keeps_pages:
            self._refuse_memory(options, num_blocks)
        if ranks is not None:
            num_blocks = ranks.agree(num_blocks)
        num_rows = options.num_rows
        self.cache = self.paged.new_cache(num_blocks + 1, options.block_size, num_rows)  # the last block is for padding
        self.layout = PageLayout(
            self._block_size(options),
            num_blocks,
            num_rows,
            self.device,
            self.paged.cache_format.loki is not None,
            self._share(options),
        )

    @torch.inference_mode()
    def logits(
        self, inputs: StepInputs, last: Tensor | None = None, num_layers: int | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Compute this rank's part of a step. On the last stage, returns the logits after the tokens at which requests
        sample, and the positions of these tokens; None if there are none. With `num_layers`, only so many of the
        first layers compute, and the norm and head are given what they give.
        """
        batch = inputs.batch(self.layout, last)
        residual = self._through(batch, self.cache[:num_layers])
        if residual is None or not inputs.sampled:
            return None
        positions = batch.positions
        # All tokens are in their order, unless those of answers come before those of prompts.
        if len(inputs.sampled) < inputs.num_tokens or self.layout.answers_are_decodes:
            ends = inputs.sampled_tokens(self.device)
            residual, positions = residual[ends], positions[ends]
        if self._head is None:
            return self.paged.logits(residual), positions
        hidden = self.paged.hidden_states(residual)
        return self._head.logits(hidden, self.paged.model.lm_head), positions

    @torch.inference_mode()
    def hidden_states(self, inputs: StepInputs) -> Tensor | None:
        """Return the hidden states [tokens, hidden] of a step's tokens. On the last stage; None on others."""
        residual = self._through(inputs.batch(self.layout), self.cache)
        return None if residual is None else self.paged.hidden_states(residual)

    @torch.inference_mode()
    def text_logprobs(
        self, inputs: StepInputs, vocab_size: int, num_likeliest: int, following: int = 0
    ) -> list[TokenLogprobs]:
        """Return the log-probabilities, among the first `vocab_size` tokens, of the token after each token of a text's
        step; `following` is the one after the last. On the last stage; none on others.
        """
        residual = self._through(inputs.batch(self.layout), self.cache)
        if residual is None:
            return []
        every = torch.cat([inputs.flat[0, 1:].long(), torch.tensor([following])]).to(self.device)
        found = list[TokenLogprobs]()
        for start in range(0, len(every), _SCORED_ROWS):
            targets = every[start : start + _SCORED_ROWS]
            logits = self.paged.logits(residual[start : start + len(targets)])[:, :vocab_size]
            logprobs = logits.float().log_softmax(-1)
            own = logprobs.gather(1, targets[:, None])[:, 0].tolist()
            best = logprobs.topk(num_likeliest)
            pairs = zip(own, best.indices.tolist(), best.values.tolist(), strict=True)
            found += [TokenLogprobs(one, tuple(zip(*likeliest, strict=True))) for one, *likeliest in pairs]
        return found

    def _through(self, batch: PagedBatch, cache: Sequence[CacheLayer]) -> Tensor | None:
        """Return the residual stream after the last block, on the last stage. Other stages send it on."""
        ranks = self.ranks
        if ranks is None:
            return self.paged.residual(batch, cache)
        assert isinstance(self.paged, PagedModel)
        if ranks.is_first_stage:
            residual = self.paged.embed(batch)
        else:
            sizes = (len(batch.tokens), self.paged.stream_width)
            residual = ranks.receive_residual(*sizes, self.paged.dtype, self.device)
        residual = self.paged.through_blocks(residual, batch, cache)
        if ranks.is_last_stage:
            return residual
        ranks.send_residual(residual)
        return None

    @torch.inference_mode()
    def pass_by(self) -> None:
        """Take part in a step of other replicas that reads weights together with this rank."""
        assert self.streamed is not None
        self.streamed.pass_by()

    @torch.inference_mode()
    def take_weights(self, model: nn.Module) -> None:
        """Copy the weights of another model, or part, of the same config."""
        new = dict((*model.named_parameters(), *model.named_buffers()))
        for name, own in (*self.paged.model.named_parameters(), *self.paged.model.named_buffers()):
            own.copy_(new[name])
        self._arrange_weights()

    def _arrange_weights(self) -> None:
        if self.device.type == "cpu" and self.streamed is None and isinstance(self.paged, PagedModel):
            self.paged.arrange_for_cpu(list if self.ranks is None else self.ranks.agree_on_rows)

    def refuse_weights(self, model: nn.Module) -> None:
        """Raise ConfigError if a model is another one than this."""
        own = self.paged.model
        refuse_following(self._case)
        if getattr(model, "config", None) != own.config or _names(own) != _names(model):
            raise ConfigError(
                f"the new weights are of {getattr(model, 'config', type(model).__name__)}, the engine serves "
                f"{own.config}; give weights of the same model, or start another engine"
            )

    def host_pages(self, num_blocks: int) -> HostPages | None:
        """Return room for so many blocks of this rank's cache in host memory; None for 0."""
        pages = [page for layer in self.cache for page in layer.pages]
        keeps_whole_blocks = self.paged.cache_format.storage.keeps_whole_blocks
        return HostPages(pages, num_blocks, keeps_whole_blocks) if num_blocks else None

    def _blocks_that_fit(self, options: EngineOptions) -> int:
        """Return the number of blocks that all running requests can use, or that the free memory holds if these are
        fewer.
        """
        block_size = self._block_size(options)
        most = options.max_running * -(-self.context_length // block_size)
        if not self.paged.keeps_pages:
            return most
        share = GPU_SHARE if self.device.type == "cuda" else CPU_SHARE
        free = share * free_device_bytes(self.device, self._num_local_ranks)
        linears = [module for module in self.paged.body.modules() if isinstance(module, nn.Linear)]
        widest = max(linear.weight.shape[0] for linear in linears)
        free -= step_bytes(options.token_budget, options.max_running, widest, self.paged.vocab_size)
        if options.speculate is not None:  # a step samples after drafts too: logits, and copies of 4 bytes
            free -= 8 * min(options.token_budget, (1 + MAX_DRAFTS) * options.num_rows) * self.paged.vocab_size
        bytes_per_block = self.paged.bytes_per_token * options.block_size
        if isinstance(options.speculate, nn.Module):  # the draft model's cache has as many blocks, each whole
            bytes_per_block += PagedModel(options.speculate, 1).bytes_per_token * block_size
        free -= self.paged.bytes_beside_pages(options.num_rows)
        fitting = int(free // bytes_per_block)
        if fitting < 1:
            raise ConfigError(
                f"no memory is left for the key-value cache on {self.device}: the weights, {options.token_budget} "
                f"tokens a step and {options.max_running} requests fill it; lower token_budget, max_running "
                f"or --resident-blocks, or keep weights in fewer bits (--weights)"
            )
        return min(most, fitting)

    def _refuse_memory(self, options: EngineOptions, num_blocks: int) -> None:
        """Raise ConfigError if the blocks that are asked for take more memory than there is."""
        per_block = self.paged.bytes_per_token * options.block_size
        sizes = CacheBytes(per_block, self.paged.bytes_beside_pages(options.num_rows))
        if options.num_blocks is not None:
            refuse_cache_blocks(num_blocks, sizes, self.device, self._num_local_ranks)
        if options.swap_blocks:
            beside = 0.0 if self.device.type == "cuda" else sizes.of(num_blocks)
            refuse_swap_blocks(options.swap_blocks, per_block, beside, self._num_local_ranks)

    @property
    def _num_local_ranks(self) -> int:
        return 1 if self.ranks is None else self.ranks.mesh.num_local_ranks

    def _share(self, options: EngineOptions) -> PageShare | None:
        """This rank's share of the pages of each block; None if it has whole blocks."""
        axis = None if self.ranks is None else self.ranks.axes.context
        return None if axis is None else PageShare(axis.index, axis.degree, options.block_size)

    def _block_size(self, options: EngineOptions) -> int:
        """Tokens of a block, on all ranks that hold its pages."""
        share = self._share(options)
        return options.block_size if share is None else share.block_size


def _in_place(
    model: nn.Module, options: EngineOptions, device: torch.device, ranks: ServingRanks | None
) -> tuple[nn.Module, StreamedWeights | None]:
    """Return the model, moved to where its weights stay, and the weights that are streamed."""
    if isinstance(model, StreamedModel):
        return model.model, model.weights
    model = model.to(dtype=options.dtype or next(model.parameters()).dtype).eval()
    if not options.stream_weights:
        return model.to(device), None
    streamed = stream_model(model, device, options, ranks)
    return streamed.model, streamed.weights


def _case(model: nn.Module, options: EngineOptions, ranks: ServingRanks | None, device: torch.device) -> ServingCase:
    """Return an engine's case for the table of refusals."""
    num_streamed = options.stream_weights or int(isinstance(model, StreamedModel))
    cache = None if options.cache is None or options.cache.kind == "plain" else options.cache
    given = replace(options, cache=cache, stream_weights=num_streamed)
    whole, draft = model.model if isinstance(model, StreamedModel) else model, options.speculate
    return ServingCase.of(
        given,
        plan=Plan() if ranks is None else ranks.mesh.plan,
        on_ranks=ranks is not None,
        model="recurrent" if isinstance(whole, RecurrentModel) else "attention",
        draft="recurrent" if isinstance(draft, RecurrentModel) else None,
        device=device.type,
        cache=cache,
        has_codes=any(isinstance(one, PackedLinear) for name, one in whole.named_modules() if name != "lm_head"),
    )


def _refuse_cache(options: EngineOptions, model: nn.Module, ranks: ServingRanks | None) -> None:
    """Raise ConfigError for a format of the cache that does not go with the model or other options."""
    if options.cache is None:
        return
    if options.cache.identity and isinstance(model, Decoder | GPT2):
        parts = () if ranks is None else (cuts_of(model, ranks.place), ranks.add_up)
        if options.cache.identity != model_identity(model, *parts):
            raise ConfigError(
                f"the file of --cache {options.cache.name} is of another model; run weft calibrate on the model that "
                f"is served"
            )
    if options.cache.block_size not in (None, options.block_size):
        raise ConfigError(
            f"a cache of {options.cache.name} needs blocks of {options.cache.block_size} tokens, not "
            f"{options.block_size}; give block_size = {options.cache.block_size}"
        )


def _own_format(options: EngineOptions, model: nn.Module, ranks: ServingRanks | None) -> CacheFormat | None:
    """Return how this rank keeps keys and values."""
    if options.cache is None or ranks is None or not isinstance(model, Decoder | GPT2):
        return options.cache
    return options.cache.part(own_layers(model.config, ranks.place), own_key_heads(model.config, ranks.place))


def _refuse_head(options: EngineOptions, model: nn.Module, device: torch.device) -> None:
    """Raise ConfigError for a graph of the head that does not go with the model or other options."""
    if options.head is None:
        return
    num_tokens = min(options.vocab_size or 1 << 62, int(getattr(model.config, "vocab_size", 0)))
    if options.head.num_tokens != num_tokens:
        raise ConfigError(
            f"the graph of --head is of {options.head.num_tokens} tokens, and {num_tokens} are served; run weft index "
            f"with the tokenizer that is served"
        )
    options.head.refuse(model, device)


def _names(model: nn.Module) -> list[str]:
    """Return the names of all values of a model, which has buffers where weights are in fewer bits."""
    return [name for name, _ in (*model.named_parameters(), *model.named_buffers())]


def _context_length(model: nn.Module, asked: int | None) -> int:
    """Return the asked number of positions, or as many as the model is made for. GPT-2 has no more than these."""
    if isinstance(model, GPT2):
        return min(asked or model.config.n_positions, model.config.n_positions)
    return asked or int(getattr(getattr(model, "config", None), "max_position_embeddings", 1))
