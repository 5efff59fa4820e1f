"""Every option of serving, declared once: its name, type, default, range and meaning, and who takes it.

An option is a field of `ServingSpec`; its value is what was given, or its default. Read from here: the parameters of
`weft serve`, `weft generate` and `weft plan --serve` (`commands/serving_options.py`), docs/serving_options.md, what is
refused (`serve/refusals.py`), ranks and the planner. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from weft.errors import ConfigError

if TYPE_CHECKING:  # these import torch
    import torch
    from torch import nn

    from weft.serve.attention.formats import CacheFormat
    from weft.serve.head.graph_head import GraphHead
    from weft.serve.scheduling.grammar import Grammars
    from weft.serve.scheduling.speculation import EarlyLayers

T = TypeVar("T")
Command = Literal["serve", "generate", "plan"]
Device = Literal["cpu", "cuda"]
ALL: tuple[Command, ...] = ("serve", "generate", "plan")
RUNNING: tuple[Command, ...] = ("serve", "generate")
DEVICES: tuple[Device, ...] = ("cpu", "cuda")


@dataclass(frozen=True)
class Option:
    """What is known of an option beside its name, type and default."""

    help: str
    commands: tuple[Command, ...] = ("serve",)  # that take it; none: it is set in Python only
    flag: str | None = None  # on the command line, if it is not the field's name
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()  # all values, if these are a few words
    variable: str | None = None  # of the environment, from which it is read if it is not given
    on_gpu: Any = None  # the default on a GPU, where it is another than on CPUs
    devices: tuple[Device, ...] = DEVICES  # on which it can be used
    priced: tuple[Device, ...] = DEVICES  # for which `weft plan --serve` predicts its effect
    recurrent: bool = True  # goes with LSTM and GRU models


def option(default: T, help: str, **about: Any) -> T:
    """Return a field of a dataclass that is an option; `about` are the other fields of `Option`."""
    return field(default=default, metadata={"option": Option(help, **about)})


def option_of(one: Field[Any]) -> Option:
    """Return what is known of the option that a field is."""
    about = one.metadata["option"]
    assert isinstance(about, Option)
    return about


def flag_of(one: Field[Any]) -> str:
    """Return the name of an option on the command line."""
    return option_of(one).flag or f"--{one.name.replace('_', '-')}"


class Checked:
    """Options that are checked when they are set: by their range and their choices."""

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]  # a dataclass inherits this
            if "option" in one.metadata:
                _refuse_value(one, getattr(self, one.name))


def _refuse_value(one: Field[Any], value: Any) -> None:
    """Raise ConfigError for a value that is out of an option's range or none of its choices."""
    about = option_of(one)
    if about.choices and value is not None and value not in about.choices:
        *others, last = about.choices
        raise ConfigError(f"{flag_of(one)} {value} is unknown; give {', '.join(others)} or {last}")
    if about.minimum is not None and value is not None and value < about.minimum:
        raise ConfigError(f"{one.name} = {value} is less than {about.minimum:g}; give {about.minimum:g} or more")
    if about.maximum is not None and value is not None and value > about.maximum:
        raise ConfigError(f"{one.name} = {value} is more than {about.maximum:g}; give {about.maximum:g} or less")


@dataclass(frozen=True)
class EngineSizes(Checked):
    """How much an engine computes and holds at once. None means: from the model, or from the free memory."""

    context_length: int | None = option(
        None,
        "maximum tokens of prompt and answer together; default: the model's context",
        flag="--context",
        minimum=1,
    )
    max_running: int = option(
        64, "requests computed at once", commands=("serve", "plan"), minimum=1, on_gpu=256, priced=("cuda",)
    )
    max_waiting: int = option(256, "requests in the queue; beyond, clients get 429", minimum=0)
    token_budget: int = option(
        512,
        "tokens of a step, decodes and prompts",
        commands=("serve", "plan"),
        minimum=1,
        on_gpu=2048,
        priced=("cuda",),
    )
    num_blocks: int | None = option(
        None,
        "blocks of the key-value cache on each rank, of 16 tokens (--cache int4: 64, int4-32: 32, int4-128: 128); "
        "default: what running requests can use and memory holds",
        flag="--cache-blocks",
        minimum=1,
    )
    swap_blocks: int = option(
        0,
        "blocks in host memory for requests that go back to the queue; 0: their keys and values are recomputed",
        minimum=0,
        recurrent=False,
    )
    stream_weights: int = option(
        0,
        "keep block weights in host memory and copy them this many blocks ahead; 0: keep them on the device",
        commands=ALL,
        minimum=0,
        priced=("cuda",),
        recurrent=False,
    )
    resident_blocks: int = option(
        0,
        "with --stream-weights: this many blocks of each rank stay on the device",
        commands=ALL,
        minimum=0,
        priced=("cuda",),
        recurrent=False,
    )

    def sizes(self) -> EngineSizes:
        """Return these sizes alone."""
        return EngineSizes(*(getattr(self, one.name) for one in fields(EngineSizes)))

    @property
    def num_rows(self) -> int:
        """Requests that run at once: all their decodes fit the token budget."""
        return min(self.max_running, self.token_budget)


@dataclass(frozen=True)
class EngineOptions(EngineSizes):
    """What an engine is told in Python: sizes, and the objects that options of `ServingSpec` name."""

    max_waiting: int = 1024  # nobody waits for an answer
    block_size: int = option(  # of a block's page on each rank of `context`
        16, "tokens of a block of the key-value cache", commands=(), minimum=1
    )
    vocab_size: int | None = option(None, "token ids below this are generated", commands=(), minimum=1)
    prefix_cache: bool = True
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    overlap: bool | None = None  # read tokens after the next step is launched; None: on GPUs
    graphs: bool = True  # CUDA graphs of decodes
    adapters: Mapping[str, Path] = field(default_factory=dict)  # folders of PEFT by the names that requests choose
    grammars: Grammars | None = None  # compiles the schemas of requests; None: requests with schemas are refused
    speculate: Literal["ngram"] | EarlyLayers | nn.Module | None = None  # what drafts tokens
    cache: CacheFormat | None = None  # how keys and values are kept; None: as they are
    head: GraphHead | None = None  # finds the likeliest tokens by graph search; None: by all logits

    @staticmethod
    def of_texts(longest: int, cache: CacheFormat | None = None) -> EngineOptions:
        """Return options for texts of at most `longest` tokens, one after the other, and no requests."""
        num_blocks = -(-longest // 16)
        return EngineOptions(num_blocks=num_blocks, max_running=1, context_length=longest, cache=cache)


@dataclass(frozen=True)
class ServerLimits(Checked):
    """What a client may ask of the server."""

    body_bytes: int = option(4 << 20, "maximum bytes of a request; larger ones get 413", minimum=1)
    body_seconds: float = option(30.0, "seconds to send a request's body", commands=(), minimum=0.0)
    request_seconds: float = option(600.0, "seconds for a whole answer; later ones get 504", minimum=0.1)
    drain_seconds: float = option(30.0, "seconds to finish requests after SIGTERM or Ctrl-C", minimum=0.0)


@dataclass(frozen=True)
class ServingSpec(ServerLimits, EngineSizes):
    """What `weft serve`, `weft generate` and `weft plan --serve` are asked for. None means: as the model says."""

    host: str = option("127.0.0.1", "address to listen on; one that other machines can reach needs --api-key")
    port: int = option(8000, "0 takes a free one", minimum=0, maximum=65535)
    api_keys: tuple[str, ...] = option(
        (),
        "key that clients must send; repeat for several keys, each with its own prefix cache",
        flag="--api-key",
        variable="WEFT_API_KEY",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "origin of a web page that may ask from a browser (CORS), such as https://chat.example, or * for all pages; "
        "repeat for several",
    )
    name: str | None = option(None, "model name for clients; default: the folder's name")
    device: str = option("auto", "auto (a GPU where there is one), cpu or cuda", commands=RUNNING)
    follow: bool = option(False, "take newer checkpoints of a run that trains", recurrent=False)
    tokenizer: str | None = option(None, "bytes or a tokenizer.json, for HF folders without one", commands=RUNNING)
    chat_template: str | None = option(None, "a Jinja file; the model's own if not given")
    generation_config: bool = option(True, "take defaults of requests from the model's generation_config.json")
    adapters: tuple[str, ...] = option(
        (),
        "NAME=FOLDER of a PEFT adapter; a request selects it by giving NAME as its model",
        flag="--adapter",
        recurrent=False,
    )
    merge_adapter: str | None = option(None, "a folder of PEFT, added to the weights", recurrent=False)
    speculate: str | None = option(
        None,
        "draft tokens: ngram (by lookup in the request), layers=K (by the model's first K layers), or the FOLDER of a "
        "smaller model; answers stay the same, but for bf16's last bits and --weights of integers on a CPU",
        commands=ALL,
        priced=("cuda",),
        recurrent=False,
    )
    precision: str | None = option(
        None,
        "fp32 or bf16, in which a CPU computes; default: as a run is saved, fp32 for Hugging Face folders",
        commands=ALL,
        choices=("fp32", "bf16"),
        devices=("cpu",),
    )
    weights: str | None = option(
        None,
        "weights of linears in fewer bits: fp8, int8, int4, int4-128, on a CPU fp16 and int8-row too; changes answers, "
        "which on a CPU also depend on requests beside them (but for fp8 and fp16)",
        commands=ALL,
        recurrent=False,
    )
    cache: str | None = option(
        None,
        "fewer bytes of keys and values: int4, int4-32, int4-128 or loki=FILE; changes answers",
        commands=ALL,
        priced=("cuda",),
        recurrent=False,
    )
    head: str | None = option(
        None,
        "on a CPU: fp16, int8-row, int8, int4 or int4-128 for the head's weight, or graph=FILE or "
        "approximate-graph=FILE of weft index to search the likeliest tokens; changes answers",
        commands=ALL,
        devices=("cpu",),
    )
    sums: str = option(
        "library",
        "how ranks sum partial results: library, one-shot, two-shot, symmetric-one-shot, symmetric-two-shot (GPUs that "
        "read each other's memory), or measured (time all at start, use the fastest)",
        choices=("library", "one-shot", "two-shot", "symmetric-one-shot", "symmetric-two-shot", "measured"),
    )
    calibration: str | None = option(
        None, "text file to calibrate the rounding of --weights int4, int4-128 or int8", recurrent=False
    )
    share_gpus: bool = option(
        False,
        "ranks share GPUs if there are more ranks; for tests only, as it is slow",
        devices=("cuda",),
    )
    warm_up: bool = option(True, "compile, capture and tune before the first request, and not while it waits")
    log: str = option(
        "rates",
        "on stderr: rates (every 10 s, while there is work), requests (a line each, too), or none",
        choices=("rates", "requests", "none"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        named_adapters(self.adapters)

    def arguments(self, command: Command) -> str:
        """Return the options that differ from their defaults, as a command takes them: ` --weights int4`."""
        device: Device = "cuda" if self.device == "cuda" else "cpu"
        values = {one.name: getattr(self, one.name) for one in options_of(command)}
        given = {name: value for name, value in values.items() if value != default_on(name, device)}
        texts = {name: "" if value is True else f" {value}" for name, value in given.items()}
        return "".join(f" {flag_of(one)}{texts[one.name]}" for one in options_of(command) if one.name in given)


OPTIONS = {one.name: one for one in fields(ServingSpec)}


def named_adapters(pairs: Sequence[str]) -> dict[str, Path]:
    """Return the folders of adapters by name, from texts such as name=folder. Raises ConfigError."""
    folders: dict[str, Path] = {}
    for pair in pairs:
        name, _, folder = pair.partition("=")
        if not name or not folder or name in folders:
            raise ConfigError(f"--adapter '{pair}' must be name=FOLDER, each name once")
        folders[name] = Path(folder)
    return folders


def options_of(command: Command) -> list[Field[Any]]:
    """Return the options that a command takes: those of serving before sizes and limits."""
    options = [one for one in OPTIONS.values() if command in option_of(one).commands]
    return sorted(options, key=lambda one: one.name not in ServingSpec.__annotations__)


def default_on(name: str, device: Device) -> Any:
    """Return the default of an option on a device."""
    on_gpu = option_of(OPTIONS[name]).on_gpu
    return OPTIONS[name].default if device == "cpu" or on_gpu is None else on_gpu
