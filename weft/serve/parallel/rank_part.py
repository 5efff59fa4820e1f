"""Which part of a model a serving rank holds, and how its weights are read.

Serving uses the axes of training, with the same cuts of each parameter:

    data     replicas of the model; each has its own requests
    pipe     consecutive blocks. The rank at index 0, which schedules and samples, holds the last ones
    expert   experts; all ranks of the axis compute the rest alike
    context  no weight, but pages of the cache (`serve/attention/batch.py`); the rest is computed by all alike
    x, y     heads and features (`serve/model/linear.py`)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from weft.errors import ConfigError, PlanError
from weft.inspection.parameter_cut import Cut, share
from weft.models import GPT2, Decoder, LanguageConfig, RecurrentConfig, TransformerConfig, build
from weft.models.init import LanguageModel
from weft.plan import Context, Pipe, Plan
from weft.plan import Tensor as TensorDegrees
from weft.serve.parallel.traffic import ServedSizes
from weft.serve.weights.packed_experts import PackedStack
from weft.serve.weights.packed_linear import PackedLinear, names_to_pack
from weft.serve.weights.weight_formats import WeightFormat, weight_bytes

if TYPE_CHECKING:  # what splits a model is imported when one is split: commands of one rank start a second earlier
    from weft.profiling import Profile


@dataclass(frozen=True)
class RankPlace:
    """The plan, and this rank's index on each of its axes."""

    plan: Plan
    coordinates: Mapping[str, int]


def refuse_model(config: LanguageConfig) -> None:
    """Raise ConfigError if models of this architecture are not served."""
    if config.architecture == "deepseek_v3":
        raise ConfigError(
            "weft does not serve architecture 'deepseek_v3' yet: its latent keys and values are not kept in pages; "
            "serve a model of another architecture"
        )


def refuse_plan(config: LanguageConfig, plan: Plan) -> None:
    """Raise PlanError if a model cannot be served under a plan, ConfigError if it is not served at all."""
    refuse_model(config)
    assert not isinstance(config, RecurrentConfig), "`serve/refusals.py` refuses a plan of one"
    degrees = TensorDegrees(plan.tensor.x, plan.tensor.y)
    context = Context(plan.context.degree)
    served = Plan(data=plan.data, pipe=Pipe(plan.pipe.degree), expert=plan.expert, tensor=degrees, context=context)
    if plan != served:
        raise PlanError(
            "serving takes plan.data, plan.pipe, plan.expert, plan.context, plan.tensor.x and plan.tensor.y, and the "
            "plan sets more; leave out what is for training"
        )
    if plan.pipe.degree > config.num_layers:
        raise PlanError(
            f"pipe = {plan.pipe.degree} stages are more than the model's {config.num_layers} layers; use at most "
            f"{config.num_layers}"
        )
    if getattr(config, "residual_experts", False) and plan.tensor.x * plan.tensor.y * plan.expert > 1:
        raise PlanError("residual experts are not served over x, y or expert; use data or pipe")
    profile = _inspected(config)
    experts = [one.num_experts for block in profile.blocks for one in block.experts]
    if experts and plan.tensor.y > 1:
        raise PlanError(f"experts are not served over y, and plan.tensor.y = {plan.tensor.y}; use x or expert")
    if experts and min(experts) < plan.expert:
        raise PlanError(
            f"plan.expert = {plan.expert} is more than the {min(experts)} experts of a layer, which is not served; use "
            f"at most {min(experts)}"
        )
    from weft.parallel.apply import STRATEGIES

    for strategy in STRATEGIES:
        if {"x", "y", "expert"} & set(strategy.axes) and (reason := strategy.refuse(profile, plan)) is not None:
            raise PlanError(reason)


def stage_of(place: RankPlace) -> int:
    """Returns the stage that a rank holds: stage 0 embeds, the last one has the head."""
    return (place.coordinates["pipe"] - 1) % place.plan.pipe.degree


def build_part(config: TransformerConfig, place: RankPlace) -> tuple[Decoder | GPT2, dict[str, Cut]]:
    """Returns a rank's part of a model, on the meta device, and the cut of each of its parameters.

    Blocks, embeddings and head of other stages are replaced by nn.Identity. Modules keep their names.
    """
    from weft.parallel.cut_parameters import cut_parameters

    model = _on_meta(config)
    cuts = _cuts(config, model, place)
    cut_parameters(model, cuts)
    _keep_stage(model, place.plan.pipe.degree, stage_of(place))
    return model, {name: cuts[source_name(model, name)] for name, _ in model.named_parameters()}


def cuts_of(part: Decoder | GPT2, place: RankPlace) -> dict[str, Cut]:
    """Returns the cut of each parameter of a rank's part, whose linears may be quantised."""
    whole = _inspected(part.config).model
    assert whole is not None
    cuts = _cuts(part.config, whole, place)
    return {name: cuts[source_name(part, name)] for name, _ in part.named_parameters()}


def own_layers(config: TransformerConfig, place: RankPlace) -> range:
    """Returns the layers that a rank holds."""
    return range(*share(config.num_layers, place.plan.pipe.degree, stage_of(place)))


def own_key_heads(config: TransformerConfig, place: RankPlace) -> range:
    """Returns the key heads that a rank holds. Where ranks of x outnumber key heads, neighbours hold the same one."""
    number, degree, index = ServedSizes.of(config).num_key_heads, place.plan.tensor.x, place.coordinates["x"]
    repeats = max(1, degree // number)
    return range(*share(number, degree // repeats, index // repeats))


def part_bytes(
    config: TransformerConfig,
    place: RankPlace,
    item_bytes: int,
    format: WeightFormat | None = None,
    with_experts: bool = True,
) -> int:
    """Returns the bytes of the parameters that a rank holds, without building them: with linears, and experts if
    `with_experts`, in a format if one is given.
    """
    if format is None:
        return part_numel(config, place) * item_bytes
    saved = {}
    for name, shape in _local_shapes(config, place.plan, tuple(place.coordinates.items())).items():
        if name in _packed_names(config, with_experts):
            saved[name] = math.prod(shape) * item_bytes - _packed_bytes(format, shape)
    return part_numel(config, place) * item_bytes - _of_stage(config, place, saved)


def block_bytes(
    config: TransformerConfig,
    place: RankPlace,
    item_bytes: int,
    format: WeightFormat | None = None,
    with_experts: bool = True,
) -> list[int]:
    """Returns the bytes of the parameters of each block that a rank holds, in formats as `part_bytes` has them."""
    num_bytes = [0] * config.num_layers
    for name, shape in _local_shapes(config, place.plan, tuple(place.coordinates.items())).items():
        layer = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
        if layer is not None:
            is_packed = format is not None and name in _packed_names(config, with_experts)
            plain = math.prod(shape) * item_bytes
            num_bytes[int(layer[1])] += _packed_bytes(format, shape) if format and is_packed else plain
    return num_bytes[slice(*share(config.num_layers, place.plan.pipe.degree, stage_of(place)))]


def _packed_bytes(format: WeightFormat, shape: tuple[int, ...]) -> int:
    """Returns the bytes of a linear's weight, or of a stack of them, in a format."""
    return weight_bytes(format, math.prod(shape[:-1]), shape[-1])


def part_numel(config: TransformerConfig, place: RankPlace) -> int:
    """Returns how many parameters a rank's part has, without building it."""
    shapes = _local_shapes(config, place.plan, tuple(place.coordinates.items()))
    return _of_stage(config, place, {name: math.prod(shape) for name, shape in shapes.items()})


def _of_stage(config: TransformerConfig, place: RankPlace, amounts: Mapping[str, int]) -> int:
    """Returns the sum of amounts over the parameters of a rank's stage."""
    num_stages, stage = place.plan.pipe.degree, stage_of(place)
    begin, end = share(config.num_layers, num_stages, stage)
    is_first, is_last = stage == 0, stage == num_stages - 1
    total = 0
    for name, amount in amounts.items():
        layer = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
        if layer is not None:
            total += amount * (begin <= int(layer[1]) < end)
        elif re.search(r"\.(?:embed_tokens|wte|wpe)\.", name):
            is_second = config.tie_word_embeddings and is_last and not is_first and "wpe" not in name
            total += amount * (is_first or is_second)
        else:
            total += amount * is_last
    return total


@lru_cache(maxsize=64)
def _local_shapes(
    config: TransformerConfig, plan: Plan, coordinates: tuple[tuple[str, int], ...]
) -> dict[str, tuple[int, ...]]:
    """Returns the shape of a rank's part of each parameter, of all stages."""
    model = _inspected(config).model
    assert model is not None
    cuts = _cuts(config, model, RankPlace(plan, dict(coordinates)))
    return {name: tuple(cut.local_shape) for name, cut in cuts.items()}


@lru_cache(maxsize=4)
def _packed_names(config: TransformerConfig, with_experts: bool) -> frozenset[str]:
    """Returns the names of weights that a format can quantise."""
    return frozenset(names_to_pack(_on_meta(config), with_experts))


def _cuts(config: TransformerConfig, model: nn.Module, place: RankPlace) -> dict[str, Cut]:
    """Returns a rank's part of every parameter, of all stages."""
    from weft.parallel.expert.layers import expert_cuts
    from weft.parallel.tensor.cuts import parameter_cuts

    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    cuts = parameter_cuts(_inspected(config).pairing, shapes, place.plan, place.coordinates)
    if place.plan.expert > 1:
        of_experts = expert_cuts(model, shapes, place.plan, place.coordinates)
        cuts = {name: cut.beside(of_experts[name]) for name, cut in cuts.items()}
    return cuts


def build_whole(config: LanguageConfig) -> tuple[LanguageModel, dict[str, Cut]]:
    """Returns a whole model, on the meta device, and the cuts of its parameters, which are whole."""
    with torch.device("meta"):
        model = build(config)
    return model, {name: Cut.whole(parameter.shape) for name, parameter in model.named_parameters()}


def source_name(model: LanguageModel, name: str) -> str:
    """Returns the name under which a parameter of a part is saved: a tied head is saved as the embedding."""
    return model.config.embedding_name if name == "lm_head.weight" and model.config.tie_word_embeddings else name


@dataclass(frozen=True)
class PartValues:
    """Reads the values of a rank's part: whole parameters, one at a time, are cut. Quantised linears and experts
    (`serve/weights/packed_linear.py`) get codes, which are computed on `device`, or returned by `packed` for the name
    of a weight and its module.
    """

    model: LanguageModel
    cuts: Mapping[str, Cut]
    read: Callable[[str], Tensor]
    device: torch.device | str
    packed: Callable[[str, PackedLinear | PackedStack], Sequence[Tensor]] | None = None

    @torch.no_grad()
    def give(self, modules: Iterable[nn.Module]) -> None:
        """Give modules of the part their values, without those of modules inside them. Their tensors have memory."""
        wanted = {id(one) for one in modules}
        dtype = next(self.model.parameters()).dtype
        for prefix, module in self.model.named_modules():
            if id(module) not in wanted:
                continue
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if name in self.cuts:  # a tied head is not
                    parameter.copy_(self._own(name))
            if isinstance(module, PackedStack):
                if self.packed is not None:
                    module.take_parts(self.packed(prefix, module))
                else:
                    module.take(prefix, self._own(prefix), dtype, self.device)
            elif isinstance(module, PackedLinear) and self.packed is not None:
                module.take_parts(self.packed(f"{prefix}.weight", module))
            elif isinstance(module, PackedLinear):
                module.read(f"{prefix}.weight", self._own(f"{prefix}.weight").to(self.device, dtype))

    def give_all(self) -> None:
        """Give the part, which is on the meta device, memory on the device and its values."""
        self.model.to_empty(device=self.device)
        self.give(self.model.modules())

    def _own(self, name: str) -> Tensor:
        return self.cuts[name].take(self.read(source_name(self.model, name)))


def read_part(
    model: Decoder | GPT2, cuts: Mapping[str, Cut], read: Callable[[str], Tensor], device: torch.device | str
) -> None:
    """Give a part on the meta device memory on a device, and its values."""
    PartValues(model, cuts, read, device).give_all()


@lru_cache(maxsize=4)
def _inspected(config: TransformerConfig) -> Profile:
    """Returns what a model is made of and how it can be split, which is found out once for each config."""
    from weft.profiling.structure import structure

    return structure(_on_meta(config))


def _on_meta(config: TransformerConfig) -> Decoder | GPT2:
    with torch.device("meta"):
        return build(config)


def _keep_stage(model: Decoder | GPT2, num_stages: int, stage: int) -> None:
    """Replace what other stages hold by nn.Identity."""
    layers = model.model.layers if isinstance(model, Decoder) else model.transformer.h
    begin, end = share(len(layers), num_stages, stage)
    for index in range(len(layers)):
        if not begin <= index < end:
            layers[index] = nn.Identity()
    is_first, is_last = stage == 0, stage == num_stages - 1
    body, others = (
        (model.model, ("embed_tokens",)) if isinstance(model, Decoder) else (model.transformer, ("wte", "wpe"))
    )
    if not (is_first and is_last):
        model.tied_to = None  # the head and the embedding are on different ranks, each with its own copy
    for name in () if is_first else others:
        setattr(body, name, nn.Identity())
    if not is_last:
        setattr(body, "norm" if isinstance(model, Decoder) else "ln_f", nn.Identity())
        model.lm_head = nn.Identity()  # type: ignore[assignment]
