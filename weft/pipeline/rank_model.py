"""One interface to the part of a model that a rank holds: all of its layers, or the stages of a pipeline.

`rank_model(model)` is the only place that asks which of the two it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from weft.pipeline.runtime import Pipeline, Stage
from weft.profiling import Parameter
from weft.sharding.flat_buffer import Flat
from weft.sharding.units import Units, units_of


class RankModel:
    """A rank's part of a model. This class itself is that of a rank that holds all layers, whole or split."""

    pipeline: Pipeline | None = None  # where stages run by a schedule
    description = ""  # which stages the rank holds, for people

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @property
    def models(self) -> list[nn.Module]:
        """The modules that run on this rank: the model, or its stages."""
        return [self._model]

    @property
    def saved_models(self) -> list[nn.Module]:
        """Those whose buffers this rank writes to a checkpoint."""
        return self.models

    @property
    def parameter_names(self) -> set[str]:
        """The names of all parameters of the whole model."""
        return {name for name, _ in self._model.named_parameters()}

    def named_models(self) -> list[tuple[nn.Module, Callable[[Parameter], Parameter]]]:
        """Each module, and a function that gives one of its parameters its name in the whole model."""
        return [(self._model, lambda parameter: parameter)]

    def named_units(self) -> list[tuple[Units, Mapping[str, str]]]:
        """Each module's units, and the names of its parameters in the whole model where they differ."""
        units = units_of(self._model)
        return [] if units is None else [(units, {})]

    def flats_by_stage(self) -> Mapping[int, Sequence[Flat]] | None:
        """Flat buffers by stage, if sums over them must have the same bits whichever rank holds a stage."""
        return None

    def check_evaluation(self) -> None:
        """Raises a PlanError if the first evaluation would fail."""


class Stages(RankModel):
    """A rank that holds stages of a pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline: Pipeline = pipeline
        self._stages: list[Stage] = list(pipeline.parts.values())
        indices = sorted({stage.index for stage in self._stages})
        self.description = f"pipe stage{'s' * (len(indices) > 1)} {' and '.join(map(str, indices))}"

    @property
    def models(self) -> list[nn.Module]:
        return [stage.model for stage in self._stages]

    @property
    def saved_models(self) -> list[nn.Module]:
        return [stage.model for stage in self.pipeline.own]

    @property
    def parameter_names(self) -> set[str]:
        return set(self.pipeline.parameter_names)

    def named_models(self) -> list[tuple[nn.Module, Callable[[Parameter], Parameter]]]:
        return [(stage.model, stage.in_whole) for stage in self._stages]

    def named_units(self) -> list[tuple[Units, Mapping[str, str]]]:
        return [(stage.units, stage.names) for stage in self._stages]

    def flats_by_stage(self) -> Mapping[int, Sequence[Flat]] | None:
        if not self.pipeline.is_shadowed:
            return None
        empty: dict[int, Sequence[Flat]] = dict.fromkeys(range(self.pipeline.num_stages), ())
        return {**empty, **{stage.index: list(stage.units.flats) for stage in self.pipeline.own}}

    def check_evaluation(self) -> None:
        self.pipeline.check_evaluation()


def rank_model(model: nn.Module) -> RankModel:
    """The interface to a model that `parallelize` returned, or to a plain one."""
    return Stages(model) if isinstance(model, Pipeline) else RankModel(model)


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """The pipeline that runs a model's stages by a schedule; None where the model is called."""
    return rank_model(model).pipeline
