"""What serving refuses: one table of options that do not go with each other, with the model, the device or the plan.

`weft serve`, `weft generate`, `weft plan --serve`, the loading of a model, `Engine` and the planner ask it by `refuse`.
The range and the choices of one option alone are checked where it is declared (`serve/spec.py`), and what depends on
the contents of a file where that file is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, fields, replace
from typing import Any, Literal

from weft.architectures import ModelConfig, RecurrentConfig
from weft.errors import ConfigError, PlanError, WeftError
from weft.plan import Plan
from weft.serve.attention.formats import CacheFormat
from weft.serve.scheduling.speculation import LAYERS, EarlyLayers
from weft.serve.spec import OPTIONS, EngineSizes, flag_of, option_of

Model = Literal["attention", "recurrent"]


@dataclass(frozen=True)
class ServingCase:
    """What is asked of the table: the options that are given, and what they are to go with. None: not known (yet)."""

    given: Mapping[str, Any]  # values other than the default, by the names of the options
    plan: Plan = Plan()  # noqa: RUF009 (a frozen value)
    on_ranks: bool = False  # the process is one of several, or a launcher's only one
    model: Model | None = None
    draft: Model | None = None  # the model that --speculate names
    device: str | None = None  # cpu or cuda
    cache: CacheFormat | None = None  # the format that --cache names
    has_codes: bool = False  # some of the model's weights are quantised
    is_planned: bool = False  # `weft plan --serve` asks

    @staticmethod
    def of(options: EngineSizes, names: Collection[str] = OPTIONS, **about: Any) -> ServingCase:
        """Return the case of a `ServingSpec` or of `EngineOptions`, as far as it has options of these names; `about`
        are the other fields.
        """
        defaults = {one.name: one.default for one in fields(options) if one.name in names and one.name in OPTIONS}
        given = {
            name: value
            for name, default in defaults.items()
            if (value := getattr(options, name)) is not None and value is not default and value not in (default, (), {})
        }
        return ServingCase(given, **about)

    def has(self, *names: str) -> bool:
        """Are all these options given?"""
        return all(name in self.given for name in names)

    @property
    def several(self) -> bool:
        """Is the model served by ranks?"""
        return self.on_ranks or self.plan.num_ranks > 1

    @property
    def drafts_by_layers(self) -> bool:
        """Do the model's own first layers draft?"""
        value = self.given.get("speculate")
        return value.startswith(LAYERS) if isinstance(value, str) else isinstance(value, EarlyLayers)

    @property
    def searches_head(self) -> bool:
        """Are the likeliest tokens found by a graph?"""
        head = self.given.get("head")
        return head is not None and (not isinstance(head, str) or "graph=" in head)

    @property
    def rounds_head(self) -> bool:
        """Is the head's weight quantised?"""
        return self.has("head") and not self.searches_head


@dataclass(frozen=True)
class Refusal:
    """A row of the table. `reason` and `remedy` name values of the case in braces."""

    when: Callable[[ServingCase], bool]
    reason: str
    remedy: str = "leave out one of them"
    kind: type[WeftError] = ConfigError

    def raise_for(self, case: ServingCase) -> None:
        """Raise the error of this row if the case is one of it."""
        if self.when(case):
            raise self.kind(f"{self.reason}; {self.remedy}".format(**case.given, case=case))


REFUSALS = (
    Refusal(
        lambda case: case.device == "cuda" and case.has("precision") and not case.is_planned,
        "--precision {precision} is for CPUs; a GPU computes in bf16 if it can, else as the weights are saved",
        "leave it out",
    ),
    Refusal(
        lambda case: case.device == "cpu" and case.has("share_gpus"),
        "--share-gpus is for --device cuda, and the device is the CPU",
        "leave it out",
    ),
    Refusal(
        lambda case: case.device == "cuda" and case.searches_head and not case.is_planned,
        "--head graph is for CPUs: a GPU reads the whole output matrix faster",
        "leave it out",
    ),
    Refusal(
        lambda case: case.device == "cuda" and case.rounds_head and not case.is_planned,
        "--head {head} is for models of attention on CPUs",
        "leave it out",
    ),
    Refusal(
        lambda case: case.has("follow", "calibration") and case.plan.num_ranks > 1,
        "--follow with --calibration would correct the rounding of newer weights while requests wait, as ranks read "
        "them between two steps",
        "leave out one of them, or serve on one rank, which does both meanwhile",
    ),
    Refusal(
        lambda case: case.has("follow", "stream_weights"),
        "--follow replaces weights, which --stream-weights does not allow: weights in host memory cannot be replaced "
        "while they are served",
        "leave out one of them, or start another engine",
    ),
    Refusal(
        lambda case: case.has("follow") and case.searches_head,
        "--follow replaces weights, which the graph of --head is made of",
    ),
    Refusal(
        lambda case: case.has("follow") and case.cache is not None and case.cache.loki is not None,
        "--follow replaces weights, of which the axes of --cache loki are made",
    ),
    Refusal(
        lambda case: case.has("resident_blocks") and not case.has("stream_weights"),
        "--resident-blocks says how many blocks are not streamed",
        "give --stream-weights too",
    ),
    Refusal(
        lambda case: case.has("calibration") and not case.has("weights"),
        "--calibration corrects rounded weights",
        "give --weights int4 or int8 too",
    ),
    Refusal(
        lambda case: case.has("merge_adapter") and (case.has("weights") or case.rounds_head),
        "--merge-adapter changes weights that --weights and --head round",
        "export a merged model first",
    ),
    Refusal(
        lambda case: case.several and (case.has("adapters") or case.has("merge_adapter")),
        "--adapter and --merge-adapter need one rank",
        "serve without a plan, or export a merged model first",
    ),
    Refusal(
        lambda case: case.has("adapters") and (case.has("weights") or case.has_codes),
        "adapters cannot be added to weights in fewer bits",
        "leave out --weights or --adapter",
    ),
    Refusal(
        lambda case: case.has("adapters", "stream_weights"),
        "weights are streamed without adapters",
        "leave out --stream-weights or --adapter",
    ),
    Refusal(
        lambda case: case.several and case.has("swap_blocks"),
        "--swap-blocks needs one rank: other ranks compute again what they lack",
        "leave it out",
    ),
    Refusal(
        lambda case: case.several and case.searches_head,
        "--head graph needs one rank, which has the whole output matrix",
        "serve without a plan",
    ),
    Refusal(
        lambda case: case.several and case.drafts_by_layers,
        "early layers draft on one rank only, because other ranks compute whole steps",
        "serve without a plan, or give --speculate ngram or a folder",
    ),
    Refusal(
        lambda case: case.draft == "recurrent",
        "an LSTM or GRU cannot draft (--speculate): its state does not go back over a rejected draft",
        "give another model",
    ),
    Refusal(
        lambda case: case.has("stream_weights") and case.plan.data > 1 and case.plan.pipe.degree > 1,
        "plan.data = {case.plan.data} replicas read weights in host memory together, step by step, and the stages of "
        "plan.pipe = {case.plan.pipe.degree} are in different steps",
        "use one of the two, or leave out --stream-weights",
        PlanError,
    ),
    Refusal(
        lambda case: case.has("stream_weights") and case.plan.data > 1 and bool(case.cache and case.cache.identity),
        "plan.data = {case.plan.data} replicas read weights in host memory together, have shares of each block, and "
        "cannot compare them with the file of --cache {case.cache.name}",
        "leave out plan.data, --stream-weights or --cache",
        PlanError,
    ),
)


def kind_of(config: ModelConfig) -> Model:
    """Return what the table calls a model."""
    return "recurrent" if isinstance(config, RecurrentConfig) else "attention"


def refuse(case: ServingCase) -> None:
    """Raise ConfigError or PlanError for the first row of the table that a case is one of."""
    _refuse_for_recurrent(case)
    for one in REFUSALS:
        one.raise_for(case)
    if case.is_planned:
        _refuse_unpriced(case)


def refuse_following(case: ServingCase) -> None:
    """Raise ConfigError if the weights of a case cannot be replaced while they are served."""
    refuse(replace(case, given={**case.given, "follow": True}))


def _refuse_for_recurrent(case: ServingCase) -> None:
    """Raise ConfigError for what LSTM and GRU models do not have, as the options say of themselves."""
    if case.model != "recurrent":
        return
    names = ["the plan"] if case.several else []
    names += [flag_of(one) for one in _given(case) if not option_of(one).recurrent]
    names += ["--head"] if case.rounds_head else []
    if names:
        raise ConfigError(
            f"a recurrent model is served on one rank, with its weights as they are, on the device, and keeps one "
            f"state for each request and no keys and values; leave out {' and '.join(names)}"
        )
    if case.is_planned and case.device == "cuda":
        raise ConfigError("LSTM and GRU models are priced on a CPU only; give --cluster machine.toml of one")


def _refuse_unpriced(case: ServingCase) -> None:
    """Raise ConfigError for options that cannot be used on the device that is planned for, or have no price there."""
    for one in _given(case):
        about, flag, value = option_of(one), flag_of(one), case.given[one.name]
        if case.device is not None and case.device not in about.devices:
            raise ConfigError(f"{flag} {value} is for a CPU; leave it out, or give --cluster machine.toml of one")
        if case.device is not None and case.device not in about.priced:
            raise ConfigError(f"{flag} is not priced on a CPU; leave it out, or plan for a GPU")


def _given(case: ServingCase) -> list[Field[Any]]:
    return [OPTIONS[name] for name in case.given]
