"""What the tests of tiles share: models as people write them, and the comparison of a tile's run with the whole's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import images_for_tests
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm import Ledger, all_reduce
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.parallel.tile import tile
from weft.plan import Memory, Plan, Shard, Tile
from weft.spatial.dry_run import DryRun, dry_run
from weft.spatial.tile_layout import Grid
from weft.spatial.tiled_model import install
from weft.spatial.view import View

NUM_CLASSES = 5
Make = Callable[[], nn.Module]
Case = tuple[Make, tuple[int, ...]]
GRIDS = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1)]


# --- models


class UNet(nn.Module):
    """Down and up again, with skips; what does not fit is padded, as people do. Logits [batch, rows, columns, n]."""

    def __init__(self, up: str = "transposed", norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()

        def double(inputs: int, outputs: int) -> nn.Sequential:
            layers: list[nn.Module] = []
            for width in (inputs, outputs):
                layers += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), norm(outputs), nn.ReLU(inplace=True)]
            return nn.Sequential(*layers)

        self.down1, self.down2, self.bottom = double(3, 4), double(4, 8), double(8, 8)
        self.pool = nn.MaxPool2d(2)
        if up == "transposed":
            self.up2: nn.Module = nn.ConvTranspose2d(8, 8, 2, stride=2)
            self.up1: nn.Module = nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1)
        else:
            self.up2 = nn.Upsample(scale_factor=2, mode=up, align_corners=None if up == "nearest" else True)
            self.up1 = nn.Upsample(scale_factor=2, mode=up)
        self.merge2, self.merge1, self.head = double(16, 8), double(12, 4), nn.Conv2d(4, NUM_CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.down1(images)
        second = self.down2(self.pool(first))
        hidden = self.bottom(self.pool(second))
        hidden = self.merge2(torch.cat([second, _fit(self.up2(hidden), second)], dim=1))
        hidden = self.merge1(torch.cat([first, _fit(self.up1(hidden), first)], dim=1))
        logits: Tensor = self.head(hidden).permute(0, 2, 3, 1)
        return logits


def _fit(value: Tensor, like: Tensor) -> Tensor:
    rows, columns = like.size(2) - value.size(2), like.size(3) - value.size(3)
    return F.pad(value, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])


class Squeeze(nn.Module):
    """Squeeze and excitation: a number for each channel from the whole image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1)

    def forward(self, value: Tensor) -> Tensor:
        scale = self.up(F.silu(self.down(value.mean((2, 3), keepdim=True))))
        return value * scale.sigmoid()


class Mixed(nn.Module):
    """What modern networks put together: long kernels, branches, channels last, shuffles, squeezes, positions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=2)
        self.positions = nn.Parameter(torch.linspace(-1, 1, 8 * 7 * 8).view(1, 8, 7, 8))
        self.wide, self.tall = nn.Conv2d(4, 4, (1, 7), padding=(0, 3)), nn.Conv2d(4, 4, (7, 1), padding=(3, 0))
        self.depthwise, self.norm = nn.Conv2d(8, 8, 5, padding=2, groups=8), nn.LayerNorm(8)
        self.expand, self.project = nn.Linear(8, 16), nn.Linear(16, 8)
        self.squeeze, self.attend = Squeeze(8), nn.Conv2d(2, 1, 3, padding=1)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images) + self.positions
        left, right = hidden.chunk(2, dim=1)
        hidden = hidden + torch.cat([F.gelu(self.wide(left)), torch.tanh(self.tall(right))], 1)
        batch, channels, rows, columns = hidden.shape
        hidden = hidden.view(batch, 2, channels // 2, rows, columns).transpose(1, 2).reshape(hidden.shape)
        mixed = self.norm(self.depthwise(hidden).permute(0, 2, 3, 1))  # [batch, rows, columns, channels]
        hidden = hidden + self.project(F.gelu(self.expand(mixed))).permute(0, 3, 1, 2)
        hidden = self.squeeze(hidden)
        pooled = torch.cat([hidden.mean(1, keepdim=True), hidden.max(1, keepdim=True)[0]], 1)
        hidden = hidden * self.attend(pooled).sigmoid()
        hidden = F.avg_pool2d(hidden[:, :, 1:], 3, stride=2, padding=1) - F.max_pool2d(hidden[..., :-1, :], 3, 2, 1)
        logits: Tensor = self.head(F.adaptive_avg_pool2d(F.relu(hidden, inplace=True), 1).flatten(1))
        return logits


class Streams(nn.Module):
    """Cells that each take the results of the last `num` cells, the newest first; two of them halve the image."""

    def __init__(self, num: int = 2) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, NUM_CLASSES)
        sizes, cells = [1] * num, []  # of the results, as parts of the image's; the newest last
        for stride in (1, 2, 1, 1, 2, 1):
            size = sizes[-1] * stride
            cells.append(Cell([size // one for one in reversed(sizes)]))
            sizes = [*sizes[1:], size]
        self.num, self.cells = num, nn.ModuleList(cells)

    def forward(self, images: Tensor) -> Tensor:
        results = [self.stem(images)] * self.num
        for cell in self.cells:
            results = [*results[1:], cell(*reversed(results))]
        logits: Tensor = self.head(results[-1].mean((2, 3)))
        return logits


class Cell(nn.Module):
    """The sum of convolutions, one of each input."""

    def __init__(self, strides: Sequence[int]) -> None:
        super().__init__()
        self.takes = nn.ModuleList(nn.Conv2d(4, 4, 3, stride=stride, padding=1) for stride in strides)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, *images: Tensor) -> Tensor:
        taken = [take(image) for take, image in zip(self.takes, images, strict=True)]
        return torch.relu(self.norm(sum(taken[1:], taken[0])))


def images(rows: int, columns: int, batch: int = 4, dense: bool = False) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Batches of images and a class each, or one for each pixel."""

    def make(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(900 + step)
        labels = torch.randint(0, NUM_CLASSES, (batch, rows, columns) if dense else (batch,), generator=generator)
        return torch.randn(batch, 3, rows, columns, generator=generator), labels

    return make


# --- one tile against the whole


def compare(make: Make, shape: tuple[int, ...], mesh: Mesh, plan: Tile) -> dict[str, Any]:
    """The worst differences of a tile's result and gradients from the whole's, and how the result lies."""
    torch.manual_seed(0)
    whole = make().double()
    model = copy.deepcopy(whole)
    image = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = whole(image)
    weights = torch.randn_like(expected)  # a loss that tells every output from every other
    (expected * weights).sum().backward()
    tiled = install(model, View(Grid(mesh["rows"], mesh["columns"], mesh["tile"]), plan), (shape[-2], shape[-1]))
    own = tile(image.detach(), mesh).requires_grad_()
    out = model(own)
    if tiled.output == "tile":
        parts = (tile(expected.detach(), mesh), tile(weights, mesh))
    else:
        parts = (expected.detach(), weights / mesh["tile"].degree)
    if out.shape != parts[0].shape:
        return {"lies": tiled.output, "forward": 1e9, "why": f"{list(out.shape)} for {list(parts[0].shape)}"}
    (out * parts[1]).sum().backward()
    assert own.grad is not None
    assert image.grad is not None
    found = [_difference(own.grad, tile(image.grad, mesh))]
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        all_reduce(mine.grad, mesh["tile"]).wait()
        found.append(_difference(mine.grad, other.grad))
    buffers = zip(model.buffers(), whole.buffers(), strict=True)
    return {
        "lies": tiled.output,
        "forward": _difference(out.detach(), parts[0]),
        "gradient": max(found),
        "buffer": max((_difference(mine.double(), other.double()) for mine, other in buffers), default=0.0),
    }


def _difference(found: Tensor, expected: Tensor) -> float:
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return float((found - expected).abs().max()) / scale if expected.numel() else 0.0


def compare_all(cases: Sequence[Case], grid: tuple[int, int]) -> list[dict[str, Any]]:
    """Each case on a grid of ranks: the worst of what they found."""
    plan = Tile(*grid)

    def rank(_: int) -> list[dict[str, Any]]:
        mesh = Mesh(Plan(tile=plan))
        return [compare(make, shape, mesh, plan) for make, shape in cases]

    by_rank = run_local(rank, plan.degree, 120)
    return [
        {key: max((one.get(key, 0) for one in found), key=_order) for key in found[0]}
        for found in zip(*by_rank, strict=True)
    ]


def _order(value: Any) -> Any:
    return (str(value),) if isinstance(value, str) else ("", float("inf") if value != value else value)


def dry(model: nn.Module, shape: tuple[int, ...], plan: Tile, row: int = 0, column: int = 0) -> DryRun:
    """A rank's dry run."""
    from weft.profiling import profile

    found = profile(model, lambda: (torch.zeros(shape),))
    return dry_run(found, Plan(tile=plan), {"rows": row, "columns": column})


def counted(ledger: Ledger) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and bytes."""
    return {key: (value.calls, value.num_bytes) for key, value in ledger.entries().items()}


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "plain": (images_for_tests.plain, images_for_tests.image_batch),
    "classic": (images_for_tests.Classic, images_for_tests.image_batch),
    "GroupNorm": (images_for_tests.group_resnet, images(11, 14)),
    "BatchNorm": (images_for_tests.batch_resnet, images(11, 14)),
    "unet": (UNet, images(13, 18, 2, dense=True)),
    "unet, upsampled": (lambda: UNet("bilinear", lambda width: nn.GroupNorm(2, width)), images(13, 18, 4, dense=True)),
    "unet, thin": (UNet, images(12, 16, 4, dense=True)),
    "mixed": (Mixed, images(16, 18)),
    "vit": (images_for_tests.ViT, images_for_tests.image_batch),
    "streams": (Streams, images(16, 24)),
    "three streams": (lambda: Streams(3), images(16, 24)),
}


def over(rows: int, columns: int, recompute: Any = "none", **others: Any) -> Plan:
    """A plan of tiles."""
    names = ("until", "hand_over", "fused")
    options = {name: others.pop(name) for name in names if name in others}
    return Plan(tile=Tile(rows, columns, **options), memory=Memory(recompute), **others)


CASES: dict[str, tuple[str, Plan]] = {
    "1 × 2": ("plain", over(1, 2)),
    "2 × 1": ("classic", over(2, 1)),
    "2 × 2": ("BatchNorm", over(2, 2)),
    "1 × 4": ("mixed", over(1, 4)),
    "4 × 1": ("classic", over(4, 1, micro_batch=2)),
    "unet": ("unet", over(2, 1)),
    "unet, whole in the middle": ("unet, thin", over(4, 1)),
    "patches": ("vit", over(2, 1)),
    "full": ("BatchNorm", over(1, 2, "full")),
    "selective": ("GroupNorm", over(2, 1, "selective")),
    "full, handed over": ("BatchNorm", over(1, 2, "full", until="layer2")),
    "shard 3": ("plain", over(1, 2, shard=Shard(2, 3), micro_batch=1)),
    "data, full": ("plain", over(2, 1, "full", data=2)),
    "batch": ("plain", over(2, 2, hand_over="batch")),
    "batch, until": ("BatchNorm", over(1, 2, hand_over="batch", until="layer2")),
    "until": ("classic", over(2, 2, until="conv2")),
    "streams": ("streams", over(2, 2, until="cells.2")),
    "streams, batch, full": ("streams", over(1, 2, "full", until="cells.1", hand_over="batch")),
    "three streams": ("three streams", over(2, 1, until="cells.3")),
    "fused 2": ("BatchNorm", over(2, 1, fused=2)),
    "fused 5, full": ("plain", over(2, 2, "full", fused=5)),
}
