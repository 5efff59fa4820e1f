"""How the keys and values of a model are kept and attended to: what `weft serve --cache` names.

A format is a storage (plain, or 4 bits) and a choice of the tokens to which decodes attend (all, or Loki's). `SERVED`
is the table of those that are served. Ranks of `context` share the pages of each. A step of a block of the model is

    slots, keys, values = layer.room(batch)          where the step's keys and values are written
    query = rotate_and_store(..., slots, keys, values)
    mixed = layer.attend(query, keys, values, batch, window)

On a GPU, a step of few decodes over plain pages is one kernel instead (`whole_attention_kernel.py`). Which blocks
belong to which request is the business of `serve/scheduling/blocks.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.inspection.parameter_cut import Cut
from weft.serve.attention.attend import merged
from weft.serve.attention.batch import CacheSizes, PagedBatch
from weft.serve.attention.choice import LokiChoice, LokiPages
from weft.serve.attention.four_bits import GROUP, GROUPS, FourBitStorage
from weft.serve.attention.plain import MAX_WHOLE_DECODES, PlainPages, PlainStorage

DEFAULT_BLOCK_SIZE = 16
FOUR_BITS = {"int4" if group == GROUP else f"int4-{group}": group for group in GROUPS}
LOKI_FILE = "weft loki 2"
ALL, LOKI = "all", "loki"
# Storage and choice: whether decodes on a GPU in 16 bits are kernels that read a request's own tokens alone, where a
# rank has whole blocks, and where ranks share the pages. Elsewhere, plain functions attend.
SERVED = {("plain", ALL): (True, True), ("plain", LOKI): (True, False), ("int4", ALL): (True, False)}
MODULUS = 1 << 64  # of sums of hashes


class KeptPages(Protocol):
    """Keys and values in pages, and the attention to them."""

    pages: Sequence[Tensor]  # each [blocks, ...]; to copy a block is to copy its entry of each

    def room(self, batch: PagedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Slots [tokens], and keys and values [slots, key heads, head_dim] of which these slots are to be written."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        """Keep what was written to `keys` and `values`. Returns the attention [tokens, heads, head_dim], or this rank's
        part of it.
        """


class CacheLayer:
    """The keys and values of one block of the model on this rank."""

    def __init__(self, storage: KeptPages, sizes: CacheSizes) -> None:
        self.storage, self._axis = storage, sizes.context
        self.pages = storage.pages
        # Zeros for `whole_attention_kernel.py`; None: pages are not plain or not whole, or `attend` does more.
        self.counts: Tensor | None = None
        if isinstance(storage, PlainPages) and sizes.context is None:
            number = MAX_WHOLE_DECODES * sizes.num_key_heads
            self.counts = torch.zeros(number, dtype=torch.int32, device=sizes.device)

    def room(self, batch: PagedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """`KeptPages.room`."""
        return self.storage.room(batch)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, window: int | None) -> Tensor:
        """Keep what was written to `keys` and `values`, and attend: [tokens, heads, head_dim]."""
        own = self.storage.attend(query, keys, values, batch, window)
        return own if self._axis is None else merged(own, self._axis, query.dtype)


@dataclass(frozen=True, eq=False)
class Loki:
    """The axes of keys [layers, key heads, head_dim, head_dim], key @ axes[layer, head], and how tokens are chosen."""

    axes: Tensor
    choice: LokiChoice = field(default_factory=LokiChoice)
    identity: str = ""  # of the model that the axes were made for (`model_identity`); "": any

    def part(self, layers: range, key_heads: range) -> Loki:
        """Return the axes of a rank that has these layers and key heads of the model."""
        own = self.axes[layers.start : layers.stop, key_heads.start : key_heads.stop]
        return Loki(own, self.choice, self.identity)


@dataclass(eq=False)
class CacheFormat:
    """How keys and values are kept, and which of them decodes attend to."""

    storage: PlainStorage | FourBitStorage = field(default_factory=PlainStorage)
    loki: Loki | None = None  # None: decodes attend to all tokens

    def __post_init__(self) -> None:
        if self._kinds not in SERVED:
            raise ConfigError(f"Loki is not served over a cache of {self.storage.name}; give one of the two")

    @property
    def _kinds(self) -> tuple[str, str]:
        return self.storage.kind, ALL if self.loki is None else LOKI

    @property
    def kind(self) -> str:
        """plain, int4 or loki."""
        return self.storage.kind if self.loki is None else LOKI

    @property
    def name(self) -> str:
        return self.storage.name if self.loki is None else LOKI

    @property
    def identity(self) -> str:
        """The model that the format was made for; empty: any."""
        return "" if self.loki is None else self.loki.identity

    @property
    def block_size(self) -> int | None:
        """Tokens of a page that it needs; None: any."""
        return self.storage.block_size

    def has_kernel(self, is_shared: bool) -> bool:
        """Are decodes on a GPU in 16 bits kernels? `is_shared`: ranks hold pages together."""
        return SERVED[self._kinds][is_shared]

    def part(self, layers: range, key_heads: range) -> CacheFormat:
        """Return the format of a rank that has these of the model's layers and key heads."""
        return self if self.loki is None else CacheFormat(self.storage, self.loki.part(layers, key_heads))

    def layer(self, index: int, sizes: CacheSizes) -> CacheLayer:
        """Return the cache of the block number `index` of this rank's model."""
        pages = self.storage.new_pages(sizes)
        if self.loki is None:
            return CacheLayer(pages, sizes)
        assert isinstance(pages, PlainPages), "as SERVED says"
        return CacheLayer(LokiPages(self.loki.axes[index], self.loki.choice, pages, sizes), sizes)

    def bytes_per_token(self, num_key_heads: int, head_dim: int, item_bytes: int) -> float:
        """Return the bytes of a token in the pages of one block of the model."""
        num_dims = 0 if self.loki is None else self.loki.choice.num_dims(head_dim)
        of_storage = self.storage.bytes_per_token(num_key_heads, head_dim, item_bytes)
        return of_storage + num_key_heads * num_dims * item_bytes

    def bytes_per_row(self, num_key_heads: int, head_dim: int, item_bytes: int) -> int:
        """Return the bytes beside the pages that one block of the model needs for each running request."""
        return self.storage.bytes_per_row(num_key_heads, head_dim, item_bytes)

    def bytes_of_layer(self, num_key_heads: int, head_dim: int, item_bytes: int) -> int:
        """Return the bytes of Loki's axes for one block of the model."""
        return 0 if self.loki is None else num_key_heads * head_dim**2 * max(4, item_bytes)


def cache_format(name: str | None) -> CacheFormat:
    """Return the format that --cache names; without a name, keys and values as they are. Raises ConfigError."""
    if name is None:
        return CacheFormat()
    if name in FOUR_BITS:
        return CacheFormat(FourBitStorage(FOUR_BITS[name]))
    if name.startswith("loki=") and name != "loki=":
        return CacheFormat(loki=load_loki(Path(name.removeprefix("loki="))))
    raise ConfigError(
        f"--cache {name} is unknown; give int4, int4-32 or int4-128, or loki=FILE with a file of weft calibrate"
    )


def why_slow(found: CacheFormat, device: str, dtype: torch.dtype, is_shared: bool = False) -> list[str]:
    """Return the reasons why decodes with a cache of this format are slow on a device; the model computes in `dtype`.
    `is_shared`: ranks hold pages together.
    """
    if device == "cpu" or found.kind == PlainStorage.kind:
        return []
    if not found.has_kernel(is_shared):
        return [f"--cache {found.name} has no kernels for decodes on GPUs: plain functions attend, which is slow"]
    if dtype.itemsize == 2:
        return []
    return [
        f"--cache {found.name} has kernels for 16 bits alone, and this GPU computes in {dtype}: plain functions "
        f"attend, which is slow"
    ]


def block_size_of(found: CacheFormat) -> int:
    """Return the tokens of a block of the cache, for `weft serve`."""
    return found.block_size or DEFAULT_BLOCK_SIZE


def save_loki(path: Path, found: Loki) -> None:
    """Write a file that `load_loki` reads."""
    about = {
        "kind": LOKI_FILE,
        "model": found.identity,
        **{key: str(value) for key, value in asdict(found.choice).items()},
    }
    try:
        save_file({"axes": found.axes.float().contiguous()}, str(path), about)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write {path} ({error}); choose another place by --out") from None


def load_loki(path: Path) -> Loki:
    """Read the file that `weft calibrate` wrote. Raises ConfigError."""
    try:
        with safe_open(str(path), "pt") as file:
            about, axes = file.metadata() or {}, file.get_tensor("axes")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--cache loki={path} cannot be read ({error}); run weft calibrate") from None
    if about.get("kind") != LOKI_FILE or axes.dim() != 4 or not bool(axes.isfinite().all()):
        raise ConfigError(f"--cache loki={path} is no file of weft calibrate, or of an older one; run weft calibrate")
    product = axes.double().mT @ axes.double()
    if float((product - torch.eye(axes.shape[-1])).abs().max()) > 1e-5:
        raise ConfigError(f"the axes in {path} are not orthogonal: the file is damaged; run weft calibrate")
    try:
        numbers = (float(about["dims"]), float(about["tokens"]), int(about["newest"]), int(about["dense_below"]))
        return Loki(axes, LokiChoice(*numbers), about["model"])
    except (KeyError, ValueError):
        raise ConfigError(f"--cache loki={path} lacks some of its numbers: it is damaged; run weft calibrate") from None


def model_identity(
    model: nn.Module, cuts: Mapping[str, Cut] | None = None, add_up: Callable[[int], int] = lambda number: number
) -> str:
    """Return a text that tells models apart, the same in any dtype and format: files made for one model are refused by
    another. It is a hash of the config and of all numbers in vectors (norms and biases), each with its place.

    With `cuts`, `model` is a rank's part, and `add_up` gives the sum (modulo 2^64) of what its ranks give.
    """
    total = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            cut = Cut.whole(parameter.shape) if cuts is None else cuts[name]
            if cut.is_first:  # others have the same part
                places = np.concatenate([np.arange(*one, dtype=np.uint64) for one in cut.intervals[0]])
                total += _sum_of_hashes(name, parameter.detach(), places)
    config = repr(getattr(model, "config", ""))
    return hashlib.sha256(f"{config} {add_up(total % MODULUS)}".encode()).hexdigest()


def _sum_of_hashes(name: str, values: torch.Tensor, places: NDArray[np.uint64]) -> int:
    """Return the sum of hashes of a vector's numbers in bf16, each with its name and place."""
    bits = values.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().astype(np.uint64)
    seed = np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
    mixed = _mixed(_mixed(seed + places) + bits)
    return int(np.sum(mixed, dtype=np.uint64))


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each number of 64 bits (splitmix64)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
