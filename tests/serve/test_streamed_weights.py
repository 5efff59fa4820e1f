"""Weights in host memory: the same tokens, room for some blocks on the device, and what goes wrong without copies."""

from __future__ import annotations

import pytest
import torch
from serving_for_tests import GREEDY, make_engine, serve_all, tiny_model, tokens_of

from weft.errors import ConfigError
from weft.serve.model.streamed_traffic import copied_bytes
from weft.serve.scheduling.request import Request
from weft.serve.weights.packed_linear import pack_model
from weft.serve.weights.streamed_weights import StreamedWeights
from weft.serve.weights.weight_formats import FORMATS

REQUESTS = [Request(str(i), (7 * i + 1, 5, 3, i), 6, GREEDY) for i in range(3)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", None), ("llama", "int4"), ("qwen2", "fp8"), ("gpt2", None), ("mixtral", None), ("mixtral", "int4")],
)
@pytest.mark.parametrize("ahead", [1, 9])
@pytest.mark.full(3)
def test_streamed_weights_give_the_same_bits(name: str, kind: str | None, ahead: int) -> None:
    models = [tiny_model(name).double() for _ in range(2)]
    for model in models:
        if kind is not None:
            pack_model(model, FORMATS[kind])
    plain, streamed = make_engine(models[0]), make_engine(models[1], stream_weights=ahead)
    assert tokens_of(serve_all(streamed, REQUESTS, every=1)) == tokens_of(serve_all(plain, REQUESTS, every=1))
    found = [engine.embed([1, 2, 3, 4], "mean") for engine in (plain, streamed)]
    assert torch.equal(*found)


def test_the_device_has_room_for_some_blocks_and_host_memory_for_all() -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(16, 8) for _ in range(5))
    values = [layer.weight.clone() for layer in layers]
    streamed = StreamedWeights([(layer,) for layer in layers], torch.device("cpu"), 1)
    assert streamed.places.shape == (2, 4 * 16 * 8 + 256)  # a weight, and a bias in memory of its own
    for _ in range(2):  # steps
        for index, layer in enumerate(layers):
            streamed.need(index)
            assert torch.equal(layer.weight, values[index])
            streamed.done(index)
    for index in (3, 0, 4, 4, 1):  # in any order
        streamed.need(index)
        assert torch.equal(layers[index].weight, values[index])


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


def test_what_does_not_go_with_it_is_refused() -> None:
    engine = make_engine(tiny_model("llama"), stream_weights=1)
    with pytest.raises(ConfigError, match="cannot be replaced while they are served"):
        engine.replace_weights(tiny_model("llama", seed=1))
    with pytest.raises(ConfigError, match="stream_weights = -1 is less than 0; give 0 or more"):
        make_engine(tiny_model("llama"), stream_weights=-1)
