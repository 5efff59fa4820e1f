"""The table `[model]` of image models: ResNet, deep ResNet, AmoebaNet-D and U-Net."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, get_args

from weft.architectures.sizes import require_positive
from weft.errors import ConfigError

NormKind = Literal["batch", "group"]
Norm = Annotated[NormKind, "batch norm, or group norm, which does not mix images"]
Classes = Annotated[int, "classes of the labels; by default 2 of slides, and those that labels.csv names"]
Channels = Annotated[int, "channels of an image"]
Width = Annotated[int, "channels of the first stage"]

# depth -> the kind of block, and the number of blocks in each of the four stages
BLOCKS: dict[int, tuple[Literal["basic", "bottleneck"], tuple[int, int, int, int]]] = {
    10: ("basic", (1, 1, 1, 1)),
    14: ("bottleneck", (1, 1, 1, 1)),
    18: ("basic", (2, 2, 2, 2)),
    26: ("bottleneck", (2, 2, 2, 2)),
    34: ("basic", (3, 4, 6, 3)),
    50: ("bottleneck", (3, 4, 6, 3)),
    101: ("bottleneck", (3, 4, 23, 3)),
    152: ("bottleneck", (3, 8, 36, 3)),
}
NUM_STAGES = 3
# The number of layers that one more block per stage adds to the depth.
LAYERS_OF = {1: 6, 2: 9}
NUM_GROUPS = 3  # groups of normal cells, with a reduction cell between groups


class VisionConfigBase:
    """What configs of image models have alike."""

    size_multiple: ClassVar[int] = 1  # height and width must be multiples of this
    is_dense: ClassVar[bool] = False  # whether there is a label for each pixel, not one for each image
    is_compiled: ClassVar[bool] = True


@dataclass(frozen=True)
class ResNetConfig(VisionConfigBase):
    """The config of a ResNet."""

    architecture: Annotated[Literal["resnet"], "ResNet"] = "resnet"
    depth: Annotated[int, "layers of the published network"] = 50
    num_classes: Classes = 1000
    in_channels: Channels = 3
    width: Width = 64
    groups: Annotated[int, "groups of the 3 × 3 convolutions (ResNeXt)"] = 1
    width_per_group: Annotated[int, "channels of a group in a stage of 64 channels, as in torchvision"] = 64
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        require_positive(self, "num_classes", "in_channels", "width", "groups", "width_per_group")
        if self.depth not in BLOCKS:
            raise ConfigError(
                f"depth = {self.depth} is no ResNet of 4 stages; use one of {', '.join(map(str, BLOCKS))}, or "
                f"architecture 'deep-resnet' for depths up to 1001 and more"
            )
        if self.kind == "basic" and (self.groups, self.width_per_group) != (1, 64):
            raise ConfigError(
                f"groups = {self.groups} and width_per_group = {self.width_per_group} are of bottlenecks, and depth = "
                f"{self.depth} has none; use depth 50 or more"
            )
        if self.inner(self.width) < 1:
            raise ConfigError(
                f"width = {self.width} and width_per_group = {self.width_per_group} leave a bottleneck no channel; "
                f"use a larger width"
            )

    @property
    def kind(self) -> Literal["basic", "bottleneck"]:
        return BLOCKS[self.depth][0]

    @property
    def stages(self) -> tuple[int, int, int, int]:
        """The number of blocks of each stage."""
        return BLOCKS[self.depth][1]

    @property
    def num_layers(self) -> int:
        """The number of blocks."""
        return sum(self.stages)

    def inner(self, channels: int) -> int:
        """Returns the channels inside a bottleneck whose output has 4 × `channels`."""
        return channels * self.width_per_group // 64 * self.groups

    def shrunk(self, num_layers: int = 2) -> ResNetConfig:
        """Returns a tiny config of the same structure, for a quick verification in float64."""
        deep_enough = (
            depth
            for depth, (kind, counts) in BLOCKS.items()
            if kind == self.kind and (sum(counts) >= num_layers or depth == self.depth)
        )
        width, groups = min(self.width, 8), min(self.groups, 4)
        per_group = self.width_per_group
        if self.kind == "bottleneck":
            per_group = max(32 if groups > 1 else per_group, 64 // width)
        return replace(
            self,
            depth=min(deep_enough),
            width=width,
            groups=groups,
            width_per_group=per_group,
            num_classes=min(self.num_classes, 16),
        )


@dataclass(frozen=True)
class DeepResNetConfig(VisionConfigBase):
    """The config of a deep ResNet."""

    architecture: Annotated[Literal["deep-resnet"], "deep ResNet"] = "deep-resnet"
    depth: Annotated[int, "layers of the published network"] = 110
    version: Annotated[Literal[1, 2], "1: norms after convolutions; 2: before"] = 2
    num_classes: Classes = 10
    in_channels: Channels = 3
    width: Width = 16
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        require_positive(self, "depth", "num_classes", "in_channels", "width")
        step = LAYERS_OF[self.version]
        if self.depth < step + 2 or (self.depth - 2) % step:
            near = max(step + 2, (self.depth - 2) // step * step + 2)
            raise ConfigError(
                f"depth = {self.depth} is not {step} n + 2, the depth of version {self.version}; use {near} or "
                f"{near + step}"
            )

    @property
    def blocks_per_stage(self) -> int:
        return (self.depth - 2) // LAYERS_OF[self.version]

    @property
    def num_layers(self) -> int:
        """The number of blocks."""
        return NUM_STAGES * self.blocks_per_stage

    def shrunk(self, num_layers: int = 2) -> DeepResNetConfig:
        """Returns a tiny config of the same structure, for a quick verification in float64."""
        blocks = min(self.blocks_per_stage, -(-num_layers // NUM_STAGES))
        return replace(
            self,
            depth=LAYERS_OF[self.version] * blocks + 2,
            width=min(self.width, 4),
            num_classes=min(self.num_classes, 16),
        )


@dataclass(frozen=True)
class AmoebaNetDConfig(VisionConfigBase):
    """The config of an AmoebaNet-D."""

    architecture: Annotated[Literal["amoebanet-d"], "AmoebaNet-D"] = "amoebanet-d"
    layers: Annotated[int, "normal cells, a multiple of 3"] = 18
    filters: Annotated[
        int, "channels of the first cells, a multiple of 4; later ones have up to four times as many"
    ] = 256
    num_classes: Classes = 1000
    in_channels: Channels = 3
    norm: Norm = "batch"

    # The size is halved five times, by operations whose results must have equal sizes.
    size_multiple: ClassVar[int] = 32

    def __post_init__(self) -> None:
        require_positive(self, "layers", "filters", "num_classes", "in_channels")
        if self.layers % NUM_GROUPS:
            raise ConfigError(
                f"layers = {self.layers} does not divide into {NUM_GROUPS} equal groups of cells; use a multiple of 3"
            )
        if self.filters % 4:
            raise ConfigError(f"filters = {self.filters}; the stem has a quarter of it, so use a multiple of 4")

    @property
    def num_layers(self) -> int:
        """The number of cells, including two of the stem and two between the groups."""
        return self.layers + 4

    def shrunk(self, num_layers: int = 2) -> AmoebaNetDConfig:
        """Returns a tiny config of the same structure, for a quick verification in float64."""
        layers = NUM_GROUPS * max(1, -(-(num_layers - 4) // NUM_GROUPS))
        return replace(
            self,
            layers=min(self.layers, layers),
            filters=min(self.filters, 16),
            num_classes=min(self.num_classes, 16),
        )


@dataclass(frozen=True)
class UNetConfig(VisionConfigBase):
    """The config of a U-Net."""

    architecture: Annotated[Literal["unet"], "U-Net"] = "unet"
    depth: Annotated[int, "how often the size is halved"] = 4
    width: Width = 64
    num_classes: Classes = 2
    in_channels: Channels = 3
    up: Annotated[
        Literal["transposed", "bilinear"],
        "how the image is upsampled: by a transposed convolution, or bilinearly before a 1 × 1 convolution",
    ] = "transposed"
    norm: Norm = "batch"

    is_dense: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive(self, "depth", "width", "num_classes", "in_channels")

    @property
    def size_multiple(self) -> int:  # type: ignore[override]
        """Height and width must be multiples of this."""
        return int(2**self.depth)

    @property
    def num_layers(self) -> int:
        """The number of pairs of convolutions."""
        return 2 * self.depth + 1

    def shrunk(self, num_layers: int = 2) -> UNetConfig:
        """Returns a tiny config of the same structure, for a quick verification in float64."""
        depth = max(2, -(-(num_layers - 1) // 2))
        return replace(self, depth=min(self.depth, depth), width=min(self.width, 4))


VisionConfig = ResNetConfig | DeepResNetConfig | AmoebaNetDConfig | UNetConfig

# The config class of each value of `model.architecture` in a run file.
VISION_CONFIGS: dict[str, type[VisionConfig]] = {config().architecture: config for config in get_args(VisionConfig)}
