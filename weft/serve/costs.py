"""What a served model costs on one rank: bytes that it holds and reads, products, kernels and collectives of a step.

Nothing here has a time. `weft plan --serve` multiplies these with the rates of a device (`planner/serving.py`). Beside
options, it knows of weft.serve what is stated here, in `attention/reads.py`, in `cpu_costs.py` for CPUs, and in
`scheduling/scheduler_run.py`, which runs requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from weft.architectures import DecoderConfig, RecurrentConfig, TransformerConfig
from weft.comm import Key
from weft.errors import ConfigError
from weft.plan import Plan
from weft.serve.attention.attend import merge_bytes
from weft.serve.attention.formats import DEFAULT_BLOCK_SIZE, cache_format
from weft.serve.attention.plain import MAX_WHOLE_DECODES
from weft.serve.attention.reads import CacheReads, PromptPart, cache_reads, prompt_part
from weft.serve.loading import model_config
from weft.serve.model.cache_memory import GPU_SHARE, step_bytes
from weft.serve.model.step_graphs import MAX_TOKENS
from weft.serve.model.streamed_model import streamed_bytes
from weft.serve.parallel.rank_part import RankPlace, part_bytes, refuse_plan, stage_of
from weft.serve.parallel.traffic import ServedSizes, step_calls
from weft.serve.refusals import ServingCase, kind_of, refuse
from weft.serve.scheduling.scheduler_run import RequestArrival, RunTimes, SchedulerRun, StepPrice, StepShape
from weft.serve.scheduling.speculation import LAYERS, MAX_DRAFTS, early_layers
from weft.serve.spec import ServingSpec, default_on
from weft.serve.weights.fast_path import (
    FEW_ROWS,
    MAX_PAIRS,
    MAX_ROUTED_TOKENS,
    Kernel,
    Place,
    fast_path,
    fits_registers,
    kernel_of,
)  # fmt: skip
from weft.serve.weights.folder_codes import folder_format
from weft.serve.weights.weight_formats import Grouped, WeightFormat, weight_bytes, weight_format

Codes = Literal["int4", "int8", "fp8"]
# Of a step: stage, decodes, their tokens in the cache, prompts as (tokens computed, tokens up to their end), and tokens
# that are sampled. It gives the fields of `StepPrice`.
Price = Callable[[int, int, int, tuple[tuple[int, int], ...], int], tuple[float, float, tuple[float, ...]]]
# Kernels and copies of a step outside of its layers: two arrays of inputs are copied to the device and to their places,
# seven kernels find tokens and their embeddings, two choose new tokens and keep them, one copy gives them to the host.
STEP_KERNELS = 14
# Kernels of a layer beside its four matmuls: two norms, rotation, attention, and what is between gate and down. For one
# token, matmuls include norms and what is between. Rotation and attention of few decodes over a plain cache are one.
SMALL_KERNELS, SMALL_KERNELS_FOR_ONE = 4, 2
# Others have, beside these, a kernel that adds keys and values, and for Loki two that score and choose.
MORE_KERNELS = {"plain": 0, "int4": 1, "loki": 3}
# Where ranks hold pages together, rotation and attention are two kernels, and another adds up the parts of all ranks.
SPLIT_KERNELS = 2
SAMPLING_PASSES = 4  # over the logits, in float32
_DTYPES = {2: torch.bfloat16, 4: torch.float32}


class WeightProduct(NamedTuple):
    """A product of inputs [rows, inner] with a weight [columns, inner], and how the engine computes it. `number` is how
    many such weights one kernel reads: those of experts that get a token, each with `rows` inputs in the mean.
    """

    rows: float
    inner: int
    columns: int
    kernel: Kernel
    weight_bytes: float  # of one weight
    codes: Codes | None = None  # None: 16 or 32 bits
    number: float = 1.0
    are_experts: bool = False


class Routing(NamedTuple):
    """How tokens of a layer find their experts: by one kernel for each operation, or by few kernels. The router's reads
    `router_bytes`; one program compares `num_comparisons` pairs to put rows in order.
    """

    kind: Literal["plain", "many", "token", "few", "ordered"]
    router_bytes: int
    num_comparisons: int


@dataclass(frozen=True)
class StepWork:
    """What one rank of a stage does in a step. Products and routing have the number of layers that have them."""

    num_layers: int
    products: tuple[tuple[int, WeightProduct], ...]
    routing: tuple[int, Routing] | None
    cache: CacheReads
    prompts: tuple[PromptPart, ...]
    share: float  # of attention that is computed here
    moved_bytes: float  # by small kernels
    step_kernels: int
    layer_kernels: int
    extra_calls: int  # of the host in a layer, beside those of any layer
    calls: Mapping[tuple[Key, int], int]  # how often each collective of so many bytes is called
    is_graph: bool


class Draft(NamedTuple):
    """What proposes tokens: nothing that is computed, the model's first layers, or another model."""

    num_layers: int  # 0: a lookup
    given: tuple[TransformerConfig, ServingSpec, bool] | None = None  # of another model, as `ServedCosts` takes them


class ServedCosts:
    """The costs of one model under one plan, beside drafts (`draft`)."""

    def __init__(
        self,
        config: TransformerConfig,
        plan: Plan,
        item_bytes: int,
        spec: ServingSpec = ServingSpec(),  # noqa: B008 (a frozen value)
        has_codes: bool = False,
        is_newer: bool = True,
    ) -> None:
        """`has_codes`: the format `spec.weights` is that of the model's folder, whose experts are dequantised.
        `is_newer`: the GPU has products of float8. Raises PlanError or ConfigError for what is not served, or has no
        price.
        """
        refuse_plan(config, plan)
        self.cache = cache_format(spec.cache)
        refuse(ServingCase.of(replace(spec, speculate=None), plan=plan, cache=self.cache))
        self.config, self.plan, self.item_bytes, self.spec = config, plan, item_bytes, spec
        self.sizes = ServedSizes.of(config)
        is_sized = spec.device == "cuda"  # otherwise its sizes may be those of a CPU
        self.token_budget = spec.token_budget if is_sized else int(default_on("token_budget", "cuda"))
        most = spec.max_running if is_sized else int(default_on("max_running", "cuda"))
        self.max_running = min(most, self.token_budget)
        self._block_size = DEFAULT_BLOCK_SIZE * plan.context.degree
        self._place = Place("cuda", _DTYPES[item_bytes], (9, 0) if is_newer else (8, 0))
        self._form = None if spec.weights is None else weight_format(spec.weights, "cuda")
        self._of_experts = not has_codes  # the format
        _refuse_experts(config, self.sizes)
        stages = [RankPlace(plan, dict.fromkeys(plan.degrees, 0) | {"pipe": one}) for one in range(plan.pipe.degree)]
        places = sorted(stages, key=stage_of)
        given = (self._form, self._of_experts)
        self.weight_bytes = [part_bytes(config, place, item_bytes, *given) for place in places]
        self.streamed = [streamed_bytes(config, place, _DTYPES[item_bytes], spec, *given) for place in places]
        for stage, one in enumerate(self.streamed):
            self.weight_bytes[stage] -= one.saved_bytes if one else 0
        self._layer_kinds = [
            Counter(self.sizes.expert_layers[layer] for layer in self.sizes.stage_layers(plan, stage))
            for stage in range(plan.pipe.degree)
        ]

    # --- what it holds

    @property
    def rounds_experts(self) -> bool:
        """Are the weights of experts in fewer bits?"""
        return self._form is not None and self._of_experts and any(self.sizes.expert_layers)

    @property
    def _heads(self) -> tuple[int, int, int]:
        """Key heads of a rank, their size, and the bytes of a number."""
        return self.sizes.key_heads(self.plan.tensor.x), self.sizes.head_dim, self.item_bytes

    @property
    def merged_bytes(self) -> int:
        """Bytes that ranks of `context` gather in a layer for each token; 0 if each has all tokens."""
        heads, context = self.sizes.num_heads // self.plan.tensor.x, self.plan.context.degree
        return merge_bytes(1, heads, self.sizes.head_dim, context, self.item_bytes) if context > 1 else 0

    def cache_bytes(self, stage: int) -> float:
        """Return bytes of a token's keys and values on one rank of a stage; the mean over ranks that hold pages
        together.
        """
        of_layer = self.cache.bytes_per_token(*self._heads) / self.plan.context.degree
        return of_layer * len(self.sizes.stage_layers(self.plan, stage))

    def bytes_beside_pages(self, stage: int) -> int:
        """Return bytes of the cache on one rank of a stage beside pages, for as many requests as may run."""
        rows = (self.max_running + 1) * self.cache.bytes_per_row(*self._heads)
        return len(self.sizes.stage_layers(self.plan, stage)) * (rows + self.cache.bytes_of_layer(*self._heads))

    def _bytes_beside(self, stage: int) -> int:
        """Return bytes of a step's tensors, and of the cache beside its pages, on one rank of a stage."""
        sizes, x = self.sizes, self.plan.tensor.x
        widest = max(sizes.projected(x), 2 * sizes.inner // x, sizes.hidden)
        own = step_bytes(self.token_budget, self.max_running, widest, sizes.vocab)
        return own + self.bytes_beside_pages(stage)

    def cache_tokens(self, device_bytes: int) -> float:
        """Return the tokens whose keys and values fit a device beside the weights; negative if these do not fit."""
        return min(
            (GPU_SHARE * (device_bytes - own) - self._bytes_beside(stage)) / self.cache_bytes(stage)
            for stage, own in enumerate(self.weight_bytes)
        )

    def fitting_blocks(self, stage: int, num_cached: float, device_bytes: int) -> int:
        """Return how many streamed blocks of a stage would fit its device beside so many tokens of the cache."""
        streamed = self.streamed[stage]
        assert streamed is not None
        needed = self._bytes_beside(stage) + num_cached * self.cache_bytes(stage)
        others = self.weight_bytes[stage] - streamed.resident_bytes
        return streamed.fitting_blocks(device_bytes - others - needed / GPU_SHARE)

    # --- what a step does

    def num_seen(self, length: int) -> int:
        """Return the tokens that a decode of a request with so many tokens attends to."""
        return length if self.sizes.window is None else min(length, self.sizes.window)

    def step(
        self,
        stage: int,
        num_decodes: int,
        num_cached: int,
        prompts: tuple[tuple[int, int], ...],
        num_sampled: int,
        may_be_graph: bool = True,
    ) -> StepWork:
        """Return the work of a step. Decodes read `num_cached` tokens of the cache; prompts are (tokens computed,
        tokens up to their end).
        """
        sizes, plan, x = self.sizes, self.plan, self.plan.tensor.x
        num_tokens = num_decodes + sum(computed for computed, _ in prompts)
        num_layers, is_last = len(sizes.stage_layers(plan, stage)), stage == plan.pipe.degree - 1
        heads, context = (sizes.num_heads // x, *self._heads[:2]), plan.context.degree
        moved = num_tokens * num_layers * self.item_bytes * (4 * sizes.hidden + 3 * sizes.inner // x)
        num_experts = self._layer_kinds[stage][True]
        return StepWork(
            num_layers,
            tuple(self._products(stage, num_tokens, num_sampled * is_last)),
            (num_experts, self._routing(num_tokens)) if num_experts else None,
            cache_reads(self.cache, num_decodes, num_cached, heads, self.item_bytes),
            tuple(prompt_part(self.cache, *one, sizes.window, heads) for one in prompts),
            1 / context,
            moved + SAMPLING_PASSES * 4 * num_sampled * sizes.vocab * is_last,
            STEP_KERNELS,
            self._layer_kernels(num_tokens, num_decodes),
            SPLIT_KERNELS * (context > 1),
            _calls(sizes, plan, stage, num_tokens, num_sampled, self.item_bytes),
            may_be_graph and self._is_graph(num_tokens, bool(prompts)),
        )

    def run(
        self, arrivals: Sequence[RequestArrival], cache_tokens: int, price: Price, has_stretches: bool = True
    ) -> RunTimes | None:
        """Serve requests on one replica with a cache of so many tokens, by the engine's scheduler. `price` gives the
        time of a step. Returns None if the cache does not hold one of them.
        """

        def priced(shape: StepShape, stage: int) -> StepPrice:
            number = len(shape.decodes)
            num_cached = sum(shape.decodes) + number * shape.shift
            if self.sizes.window is not None:
                num_cached = sum(self.num_seen(length + shape.shift) for length in shape.decodes)
            return StepPrice(*price(stage, number, num_cached, shape.prompts, shape.num_sampled))

        blocks = (min(cache_tokens // self._block_size, 1 << 20), self._block_size)
        limits = (self.token_budget, self.max_running, self.plan.pipe.degree)
        return SchedulerRun(arrivals, priced, *blocks, *limits, has_stretches=has_stretches).run()

    def _is_graph(self, num_tokens: int, has_prompts: bool) -> bool:
        """Is a step without drafts a CUDA graph?"""
        has_kernel, has_ranks = (
            self.cache.has_kernel(self.plan.context.degree > 1),
            self.plan.num_ranks > self.plan.data,
        )
        is_recorded = self.cache.kind == "plain" and num_tokens <= MAX_TOKENS if has_prompts else has_kernel
        return is_recorded and self.item_bytes == 2 and not has_ranks and not self.spec.stream_weights

    def _layer_kernels(self, num_tokens: int, num_decodes: int) -> int:
        """Return the kernels of a layer beside its matmuls."""
        is_whole = self.cache.name == "plain" and num_tokens == num_decodes <= MAX_WHOLE_DECODES
        number = SMALL_KERNELS_FOR_ONE if num_tokens == 1 else SMALL_KERNELS
        return number + MORE_KERNELS[self.cache.kind] - is_whole + SPLIT_KERNELS * (self.plan.context.degree > 1)

    def _products(self, stage: int, num_tokens: int, num_sampled: int) -> Iterator[tuple[int, WeightProduct]]:
        for has_experts, number in self._layer_kinds[stage].items():
            yield from ((number, one) for one in self.layer_products(num_tokens, has_experts))
        if num_sampled:
            inner, columns = self.sizes.hidden // self.plan.tensor.y, -(-self.sizes.vocab // self.plan.tensor.x)
            yield 1, WeightProduct(num_sampled, inner, columns, "matmul", self.item_bytes * inner * columns)

    def layer_products(self, num_tokens: int, has_experts: bool) -> Iterator[WeightProduct]:
        """Yield the matmuls of a layer on one rank. Ranks of x all compute the same experts."""
        sizes, x, y = self.sizes, self.plan.tensor.x, self.plan.tensor.y
        yield self.linear(num_tokens, sizes.hidden // y, sizes.projected(x))
        yield self.linear(num_tokens, sizes.num_heads // x * sizes.head_dim, sizes.hidden // y)
        if not has_experts:
            yield self.linear(num_tokens, sizes.hidden // y, (1 + sizes.is_gated) * sizes.inner // x)
            yield self.linear(num_tokens, sizes.inner // x, sizes.hidden // y)
            return
        missed = (1 - sizes.num_experts_per_tok / sizes.num_experts) ** num_tokens
        used = max(1.0, sizes.num_experts * (1 - missed) / self.plan.expert)  # experts that get a token
        rows = num_tokens * sizes.num_experts_per_tok / self.plan.expert / used
        inner = int(getattr(self.config, "moe_intermediate_size", sizes.inner))
        yield self._expert(num_tokens, rows, sizes.hidden, 2 * inner, used)
        yield self._expert(num_tokens, rows, inner, sizes.hidden, used)
        if sizes.shared_inner:
            yield self.linear(num_tokens, sizes.hidden, 2 * sizes.shared_inner // x)
            yield self.linear(num_tokens, sizes.shared_inner // x, sizes.hidden)

    def linear(self, rows: int, inner: int, columns: int) -> WeightProduct:
        """Return the product of a linear."""
        return linear_product(self._form, self._place, rows, inner, columns)

    def _expert(self, num_tokens: int, rows: float, inner: int, columns: int, used: float) -> WeightProduct:
        form = self._form if self._of_experts else None
        return expert_product(form, self.item_bytes, num_tokens, rows, inner, columns, used)

    def _routing(self, num_tokens: int) -> Routing:
        """Ranks of `expert` route tokens by plain functions."""
        form = self._form if self._of_experts and self.plan.expert == 1 else None
        return routing(form, num_tokens, self.sizes, self.item_bytes)

    # --- drafts

    def draft(self, kind: str) -> tuple[Draft, int]:
        """Return what drafts tokens, by the kind of `weft serve --speculate`, and the most drafts of a step."""
        if kind == "ngram":
            return Draft(0), MAX_DRAFTS
        if kind.startswith(LAYERS):
            number, whole = early_layers(kind).number, self.sizes.num_layers
            if not 1 <= number < whole:
                raise ConfigError(
                    f"--speculate {kind}: drafts need at least 1 layer, and fewer than the model's {whole}"
                )
            return Draft(number), MAX_DRAFTS
        folder = Path(kind)
        if not folder.is_dir():
            raise ConfigError(
                f"--speculate {kind} is no folder; give ngram, layers=K, or the folder of a smaller model (its "
                f"config.json is enough)"
            )
        config = model_config(folder)
        refuse(ServingCase({"speculate": kind}, draft=kind_of(config)))
        assert not isinstance(config, RecurrentConfig)
        return Draft(config.num_layers, (config, ServingSpec(weights=folder_format(folder)), True)), MAX_DRAFTS


def linear_product(form: WeightFormat | None, place: Place, rows: int, inner: int, columns: int) -> WeightProduct:
    """Return the product of a linear with `rows` inputs, by the kernel that computes it on a GPU."""
    kernel = kernel_of(fast_path("linear", place, form, (columns, inner)), rows)
    if form is None:
        return WeightProduct(rows, inner, columns, kernel, place.dtype.itemsize * inner * columns)
    return WeightProduct(rows, inner, columns, kernel, weight_bytes(form, columns, inner), _codes(form))


def expert_product(
    form: WeightFormat | None, item_bytes: int, num_tokens: int, rows: float, inner: int, columns: int, used: float
) -> WeightProduct:
    """Return the product with each of `used` experts, which are one kernel. Each has so many rows in the mean;
    `num_tokens` are those of the step.
    """
    if form is None:
        return WeightProduct(rows, inner, columns, "matmul", item_bytes * inner * columns, None, used, True)
    kernel: Kernel = "tiles"
    if isinstance(form, Grouped) and num_tokens == 1 and fits_registers(form.bits, inner):
        kernel = "token"
    elif isinstance(form, Grouped) and (num_tokens == 1 or 2 * rows <= FEW_ROWS):
        kernel = "row" if num_tokens == 1 else "few rows"
    return WeightProduct(rows, inner, columns, kernel, weight_bytes(form, columns, inner), _codes(form), used, True)


def routing(form: WeightFormat | None, num_tokens: int, sizes: ServedSizes, item_bytes: int) -> Routing:
    """Return how a layer's tokens find their experts, whose weights have a format."""
    router_bytes, pairs = item_bytes * sizes.num_experts * sizes.hidden, num_tokens * sizes.num_experts_per_tok
    if form is None or num_tokens > MAX_ROUTED_TOKENS:
        return Routing("plain" if form is None else "many", router_bytes, 0)
    if num_tokens == 1 or pairs > MAX_PAIRS:
        return Routing("token" if num_tokens == 1 else "ordered", router_bytes, 0)
    lanes, experts = (1 << (number - 1).bit_length() for number in (pairs, sizes.num_experts))
    return Routing("few", router_bytes, lanes * (lanes + experts))


@lru_cache(maxsize=256)
def _calls(
    sizes: ServedSizes, plan: Plan, stage: int, num_tokens: int, num_sampled: int, item_bytes: int
) -> Counter[tuple[Key, int]]:
    if plan.num_ranks == plan.data:
        return Counter()
    return Counter(step_calls(sizes, plan, stage, num_tokens, num_sampled, item_bytes))


def _codes(form: WeightFormat) -> Codes:
    if not isinstance(form, Grouped):
        return "fp8"
    return "int4" if form.bits == 4 else "int8"


def _refuse_experts(config: TransformerConfig, sizes: ServedSizes) -> None:
    """Raise ConfigError for layers of experts that differ or have a dense MLP beside their experts."""
    if isinstance(config, DecoderConfig) and any(sizes.expert_layers):
        numbers = {number for number in config.num_experts_per_layer if number}
        if len(numbers) > 1 or config.residual_experts:
            given = "residual_experts = true" if config.residual_experts else f"layers of {sorted(numbers)} experts"
            raise ConfigError(
                f"{given} is served, and not priced: the planner prices layers of experts that are equal and have no "
                f"dense MLP beside them; measure it with weft bench serve"
            )
