"""Reads and writes the weights of Hugging Face folders, safetensors files, without transformers.

Reading is strict: a tensor that is missing, unexpected or of another shape is an error before anything is loaded.
Pickled weights are never opened. Writing streams shards into a temporary folder, which is renamed when it is complete.

Most tensors of a folder are a parameter as it is. GPT-2's projections are stored transposed (Conv1D). The experts of a
layer are stored one by one, and are stacked in two parameters: the gates and ups of all experts, and their downs.
Layers of LSTM and GRU have the names of torch's `nn.LSTM` and `nn.GRU` (`rnn.weight_ih_l0`).
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.architectures import DecoderConfig, GPT2Config, LanguageConfig, ModelConfig, RecurrentConfig
from weft.errors import CheckpointError
from weft.models.hf_config import CONFIG_FILE, folder_quantisation, read_json, write_config
from weft.models.init import LanguageModel, build
from weft.models.quantised_weight import FileTensor, QuantisedWeight, joined_weights

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Buffers in old files; they follow from the config and are ignored.
LEGACY_BUFFERS = re.compile(r"(^|\.)(h\.\d+\.attn\.(bias|masked_bias)|self_attn\.rotary_emb\.inv_freq)$")
HEAD_NAME = "lm_head.weight"
CONV1D_WEIGHTS = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")
# Names of an expert's gate, up and down projection in the folders of an architecture, and of what contains experts.
_QWEN_NAMES = ("mlp", "gate_proj", "up_proj", "down_proj")
EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen2_moe": _QWEN_NAMES,
    "qwen3_moe": _QWEN_NAMES,
}
RECURRENT_LAYER = re.compile(r"^layers\.(\d+)\.((?:weight|bias)_[ih]h)$")
Place = tuple[int | slice, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a folder: its name and shape there, and its place in a parameter (empty: all of it)."""

    name: str
    parameter: str
    shape: tuple[int, ...]
    place: Place = ()
    is_transposed: bool = False

    def of(self, parameter: Tensor) -> Tensor:
        """Returns the tensor to store, from the whole parameter."""
        part = parameter[self.place] if self.place else parameter
        return part.t() if self.is_transposed else part


def stored_tensors(config: LanguageConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    """Returns the tensors of a folder by their names there. `shapes` are those of weft's parameters."""
    made = (one for name, shape in shapes.items() for one in _stored(config, name, shape))
    return {one.name: one for one in made}


def _stored(config: LanguageConfig, name: str, shape: tuple[int, ...]) -> Iterator[StoredTensor]:
    if isinstance(config, RecurrentConfig):
        yield StoredTensor(RECURRENT_LAYER.sub(r"rnn.\2_l\1", name), name, shape)
        return
    if isinstance(config, GPT2Config):
        is_transposed = CONV1D_WEIGHTS.search(name) is not None
        yield StoredTensor(name, name, shape[::-1] if is_transposed else shape, is_transposed=is_transposed)
        return
    if ".mlp.experts." in name:
        yield from _experts(config, name, shape)
        return
    within, *_ = EXPERT_NAMES.get(config.architecture, ("mlp",))
    stored_name = name.replace(".mlp.gate.", f".{within}.gate.")
    yield StoredTensor(stored_name, name, shape)


def _experts(config: DecoderConfig, name: str, shape: tuple[int, ...]) -> Iterator[StoredTensor]:
    """Returns the tensors of a parameter that stacks all experts of a layer."""
    within, gate, up, down = EXPERT_NAMES[config.architecture]
    layer, _, kind = name.partition(".mlp.experts.")
    num_experts, outputs, inputs = shape
    inner = outputs // 2
    parts: dict[str, tuple[slice, ...]] = (
        {down: ()} if kind == "down_proj" else {gate: (slice(0, inner),), up: (slice(inner, outputs),)}
    )
    for expert in range(num_experts):
        for part, rows in parts.items():
            stored_name = f"{layer}.{within}.experts.{expert}.{part}.weight"
            yield StoredTensor(stored_name, name, (outputs if not rows else inner, inputs), (expert, *rows))


def read_weights(folder: Path, model: LanguageModel) -> None:
    """Copy the weights of a folder into a model, in the model's dtype and on its device."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights(folder, model.config):
            parameters[name].copy_(tensor)


def weights(folder: Path, config: LanguageConfig) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter of a folder by weft's name, one at a time, without a tied head."""
    read = weight_reader(folder, config)
    return ((name, read(name)) for name in parameter_shapes(config))


def weight_reader(folder: Path, config: LanguageConfig) -> Callable[[str], Tensor]:
    """Returns a function that reads a parameter's tensor from the folder by its name. Names and shapes of all tensors
    are checked at once. If the folder has a tied head, it must equal the embedding.
    """
    return FolderWeights(folder, config).read


class FolderWeights:
    """The parameters of a folder. Names and shapes of all tensors are checked at once. If the folder has a tied head,
    it must equal the embedding. `quantisation` says how weights are quantised; None: they are not.
    """

    def __init__(self, folder: Path, config: LanguageConfig) -> None:
        self._shapes = parameter_shapes(config)
        expected = stored_tensors(config, self._shapes)
        self.quantisation = folder_quantisation(folder)
        stored = _stored_tensors(folder, config)
        found: Mapping[str, FileTensor | QuantisedWeight] = stored
        if self.quantisation is not None:
            shapes = {name: one.shape for name, one in expected.items()}
            found = joined_weights(stored, shapes, self.quantisation)
        _check_found(folder, config, found, expected)
        self._found = found
        self._parts: dict[str, list[StoredTensor]] = {}
        for one in expected.values():
            self._parts.setdefault(one.parameter, []).append(one)
        if config.tie_word_embeddings and HEAD_NAME in found:
            head = found[HEAD_NAME]
            if not torch.equal(head.read(), self.read(config.embedding_name)):
                raise CheckpointError(
                    f"{head.file}: {head.name} differs from the embedding, but tie_word_embeddings = true; "
                    f"set it to false in {CONFIG_FILE}"
                )

    def read(self, parameter: str) -> Tensor:
        """Returns a whole parameter, in float32 if it is quantised."""
        first, *others = self._parts[parameter]
        tensor = self._found[first.name].read()
        if not first.place:
            return tensor.t() if first.is_transposed else tensor
        whole = torch.empty(self._shapes[parameter], dtype=tensor.dtype)
        whole[first.place] = tensor
        for other in others:
            whole[other.place] = self._found[other.name].read()
        return whole

    def quantised(self, parameter: str) -> list[QuantisedWeight]:
        """Returns the quantised weights that make up a parameter: none, itself, or those of several experts."""
        found = [self._found[one.name] for one in self._parts.get(parameter, [])]
        return [one for one in found if isinstance(one, QuantisedWeight)]


def save_folder(folder: Path, model: LanguageModel) -> None:
    """Write a whole model as a folder that transformers loads."""
    write_weights(folder, model.config, model.named_parameters())


def write_weights(
    folder: Path,
    config: LanguageConfig,
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: int = 4 * 1024**3,
    files: Mapping[str, Path | str] | None = None,
) -> None:
    """Write a folder that transformers loads: config.json and the weights. `tensors` has weft's names, in any order.
    `files` maps names in the folder to other files to copy there, or to their text.

    At most one shard is in memory. A tied head may be given and is left out. The folder appears when it is complete.
    """
    with new_folder(folder) as partial:
        write_config(partial, config)
        for name, path in (files or {}).items():
            if isinstance(path, str):
                (partial / name).write_text(path, encoding="utf-8")
            else:
                shutil.copyfile(path, partial / name)
        shapes = parameter_shapes(config)
        stored = stored_tensors(config, shapes)
        shard: dict[str, Tensor] = {}
        shard_of: dict[str, int] = {}
        seen: set[str] = set()
        num_shards, shard_bytes, total_bytes = 1, 0, 0
        for name, tensor in tensors:
            if config.tie_word_embeddings and name == HEAD_NAME:
                continue
            _check_tensor(folder, name, tensor, shapes, seen)
            seen.add(name)
            if shard and shard_bytes + tensor.nbytes > max_shard_bytes:
                _save(partial, num_shards, shard)
                shard, shard_bytes, num_shards = {}, 0, num_shards + 1
            own = [one for one in stored.values() if one.parameter == name]
            shard |= {one.name: one.of(tensor.detach().cpu()).contiguous() for one in own}
            shard_of |= {one.name: num_shards for one in own}
            shard_bytes, total_bytes = shard_bytes + tensor.nbytes, total_bytes + tensor.nbytes
        missing = [name for name in shapes if name not in seen]
        if missing:
            raise CheckpointError(f"{folder}: {_some(missing)} missing from the tensors to write; give every parameter")
        _save(partial, num_shards, shard)
        _name_shards(partial, shard_of, num_shards, total_bytes)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every parameter of a model, without a tied head."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in build(config).named_parameters()}


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """Returns the weight files of a folder, and the tensors that the index lists in each; None if there is no index."""
    if (folder / SINGLE_FILE).exists():  # transformers also prefers it
        return {folder / SINGLE_FILE: None}
    index = folder / INDEX_FILE
    if not index.exists():
        pickled = sorted(file.name for file in folder.glob("*.bin"))
        advice = f"; {pickled[0]} is pickled and never opened, convert it to safetensors first" if pickled else ""
        raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{advice}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no table 'weight_map' of tensor names to file names")
    files: dict[Path, set[str] | None] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
            raise CheckpointError(f"{index}: tensor {name} points to {file!r}, which is no safetensors file name in it")
        if not (folder / file).exists():
            raise CheckpointError(f"{folder / file} does not exist, but {INDEX_FILE} places tensor {name} in it")
        listed = files.setdefault(folder / file, set())
        assert listed is not None
        listed.add(name)
    return files


def open_safetensors(file: Path) -> Any:
    """Returns a handle of a safetensors file on the CPU; raises CheckpointError for a damaged one."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}; fetch it again") from None


def _stored_tensors(folder: Path, config: LanguageConfig) -> dict[str, FileTensor]:
    """Returns the tensors of a folder's files, by their full names."""
    found: dict[str, FileTensor] = {}
    for file, listed in weight_files(folder).items():
        handle = open_safetensors(file)
        if listed is not None and (differing := sorted(listed ^ set(handle.keys()))):
            raise CheckpointError(f"{file} and {INDEX_FILE} disagree on {_some(differing)}; fetch both again")
        for raw_name in handle.keys():  # noqa: SIM118 (a handle is not a mapping)
            name = _full_name(raw_name, config)
            if LEGACY_BUFFERS.search(raw_name):
                continue
            if name in found:
                raise CheckpointError(f"{file}: {raw_name} is the tensor {name} a second time; remove one of them")
            found[name] = FileTensor(file, handle, raw_name)
    return found


def _check_found(
    folder: Path,
    config: LanguageConfig,
    found: Mapping[str, FileTensor | QuantisedWeight],
    expected: Mapping[str, StoredTensor],
) -> None:
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(f"{folder}: {_some(missing)} missing from its safetensors files; is it another model?")
    shapes = {name: one.shape for name, one in expected.items()}
    if config.tie_word_embeddings:
        shapes[HEAD_NAME] = shapes[config.embedding_name]
    for name, one in found.items():
        if name not in shapes:
            raise CheckpointError(f"{one.file}: unexpected tensor {one.name}; the config has no such parameter")
        if one.shape != shapes[name]:
            raise CheckpointError(f"{one.file}: {one.name} has shape {one.shape}, but the config needs {shapes[name]}")
        if isinstance(one, FileTensor):
            refuse_integers(one.file, one.name, one.dtype)


def refuse_integers(file: Path, name: str, dtype: str) -> None:
    """Raise CheckpointError if a weight's dtype, as safetensors names it, is not of floating-point numbers."""
    if not dtype.startswith(("F", "BF")):
        raise CheckpointError(
            f"{file}: {name} has dtype {dtype}, and weights are floating-point numbers; give the folder as it was "
            f"trained, or with the quantization_config that says what its whole numbers mean"
        )


def _check_tensor(
    folder: Path, name: str, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]], seen: set[str]
) -> None:
    if name not in shapes:
        raise CheckpointError(f"{folder}: unexpected tensor {name} to write; the config has no such parameter")
    if name in seen:
        raise CheckpointError(f"{folder}: tensor {name} is given twice")
    if tuple(tensor.shape) != shapes[name]:
        raise CheckpointError(f"{folder}: {name} has shape {tuple(tensor.shape)}, but the config needs {shapes[name]}")


def _full_name(raw_name: str, config: LanguageConfig) -> str:
    """Returns the full name of a tensor. Files of a bare GPT2Model lack the prefix `transformer.`, which is added."""
    if isinstance(config, GPT2Config) and not raw_name.startswith(("transformer.", "lm_head.")):
        return f"transformer.{raw_name}"
    return raw_name


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder beside the target. It is renamed to the target if the block succeeds, else removed."""
    folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not an empty folder; choose a new one or remove it")
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} cannot be written: {error}; check the path, its permissions and the space left"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _shard_name(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def _save(folder: Path, number: int, shard: dict[str, Tensor]) -> None:
    save_file(shard, folder / _shard_name(number), metadata={"format": "pt"})  # transformers requires this metadata


def _name_shards(folder: Path, shard_of: Mapping[str, int], num_shards: int, total_bytes: int) -> None:
    """Rename the shards to their final names, which contain the number of shards, and write the index."""
    if num_shards == 1:
        (folder / _shard_name(1)).rename(folder / SINGLE_FILE)
        return
    final = {n: f"model-{n:05d}-of-{num_shards:05d}.safetensors" for n in range(1, num_shards + 1)}
    for number, name in final.items():
        (folder / _shard_name(number)).rename(folder / name)
    weight_map = {name: final[number] for name, number in sorted(shard_of.items())}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _some(names: list[str]) -> str:
    """Returns the first names of a list, for a message."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor {', '.join(names[:3])}{more}"
