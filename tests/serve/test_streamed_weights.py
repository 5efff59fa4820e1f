"""Weights in host memory: the same tokens with room for some blocks on the device, blocks that stay there, weights that
are read straight to their places, and what goes wrong without copies.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from serving_for_tests import CONFIGS, GREEDY, make_engine, serve_all, tiny_model, tokens_of

from weft.errors import ConfigError, PlanError
from weft.models import save_folder
from weft.serve.attention.choice import LokiChoice
from weft.serve.attention.formats import CacheFormat, Loki, model_identity
from weft.serve.loading import load_model
from weft.serve.model.paged_model import PagedModel, layers_of
from weft.serve.model.streamed_model import StreamedModel, copied_bytes, stream_model
from weft.serve.parallel.rank_part import PartValues, build_whole
from weft.serve.scheduling.request import Request
from weft.serve.spec import EngineSizes, ServingSpec
from weft.serve.weights.packed_linear import end_to_end, make_room, pack_model
from weft.serve.weights.streamed_weights import StreamedWeights, streamed_numbers
from weft.serve.weights.weight_formats import FORMATS

CPU = torch.device("cpu")
REQUESTS = [Request(str(i), (7 * i + 1, 5, 3, i), 6, GREEDY) for i in range(3)]


def test_resident_blocks_are_spread_evenly() -> None:
    for num_blocks in range(1, 24):
        for num_resident in range(num_blocks):
            streamed = streamed_numbers(num_blocks, num_resident)
            assert len(streamed) == num_blocks - num_resident
            assert streamed[0] == 0
            gaps = {after - before for before, after in zip(streamed, (*streamed[1:], num_blocks), strict=True)}
            assert max(gaps) - min(gaps) <= 1, (num_blocks, num_resident)
    assert streamed_numbers(6, 4) == (0, 3)
    assert streamed_numbers(6, 2) == (0, 1, 3, 4)


SAME_BITS = [
    *((name, kind, ahead, 0) for name, kind in (("llama", None), ("llama", "int4"), ("qwen2", "fp8"), ("gpt2", None),
                                                ("mixtral", None), ("mixtral", "int4")) for ahead in (1, 9)),
    *(("llama-deep", None, 1, 1), ("gpt2-deep", None, 1, 2), ("qwen2-deep", None, 2, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "ahead", "num_resident"), SAME_BITS)
@pytest.mark.full(3)
def test_streamed_weights_give_the_same_bits(name: str, kind: str | None, ahead: int, num_resident: int) -> None:
    models = [tiny_model(name).double() for _ in range(2)]
    for model in models:
        if kind is not None:
            pack_model(model, FORMATS[kind])
    plain = make_engine(models[0])
    streamed = make_engine(models[1], stream_weights=ahead, resident_blocks=num_resident)
    assert streamed._part.streamed is not None
    assert len(streamed._part.streamed.resident) == num_resident
    assert tokens_of(serve_all(streamed, REQUESTS, every=1)) == tokens_of(serve_all(plain, REQUESTS, every=1))
    assert torch.equal(*(engine.embed([1, 2, 3, 4], "mean") for engine in (plain, streamed)))


def test_only_streamed_blocks_are_copied() -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(16, 8 + index) for index in range(7))
    values = [layer.weight.clone() for layer in layers]
    streamed = StreamedWeights([(layer,) for layer in layers], CPU, 1, num_resident=3)
    assert streamed.numbers == (0, 1, 3, 5)
    assert streamed.block_bytes[0] == 4 * 16 * 8 + 256  # a weight, and a bias in memory of its own
    assert [len(one) for one in streamed.home] == [streamed.block_bytes[number] for number in (0, 1, 3, 5)]
    assert [len(one) for one in streamed.resident] == [streamed.block_bytes[number] for number in (2, 4, 6)]
    assert streamed.places.shape == (2, max(streamed.block_bytes[number] for number in (0, 1, 3, 5)))
    memory = [one.untyped_storage().data_ptr() for one in streamed.resident]
    assert [layers[number].weight.untyped_storage().data_ptr() for number in (2, 4, 6)] == memory
    for numbers in (range(7), range(7), (5, 6, 0, 3, 2, 2, 4)):  # two steps, and any order
        for number in numbers:
            streamed.need(number)
            assert torch.equal(layers[number].weight, values[number])
            streamed.done(number)
        assert streamed._index == [0, 1] or numbers != range(7)  # copied ahead for the next step
    for home in streamed.home:
        home.zero_()
    streamed.pass_by()
    assert [bool(layer.weight.any()) for layer in layers] == [False, *[False, True] * 3]  # the control


def test_each_pass_copies_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    fetch = StreamedWeights._fetch

    def counting(self: StreamedWeights, index: int) -> None:
        is_there = self._index[index % self.num_places] == index
        fetch(self, index)
        copied.extend([] if is_there else [self.block_bytes[self.numbers[index]]])

    monkeypatch.setattr(StreamedWeights, "_fetch", counting)
    for number in range(1, 9):
        layers = [torch.nn.Linear(64, 8 + index) for index in range(number)]
        for ahead in range(1, 5):
            streamed = StreamedWeights([(layer,) for layer in layers], torch.device("cpu"), ahead)
            assert copied == list(streamed.block_bytes[: streamed.num_places])
            copied.clear()
            for _ in range(2):
                streamed.pass_by()
                assert sorted(copied) == sorted(copied_bytes(streamed.block_bytes, ahead)), (number, ahead)
                copied.clear()


def test_a_copy_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of(serve_all(make_engine(tiny_model("llama").double()), REQUESTS))
    engine = make_engine(tiny_model("llama").double(), stream_weights=1)
    assert engine._part.streamed is not None
    assert engine._part.streamed.num_places == 2
    monkeypatch.setattr(StreamedWeights, "need", lambda self, index: None)
    monkeypatch.setattr(StreamedWeights, "done", lambda self, index: None)
    engine._part.streamed.places[1].copy_(engine._part.streamed.places[0])
    assert tokens_of(serve_all(engine, REQUESTS)) != expected


def lazily(name: str, kind: str | None, sizes: EngineSizes, seen: list[str]) -> StreamedModel:
    """A tiny model that is read into its places. `seen` gets the names of weights as they are read."""
    values = dict(tiny_model(name).double().named_parameters())
    model, cuts = build_whole(CONFIGS[name])
    model.double()
    if kind is not None:
        make_room(model, FORMATS[kind])
    layers = layers_of(model)

    def read(one: str) -> torch.Tensor:
        seen.append(one)
        assert not model.lm_head.weight.is_meta  # the first to have memory
        begun = [index for index, layer in enumerate(layers) if not next(layer.parameters()).is_meta]
        assert begun == list(range(len(begun))), "blocks get memory one after the other"
        if f".{len(begun) - 1}." in one:
            assert all(tensor.is_meta for layer in layers[len(begun) :] for tensor in layer.parameters())
        return values[one].detach()

    return stream_model(model, CPU, sizes, values=PartValues(model, cuts, read, CPU))


@pytest.mark.parametrize(("name", "kind"), [("llama-deep", "int4"), ("qwen2-deep", None), ("gpt2-deep", None)])
def test_weights_are_read_to_their_places_block_after_block(name: str, kind: str | None) -> None:
    seen: list[str] = []
    streamed = lazily(name, kind, EngineSizes(stream_weights=1, resident_blocks=1), seen)
    assert len(seen) == len(set(seen)) == len(list(tiny_model(name).named_parameters()))
    assert not any(tensor.is_meta for tensor in streamed.parameters())
    assert len([one for one in streamed.weights.home if one.is_pinned()]) == 0  # pinned for GPUs only
    engine = make_engine(streamed)
    assert engine._part.streamed is streamed.weights
    model = tiny_model(name).double()
    if kind is not None:
        empty, cuts = build_whole(CONFIGS[name])
        make_room(empty.double(), FORMATS[kind])
        values = dict(model.named_parameters())
        PartValues(empty.to_empty(device=CPU), cuts, lambda one: values[one].detach(), CPU).give(empty.modules())
        model = empty
    plain = make_engine(model)
    assert tokens_of(serve_all(engine, REQUESTS)) == tokens_of(serve_all(plain, REQUESTS))
    if CONFIGS[name].tie_word_embeddings:
        assert streamed.model.lm_head.weight is streamed.model.get_parameter(CONFIGS[name].embedding_name)


def test_joined_linears_are_found_again_without_a_copy() -> None:
    model = tiny_model("llama").double()
    first, second = PagedModel(model, 4), PagedModel(model, 4)
    for one, other in zip(first.blocks, second.blocks, strict=True):
        assert [a.layer.weight.data_ptr() for a in one.linears] == [b.layer.weight.data_ptr() for b in other.linears]
        assert all(torch.equal(a.layer.bias, b.layer.bias) for a, b in zip(one.linears, other.linears, strict=True))
    rows = torch.arange(12.0).view(6, 2)
    for parts in ((rows[:2], rows[3:]), (rows[2:4], rows[:2]), (rows[:2].clone(), rows[2:]), (rows.t(), rows.t())):
        assert torch.equal(end_to_end(parts), torch.cat(parts))
    mixed = rows[:3, :1], rows.view(-1)[3:5, None]  # the second begins where the first would end without its gaps
    assert torch.equal(end_to_end(mixed), torch.cat(mixed))
    assert end_to_end((rows[1:2], rows[2:])).data_ptr() == rows[1].data_ptr()


def test_a_folder_is_read_to_its_places(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_folder(folder, tiny_model("llama-deep"))  # type: ignore[arg-type]
    found = [
        load_model(folder, ServingSpec(tokenizer="bytes", stream_weights=ahead, resident_blocks=resident)).model
        for ahead, resident in ((0, 0), (1, 0), (2, 2))
    ]
    assert [isinstance(one, StreamedModel) for one in found] == [False, True, True]
    plain, *others = (tokens_of(serve_all(make_engine(one), REQUESTS)) for one in found)
    assert others == [plain, plain]


def test_files_for_a_model_are_checked_with_its_own_values() -> None:
    axes = torch.linalg.qr(torch.randn(4, 2, 4, 4))[0].double()
    own, other = (model_identity(tiny_model("llama-deep", seed).double()) for seed in (0, 1))
    for identity in (own, other):
        cache = CacheFormat(loki=Loki(axes, LokiChoice(newest=1, dense_below=1), identity))
        streamed = lazily("llama-deep", None, EngineSizes(stream_weights=1, resident_blocks=1), [])
        if identity == own:
            plain = make_engine(tiny_model("llama-deep").double(), cache=cache)
            engine = make_engine(streamed, cache=cache)
            first = next(layers_of(streamed.model)[0].parameters())
            assert first.untyped_storage().data_ptr() == streamed.weights.places.data_ptr()
            assert tokens_of(serve_all(engine, REQUESTS)) == tokens_of(serve_all(plain, REQUESTS))
            continue
        with pytest.raises(ConfigError, match="is of another model"):
            make_engine(streamed, cache=cache)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="stream_weights = -1 is less than 0; give 0 or more"):
        make_engine(tiny_model("llama"), stream_weights=-1)
    with pytest.raises(ConfigError, match="give --stream-weights too"):
        make_engine(tiny_model("llama"), resident_blocks=1)
    for number in (2, 3):
        with pytest.raises(PlanError, match=f"--resident-blocks {number} of a rank's 2 blocks .* give 0 to 1"):
            make_engine(tiny_model("llama"), stream_weights=1, resident_blocks=number)
    engine = make_engine(tiny_model("llama"), stream_weights=1)
    with pytest.raises(ConfigError, match="cannot be replaced while they are served"):
        engine.replace_weights(tiny_model("llama", seed=1))
    monkeypatch.setattr("weft.serve.weights.streamed_weights.available_host_bytes", lambda: 2 << 30)
    with pytest.raises(ConfigError, match=r"in host memory for each of 1 ranks here, and 2\.0 GiB are free"):
        make_engine(tiny_model("llama"), stream_weights=1)
