"""How the keys and values of a model are kept and attended to: what `weft serve --cache` names.

A format is a storage (plain, or 4 bits) and a choice of the tokens to which decodes attend (all, or Loki's). `SERVED`
is the table of those that are served. Ranks of `context` share the pages of each.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.errors import ConfigError
from weft.serve.attention.batch import CacheSizes
from weft.serve.attention.choice import LokiChoice, LokiPages
from weft.serve.attention.four_bits import GROUP, GROUPS, FourBitStorage
from weft.serve.attention.layer import CacheLayer
from weft.serve.attention.plain import PlainPages, PlainStorage

DEFAULT_BLOCK_SIZE = 16
FOUR_BITS = {"int4" if group == GROUP else f"int4-{group}": group for group in GROUPS}
LOKI_FILE = "weft loki 2"
ALL, LOKI = "all", "loki"
# Storage and choice: whether decodes on a GPU in 16 bits are kernels that read a request's own tokens alone, where a
# rank has whole blocks, and where ranks share the pages. Elsewhere, plain functions attend.
SERVED = {("plain", ALL): (True, True), ("plain", LOKI): (True, False), ("int4", ALL): (True, False)}


@dataclass(frozen=True, eq=False)
class Loki:
    """The axes of keys [layers, key heads, head_dim, head_dim], key @ axes[layer, head], and how tokens are chosen."""

    axes: Tensor
    choice: LokiChoice = field(default_factory=LokiChoice)
    identity: str = ""  # of the model that the axes were made for (`model_identity.py`); "": any

    def part(self, layers: range, key_heads: range) -> Loki:
        """Those of a rank that has these of the model's layers and key heads."""
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
        """The format of a rank that has these of the model's layers and key heads."""
        return self if self.loki is None else CacheFormat(self.storage, self.loki.part(layers, key_heads))

    def layer(self, index: int, sizes: CacheSizes) -> CacheLayer:
        """The cache of the block number `index` of this rank's model."""
        pages = self.storage.new_pages(sizes)
        if self.loki is None:
            return CacheLayer(pages, sizes)
        assert isinstance(pages, PlainPages), "as SERVED says"
        return CacheLayer(LokiPages(self.loki.axes[index], self.loki.choice, pages, sizes), sizes)

    def bytes_per_token(self, num_key_heads: int, head_dim: int, item_bytes: int) -> float:
        """Bytes of a token in the pages of one block of the model."""
        num_dims = 0 if self.loki is None else self.loki.choice.num_dims(head_dim)
        of_storage = self.storage.bytes_per_token(num_key_heads, head_dim, item_bytes)
        return of_storage + num_key_heads * num_dims * item_bytes

    def bytes_per_row(self, num_key_heads: int, head_dim: int, item_bytes: int) -> int:
        """Bytes beside the pages for each running request, of one block of the model."""
        return self.storage.bytes_per_row(num_key_heads, head_dim, item_bytes)

    def bytes_of_layer(self, num_key_heads: int, head_dim: int, item_bytes: int) -> int:
        """Bytes beside the pages whatever runs, of one block of the model: Loki's axes."""
        return 0 if self.loki is None else num_key_heads * head_dim**2 * max(4, item_bytes)


def cache_format(name: str | None) -> CacheFormat:
    """The format of a name; None is that of keys and values as they are. Raises ConfigError."""
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
    """Why decodes with a cache of this format are slow on a device, if they are; the model computes in `dtype`.
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
    """Tokens of a block of the cache, for `weft serve`."""
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
