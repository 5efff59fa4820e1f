"""What a folder of weights says of its model: a Hugging Face folder, or a run or checkpoint of weft under any plan.

    source = open_source(Path("runs/first"))     # or a Hugging Face folder
    source.model                                 # the model's config
    source.read("model.norm.weight")             # a whole parameter or buffer, one at a time

Runs start from it (`model.from`), and `weft generate`, `weft export` and `weft evaluate` read it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor

from weft.checkpoint import Checkpoint, latest, steps
from weft.checkpoint.file_hashes import file_hashes
from weft.checkpoint.folder import step_name
from weft.checkpoint.manifest import MANIFEST
from weft.data.chat_template import load_template
from weft.data.config import ChatConfig, Data, DataConfig, as_saved, data_class, data_from_table, is_of_earlier_tokens
from weft.data.tokenizer import FileTokenizer, Tokenizer, identity_of, load_tokenizer
from weft.errors import CheckpointError, ConfigError, DamagedError, DataError, NumbersError, WeftError
from weft.inspection.model_tensors import saved_buffers
from weft.models import LanguageConfig, ModelConfig, config_from_table, read_config, weight_reader
from weft.models.adapter import adapter_weights
from weft.models.hf import weight_files
from weft.models.hf_config import CONFIG_FILE
from weft.models.tuning import Tuning, is_adapter, merged
from weft.schema import build_dataclass, parse_toml, to_table

T = TypeVar("T")
MAX_SIZE = 2**27  # the limit for any number in the model table of a checkpoint
TOKENIZER_FILE = "tokenizer.json"
HASHES_FILE = "weights.json"  # beside a run's checkpoints: hashes of the files that it started from
WHOLE_HASH = "whole:"  # begins a fingerprint; that of an earlier weft was of the ends of files


@dataclass(frozen=True)
class Source:
    """A model with its weights, to start from or to read.

    `data` has the keys of `[data]` that tell how its texts became tokens; none if a Hugging Face folder has no
    tokenizer. `read(name)` returns a whole parameter or buffer. `fingerprint` is a hash that detects other weights
    without reading all of them.
    """

    folder: Path
    model: LanguageConfig
    data: Mapping[str, Any]
    read: Callable[[str], Tensor]
    files: tuple[Path, ...]
    checkpoint: Checkpoint | None = None  # None for a Hugging Face folder


def open_source(folder: Path) -> Source:
    """Open a Hugging Face folder, a run or a checkpoint. Names and shapes of all its weights are checked."""
    if not folder.is_dir():
        raise ConfigError(f"'{folder}' is no folder; give a Hugging Face folder, a run or a checkpoint of weft")
    if (folder / CONFIG_FILE).is_file():
        config = read_config(folder)
        tokenizer = {"tokenizer": str(folder)} if (folder / TOKENIZER_FILE).is_file() else {}
        files = tuple(sorted(weight_files(folder)))
        read = weight_reader(folder, config)
        return Source(folder, config, tokenizer, read, files)
    if not (folder / MANIFEST).is_file() and latest(folder / "checkpoints") is None and latest(folder) is None:
        raise ConfigError(
            f"'{folder}' holds neither {CONFIG_FILE} (a Hugging Face folder) nor a complete checkpoint of weft; give a "
            f"folder that does"
        )
    checkpoint = open_checkpoint(folder)
    config, read = saved_model(checkpoint), saved_values(checkpoint)
    return Source(folder, config, _tokens_of(checkpoint), read, (checkpoint.path / MANIFEST,), checkpoint)


def _tokens_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the keys of `[data]` that tell how the texts of a checkpoint's run became tokens."""
    data, end_token = saved_data(checkpoint), None
    with suppress(DataError):  # another tokenizer may be given for one that is gone
        end_token = saved_end_token(checkpoint)
    found = {
        "tokenizer": saved_tokenizer(checkpoint),
        "end_token": end_token,
        "add_special_tokens": data.add_special_tokens,
        "template": saved_template(checkpoint),
    }
    return {key: value for key, value in found.items() if value is not None}


def with_tokenizer(table: Mapping[str, Any], source: Source) -> Mapping[str, Any]:
    """Returns the table `[data]` of a run that starts from a source: its texts become tokens as those of the source,
    unless the table names a tokenizer.
    """
    kind = data_class(table)
    if "tokenizer" in table or not issubclass(kind, DataConfig):
        return table
    if not source.data:
        raise ConfigError(f"model.from = '{source.folder}' has no {TOKENIZER_FILE}; give data.tokenizer")
    if source.checkpoint is not None:
        load_saved_tokenizer(source.checkpoint)  # refuses another one
        if "template" not in table:
            refuse_other_template(source.checkpoint)
    keys = {field.name for field in fields(kind)}
    return {**{key: value for key, value in source.data.items() if key in keys}, **table}


def weights_fingerprint(source: Path | None, adapter: str | None, folder: Path) -> str:
    """Returns a hash of all bytes of the weights, and of the adapter, that a run in `folder` starts from; "" if it
    starts from neither. The folder keeps what was hashed (`checkpoint/file_hashes.py`).
    """
    files = [] if source is None else list(open_source(source).files)
    if adapter is not None:
        files.append(adapter_weights(Path(adapter)))
    if not files:
        return ""
    hashes = file_hashes(files, folder / "checkpoints" / HASHES_FILE)
    named = [f"{path.name} {found}" for path, found in zip(files, hashes, strict=True)]
    return WHOLE_HASH + hashlib.sha256("\n".join(named).encode()).hexdigest()


def saved_values(checkpoint: Checkpoint) -> Callable[[str], Tensor]:
    """Returns a function that reads a whole parameter or buffer of the model in a checkpoint by its name, with LoRA's
    updates merged. All commands that use the model of a run read it with this function.
    """
    buffers = {entry.name for entry in checkpoint.entries("buffer")}

    def read(name: str) -> Tensor:
        return checkpoint.read(name, "buffer" if name in buffers else "parameter")

    lora = saved_tuning(checkpoint).lora
    names = {entry.name for entry in checkpoint.entries("parameter") if is_adapter(entry.name)}
    return read if lora is None else merged(read, lora, names)


def saved_tuning(checkpoint: Checkpoint) -> Tuning:
    """What the run of a checkpoint trained of its model."""
    table = checkpoint.state.get("tuning", {})
    if not isinstance(table, dict):
        raise CheckpointError(f"{checkpoint.path} states tuning = {table!r}, which is no table")
    return build_dataclass(Tuning, table, "tuning")


def saved_model(checkpoint: Checkpoint) -> LanguageConfig:
    """The config of the language model in a checkpoint, without a run file. Raises ConfigError for other models."""
    config = saved_config(checkpoint)
    if not isinstance(config, LanguageConfig):
        raise ConfigError(
            f"{checkpoint.path} is of a model of images ('{config.architecture}'), which writes no text; weft evaluate "
            f"measures it, and weft export writes its weights"
        )
    return config


def saved_config(checkpoint: Checkpoint) -> ModelConfig:
    """The config of the model in a checkpoint, without a run file."""
    table = checkpoint.stated("model", dict)
    if any(isinstance(value, int) and abs(value) > MAX_SIZE for value in table.values()):
        raise CheckpointError(
            f"{checkpoint.path} states a model with a size above {MAX_SIZE}; it is not what was saved"
        )
    config = config_from_table(table)
    _refuse_other_shapes(checkpoint, config)
    return config


def _refuse_other_shapes(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise CheckpointError unless the config's parameters and buffers are those of the checkpoint. Called before
    memory for the model is allocated.
    """
    kinds = ("parameter", "buffer")
    held = {(kind, entry.name): entry.shape for kind in kinds for entry in checkpoint.entries(kind)}
    if config.num_layers <= len(held):
        model = saved_tuning(checkpoint).build_on_meta(config)
        tensors = (model.named_parameters(), saved_buffers(model))
        wanted = {(kind, name): tuple(one.shape) for kind, own in zip(kinds, tensors, strict=True) for name, one in own}
    if config.num_layers > len(held) or wanted != held:
        raise CheckpointError(f"{checkpoint.path} states a model whose parameters are not those that it holds")


def saved_data(checkpoint: Checkpoint) -> DataConfig:
    """The `[data]` table of a checkpoint's run of text."""
    found = saved_samples(checkpoint)
    if not isinstance(found, DataConfig):
        raise CheckpointError(f"{checkpoint.path} states a run with data.kind = '{found.kind}', which is no text")
    return found


def saved_samples(checkpoint: Checkpoint) -> Data:
    """The `[data]` table of a checkpoint's run of text or images."""
    return data_from_table(as_saved(_data_table(checkpoint)))


def _data_table(checkpoint: Checkpoint) -> dict[str, Any]:
    data = parse_toml(checkpoint.stated("run", str), str(checkpoint.path)).get("data")
    if not isinstance(data, dict):
        raise CheckpointError(f"{checkpoint.path} states a run without [data]; it was not saved by weft train")
    return data


def saved_tokenizer(checkpoint: Checkpoint) -> str:
    """The tokenizer of a checkpoint's run: "bytes", or the path of its file or folder. A relative path starts at the
    folder in which the run was started, if that can be derived from the run's folder, or else at the current folder.
    """
    spec = saved_data(checkpoint).tokenizer
    return spec if spec == "bytes" else _place(checkpoint, spec)


def saved_end_token(checkpoint: Checkpoint) -> str | None:
    """The `data.end_token` with which documents end as they did in a checkpoint's run; None: without one. A run of an
    earlier weft may have ended documents with another token than is found now.
    """
    data = saved_data(checkpoint)
    if data.end_token is not None or not is_of_earlier_tokens(_data_table(checkpoint)):
        return data.end_token
    tokenizer = load_tokenizer(saved_tokenizer(checkpoint))
    earlier = tokenizer.earlier_end_token if isinstance(tokenizer, FileTokenizer) else None
    return None if earlier == tokenizer.end_token else earlier


def load_saved_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Returns the tokenizer of a checkpoint's run, with the run's special tokens."""
    adds, spec = saved_data(checkpoint).add_special_tokens, saved_tokenizer(checkpoint)
    found = load_tokenizer(spec, end_token=saved_end_token(checkpoint), adds_special_tokens=adds)
    _refuse_other(checkpoint, "tokenizer", spec, identity_of(found))
    return found


def _refuse_other(checkpoint: Checkpoint, kind: str, path: str, found: str) -> None:
    """Raises DataError if a file is not the one that made the texts of a checkpoint's run. An earlier weft did not say
    which one that was.
    """
    samples = checkpoint.state.get("data")
    wanted = samples.get(kind) if isinstance(samples, dict) else None
    if wanted is not None and wanted != found:
        raise DataError(
            f"{path} is another {kind} than that with which {checkpoint.path} was trained; put that one there again, "
            f"or name it"
        )


def saved_template(checkpoint: Checkpoint) -> str | None:
    """The path of the chat template that a checkpoint's run names, found as its tokenizer is; None if it names none."""
    data = saved_data(checkpoint)
    if not isinstance(data, ChatConfig) or data.template is None:
        return None
    return _place(checkpoint, data.template)


def refuse_other_template(checkpoint: Checkpoint) -> None:
    """Raises DataError if the chat template that a checkpoint's run names is there, and is not the one that wrote the
    run's texts.
    """
    path = saved_template(checkpoint)
    template = load_template(path, "bytes") if path is not None and Path(path).is_file() else None
    if template is not None:
        _refuse_other(checkpoint, "template", str(path), template.identity)


def refuse_changed_data(checkpoint: Checkpoint, fingerprint: str) -> None:
    """Raises DataError if the data of a checkpoint's run is not what it was trained on: what is held out of it now may
    have been trained on. Runs of an earlier weft had other tokens of the same texts, and do not say which.
    """
    found = checkpoint.stated("data", dict)
    is_comparable = "tokenizer" in found or not isinstance(saved_samples(checkpoint), DataConfig)
    if is_comparable and found.get("fingerprint") != fingerprint:
        raise DataError(
            f"the data of {checkpoint.path} is not what it was trained on, and what is held out of it now may have "
            f"been trained on; put that data there again, or give --data"
        )


def places_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Returns where the texts or images of a checkpoint's run and their cache are (`data.source`, `data.cache`), found
    as its tokenizer is.
    """
    table = to_table(saved_samples(checkpoint))
    found = {key: table[key] for key in ("source", "cache") if key in table}
    return {key: spec if spec == "stdlib" else _place(checkpoint, spec) for key, spec in found.items()}


def _place(checkpoint: Checkpoint, spec: str) -> str:
    if Path(spec).is_absolute():
        return spec
    found = [folder / spec for folder in (_started_in(checkpoint), Path()) if folder is not None]
    return str(next((path for path in found if path.exists()), found[0]))


def _started_in(checkpoint: Checkpoint) -> Path | None:
    """The folder in which a checkpoint's run was started; None if the checkpoint was moved since."""
    folder = parse_toml(checkpoint.stated("run", str), str(checkpoint.path)).get("folder")
    if not isinstance(folder, str) or not folder or Path(folder).is_absolute() or ".." in Path(folder).parts:
        return None
    parents, below = checkpoint.path.resolve().parents, Path(folder).parts
    if len(parents) <= 1 + len(below) or parents[1].parts[-len(below) :] != below:  # <folder>/checkpoints/<step>
        return None
    return parents[1 + len(below)]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint at a path, or the newest one of a run folder."""
    for folder in (path / "checkpoints", path):
        newest = latest(folder)
        if newest is not None:
            return Checkpoint(newest)
    refuse_unsaved(path)
    return Checkpoint(path)


def refuse_unsaved(path: Path) -> None:
    """Raise CheckpointError for the folder of a run that has not saved yet."""
    if not (path / MANIFEST).exists() and ((path / "checkpoints").is_dir() or (path / "metrics.jsonl").is_file()):
        raise CheckpointError(
            f"{path} is the folder of a run without a complete checkpoint; train it on, or save more often "
            f"(checkpoint.every)"
        )


def checkpoint_paths(path: Path) -> list[Path]:
    """The checkpoint at a path, or those of a run folder, the newest first."""
    folder = path / "checkpoints" if steps(path / "checkpoints") else path
    found = [folder / step_name(step) for step in reversed(steps(folder))]
    if not found:
        refuse_unsaved(path)
    return found or [path]


def first_usable(
    paths: Sequence[Path],
    use: Callable[[Path], T],
    say: Callable[[str], None],
    who_fails: Callable[[bool], tuple[bool, bool]] = lambda fails: (fails, fails),
) -> T:
    """Returns `use` of the first path that is not damaged and has finite numbers. `say` is told of each that is left
    out; the error of the last is raised.

    Ranks try the same paths together: `who_fails` is told whether this rank fails, and returns whether any does, and
    whether this is the first that does, which says why.
    """
    for path, after in zip(paths, (*paths[1:], None), strict=True):
        error: WeftError | None = None
        found: T | None = None
        try:
            found = use(path)
        except (DamagedError, NumbersError) as caught:
            error = caught
        any_fails, is_first = who_fails(error is not None)
        if not any_fails:
            return cast(T, found)
        if after is None:
            raise error or DamagedError(f"another rank cannot use {path}")
        if is_first:
            say(f"{path} is left out ({error}); {after.name} is tried")
    raise AssertionError("there is a path to try")


def with_intact_checkpoint(path: Path, use: Callable[[Checkpoint], T], say: Callable[[str], None]) -> T:
    """Returns `use` of the checkpoint at a path, or of the newest one of a run folder whose files are not damaged
    and whose numbers, if `use` checks them, are finite. `say` is told of each that is left out.
    """
    return first_usable(checkpoint_paths(path), lambda one: use(Checkpoint(one)), say)
