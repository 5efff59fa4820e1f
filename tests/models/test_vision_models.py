"""Models of images: sizes, names and results as published.

Names, shapes and results of ResNets were taken once from torchvision 0.28.0 (its functions `resnet18` ... with the
values of `portable` loaded by name), and are held here as numbers, so that it is not needed.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.inspection.blocks import find_blocks
from weft.models import build, config_from_table, initial_value, initialise
from weft.models.catalog import load_model
from weft.models.vision import AmoebaNetDConfig, DeepResNetConfig, ResNetConfig, UNetConfig, VisionConfig
from weft.models.vision.norm import make_norm
from weft.schema import to_table

TINY: dict[str, VisionConfig] = {
    "resnet10": ResNetConfig(depth=10, width=4, num_classes=5),
    "resnet14": ResNetConfig(depth=14, width=4, num_classes=5),
    "resnext": ResNetConfig(depth=14, width=4, groups=2, width_per_group=32, num_classes=5),
    "v1": DeepResNetConfig(depth=14, version=1, width=4, num_classes=5),
    "v2": DeepResNetConfig(depth=20, version=2, width=4, num_classes=5),
    "amoebanet": AmoebaNetDConfig(layers=3, filters=16, num_classes=5),
    "unet": UNetConfig(depth=2, width=4, num_classes=5),
    "unet bilinear": UNetConfig(depth=2, width=4, num_classes=5, up="bilinear"),
}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def on_meta(config: VisionConfig) -> nn.Module:
    with torch.device("meta"):
        return build(config)


@cache
def size_and_kinds(config: VisionConfig) -> tuple[int, set[str]]:
    """The number of parameters of a model, and the kinds of its modules."""
    model = on_meta(config)
    return count(model), {type(module).__name__ for module in model.modules()}


# --- as published


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
        ("resnext50", 25_028_904),
        ("unet", 31_037_698),  # of the most used implementation with these choices (milesial's)
    ],
)
def test_parameters_of_published_models(name: str, parameters: int) -> None:
    config = load_model(name)
    assert isinstance(config, VisionConfig)
    assert count(on_meta(config)) == parameters


@pytest.mark.parametrize(
    ("depth", "version", "all_values"),
    # Keras prints "Total params", of which running statistics are a part, and biases that norms make superfluous.
    [(20, 1, 274_442), (20, 2, 574_090), (29, 2, 849_002), (56, 2, 1_673_738)],
)
def test_parameters_of_deep_resnets_are_those_of_keras(depth: int, version: int, all_values: int) -> None:
    model = on_meta(DeepResNetConfig(depth=depth, version=version))  # type: ignore[arg-type]
    statistics = sum(buffer.numel() for buffer in model.buffers() if buffer.dim())
    biases = sum(module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d))
    assert count(model) + statistics + biases == all_values


@pytest.mark.full
def test_a_resnet_of_a_thousand_layers_has_thirty_million_parameters_as_in_hypar_flow() -> None:
    model = on_meta(DeepResNetConfig(depth=1001))
    assert count(model) == pytest.approx(30e6, rel=0.02)
    assert len(find_blocks(model)) == 333


@pytest.mark.parametrize(
    ("layers", "filters", "torchgpipe_millions", "gpipe_millions"),
    [(18, 208, 81.5, 82), (36, 544, 1060, 1050), (18, 416, 319.0, 318), (18, 544, 542.7, 542), (72, 512, 1840, 1800)],
)
@pytest.mark.full(3)
def test_parameters_of_amoebanets_are_those_of_gpipe_and_torchgpipe(
    layers: int, filters: int, torchgpipe_millions: float, gpipe_millions: float
) -> None:
    millions = size_and_kinds(AmoebaNetDConfig(layers=layers, filters=filters))[0] / 1e6
    assert millions == pytest.approx(torchgpipe_millions, rel=5e-3)
    assert millions == pytest.approx(gpipe_millions, rel=3e-2)


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("resnet18", "84fb10d9c6905a1c"),
        ("resnet34", "28f9096d51307499"),
        ("resnet50", "d7e4f8bb0a536344"),
        ("resnet101", "02c0f34f4842751f"),
        ("resnet152", "685c66205bc823aa"),
        ("resnext50", "e3bad165c034e60f"),
    ],
)
def test_names_and_shapes_are_those_of_torchvision(name: str, digest: str) -> None:
    config = load_model(name)
    assert isinstance(config, VisionConfig)
    lines = [f"{key} {tuple(value.shape)}" for key, value in on_meta(config).state_dict().items()]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == digest


def portable(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Uniform values of float64, which are the same on every CPU: normal ones take its own logarithm and cosine."""
    draw, found = torch.Generator().manual_seed(1), dict[str, Tensor]()
    for key, tensor in state.items():
        values = torch.rand(tensor.shape, generator=draw, dtype=torch.float64)
        if tensor.dim() > 1:
            found[key] = (values - 0.5) * math.sqrt(24 / tensor[0].numel())
        else:
            found[key] = values + 0.5 if key.endswith((".weight", "running_var")) else (values - 0.5) / 5
    return found


@pytest.mark.parametrize(
    ("name", "evaluated", "trained", "variances"),
    [
        ("resnet18", (30.410821303449, -1.2160795382141), (-65.785561814309, -0.75124281751444), 487.892774666),
        ("resnet50", (-1765.6992466637, 64.562905886597), (59.821075326794, 0.67665686068393), 499.383907708),
        ("resnext50", (35626.412341472, -96.590985245686), (60.611787313932, 1.6922807329508), 980.039687881),
    ],
)
@pytest.mark.sampled(2)
@pytest.mark.full(2)
def test_results_are_those_of_torchvision(
    name: str, evaluated: tuple[float, float], trained: tuple[float, float], variances: float
) -> None:
    config = load_model(name)
    assert isinstance(config, ResNetConfig)
    model = on_meta(config)
    model.load_state_dict(portable(model.state_dict()), assign=True)
    images = portable({"images": torch.empty(2, 3, 65, 97)})["images"]
    for is_training, (total, one) in ((False, evaluated), (True, trained)):
        model.train(is_training)
        with torch.no_grad():
            logits = model(images)
        assert logits.sum().item() == pytest.approx(total, rel=1e-9)
        assert logits[1, 7].item() == pytest.approx(one, rel=1e-9)
    assert model.state_dict()["layer4.0.bn2.running_var"].sum().item() == pytest.approx(variances, rel=1e-9)


# --- what they compute


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.full(3)
def test_shapes_and_gradients(name: str, norm: str) -> None:
    config = replace(TINY[name], norm=norm, in_channels=2)
    model = build(config)
    initialise(model, 0)
    images = torch.randn(2, 2, 64, 32, generator=torch.Generator().manual_seed(0))
    logits = model(images)
    assert logits.shape == ((2, 5, 64, 32) if config.is_dense else (2, 5))
    logits.square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert bool(parameter.grad.isfinite().all()), key
        assert float(parameter.grad.abs().max()) > 0 or ".bias" in key, key  # one before a norm moves nothing


@pytest.mark.parametrize("name", TINY)
def test_a_model_of_group_norms_does_not_mix_the_images_of_a_batch(name: str) -> None:
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for norm, is_mixed in (("group", False), ("batch", True)):
        model = build(replace(TINY[name], norm=norm))
        initialise(model, 0)
        model.double()
        together, alone = model(images)[:2], model(images[:2])
        assert torch.allclose(together, alone) != is_mixed


def test_groups_of_channels_divide() -> None:
    for channels, groups in ((64, 4), (16, 1), (8, 1), (24, 3), (6, 3), (7, 7)):
        norm = make_norm("group", channels)
        assert isinstance(norm, nn.GroupNorm)
        assert norm.num_groups == groups


def test_the_odd_pixels_of_a_factorized_reduction() -> None:
    """Even pixels in one half of the channels, in the other those below and to the right; zeros beyond the edge."""
    from weft.models.vision.amoebanet import FactorizedReduce

    reduce = FactorizedReduce("batch", 1, 2)
    for convolution in (reduce.even, reduce.odd):
        nn.init.ones_(convolution.weight)
    seen: list[Tensor] = []
    reduce.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    image = torch.arange(1.0, 26.0).view(1, 1, 5, 5)
    reduce(image)
    assert torch.equal(seen[0][0, 0], image[0, 0, ::2, ::2])
    assert torch.equal(seen[0][0, 1], torch.tensor([[7.0, 9.0, 0.0], [17.0, 19.0, 0.0], [0.0, 0.0, 0.0]]))


def test_a_pixel_of_a_unet_sees_only_what_lies_around_it() -> None:
    """The size stays, and so does the place: a class is given to each pixel and not to a shifted one."""
    model = build(TINY["unet"]).eval()
    initialise(model, 0)
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    head = model(image)[0, 0, 40, 8]
    (gradient,) = torch.autograd.grad(head, image)
    rows, columns = gradient[0].abs().sum(0).nonzero().unbind(1)
    assert (int(rows.min()), int(rows.max())) == (40 - 22, 40 + 21)  # 40 is the first pixel of its square of 4
    assert (int(columns.min()), int(columns.max())) == (0, 8 + 21)


# --- building


@pytest.mark.parametrize("name", TINY)
def test_on_meta_the_running_statistics_are_real_and_start_at_none(name: str) -> None:
    model = on_meta(TINY[name])
    assert all(parameter.is_meta for parameter in model.parameters())
    real = dict(build(TINY[name]).named_buffers())
    assert real
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, real[key]), key


def test_first_values_are_those_of_he() -> None:
    config = ResNetConfig(depth=50, num_classes=1000)
    kernel = initial_value(config, "layer2.0.conv2.weight", torch.Size((128, 128, 3, 3)), 0)
    assert float(kernel.std()) == pytest.approx((2 / (128 * 9)) ** 0.5, rel=0.01)
    classifier = initial_value(config, "fc.weight", torch.Size((1000, 2048)), 0)
    assert float(classifier.std()) == pytest.approx(2048**-0.5, rel=0.01)
    assert float(initial_value(config, "bn1.weight", torch.Size((64,)), 0).min()) == 1
    assert float(initial_value(config, "fc.bias", torch.Size((1000,)), 0).abs().max()) == 0


@pytest.mark.parametrize("name", TINY)
def test_a_config_goes_through_its_table(name: str) -> None:
    assert config_from_table(to_table(TINY[name])) == TINY[name]


@settings(max_examples=settings.default.max_examples // 3)
@given(
    config=st.one_of(
        st.builds(
            ResNetConfig,
            depth=st.sampled_from([18, 34]),
            width=st.integers(1, 70),
            norm=st.sampled_from(["batch", "group"]),
        ),
        st.builds(
            ResNetConfig,
            depth=st.sampled_from([50, 101, 152]),
            width=st.sampled_from([16, 64, 80]),
            groups=st.sampled_from([1, 2, 32]),
            width_per_group=st.sampled_from([4, 8, 64, 128]),
        ),
        st.builds(DeepResNetConfig, depth=st.sampled_from([20, 56, 110]), width=st.integers(1, 20)),
        st.builds(AmoebaNetDConfig, layers=st.sampled_from([3, 18]), filters=st.sampled_from([16, 208, 512])),
        st.builds(UNetConfig, depth=st.integers(1, 5), width=st.integers(1, 64)),
    ),
    num_layers=st.integers(2, 12),
)
def test_a_shrunk_config_is_small_and_keeps_its_structure(config: VisionConfig, num_layers: int) -> None:
    small = config.shrunk(num_layers)
    assert small.norm == config.norm
    assert small.num_layers >= min(num_layers, config.num_layers)
    numel, kinds = size_and_kinds(small)
    assert numel <= 2_000_000
    assert numel <= size_and_kinds(config)[0]
    assert kinds == size_and_kinds(config)[1]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"architecture": "resnet", "depth": 51}, "depth = 51 is no ResNet of 4 stages; use one of 10, 14, 18, 26"),
        ({"architecture": "resnet", "depth": 18, "groups": 32}, "groups = 32 and width_per_group = 64 are of bottlen"),
        ({"architecture": "resnet", "width": 4, "width_per_group": 4}, "leave a bottleneck no channel; use a larger"),
        ({"architecture": "resnet", "num_classes": 0}, "num_classes = 0 must be positive"),
        ({"architecture": "resnet", "norm": "layer"}, "'model.norm' = 'layer'"),
        ({"architecture": "resnet", "vocab_size": 4}, "unknown key 'model.vocab_size'"),
        ({"architecture": "deep-resnet", "depth": 1000}, r"depth = 1000 is not 9 n \+ 2, .* use 992 or 1001"),
        ({"architecture": "deep-resnet", "version": 1, "depth": 5}, r"depth = 5 is not 6 n \+ 2, .* use 8 or 14"),
        ({"architecture": "amoebanet-d", "layers": 4}, "layers = 4 does not divide into 3 equal groups"),
        ({"architecture": "amoebanet-d", "filters": 30}, "filters = 30; the stem has a quarter of it"),
        ({"architecture": "unet", "depth": 0}, "depth = 0 must be positive"),
        ({"architecture": "resnets"}, "did you mean 'resnet'"),
    ],
)
def test_bad_configs_are_refused(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_table(table)
