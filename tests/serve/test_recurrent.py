"""Recurrent models: fused steps equal torch's LSTM and GRU, and the engine serves them in any chunks and batch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from commands_for_tests import caller
from safetensors.torch import load_file
from serving_for_tests import GREEDY, likeliest, make_engine, serve_all, tiny_recurrent, tokens_of

import weft.serve.model.recurrent as recurrent
from weft.architectures import RecurrentConfig
from weft.errors import ConfigError, WeftError
from weft.models import build, read_config, read_weights, save_folder
from weft.models.recurrent import RecurrentLayer, RecurrentModel
from weft.serve.attention.choice import LokiChoice
from weft.serve.attention.formats import CacheFormat
from weft.serve.attention.four_bits import FourBitStorage
from weft.serve.calibration.loki_calibration import calibrate
from weft.serve.head.graph_head import GraphHead, build_graph, output_identity, output_matrix
from weft.serve.model.recurrent import FusedGRU, FusedLSTM, RecurrentRows
from weft.serve.model.step_inputs import text_inputs
from weft.serve.scheduling.request import Request, Sampling

KINDS = ("lstm", "gru")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_table", [True, False])
@torch.inference_mode()
def test_fused_steps_are_torchs_own_in_float64(kind: str, has_table: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_table:  # and no prompt by torch's own layers
        monkeypatch.setattr(recurrent, "TORCH_TOKENS", {"lstm": 99, "gru": 99})
    if not has_table:
        monkeypatch.setattr(recurrent, "TABLE_BYTES", 0)
    for length in (1, 2, 7, 33):
        model = tiny_recurrent(kind).double()
        text = torch.randint(61, (1, length), generator=torch.Generator().manual_seed(length))
        expected = model(text)[0]
        rows = RecurrentRows(tiny_recurrent(kind).double())
        assert (rows._table is not None) == has_table
        cache = rows.new_cache(1, 16, 1)
        layout = make_engine(tiny_recurrent(kind))._part.layout
        at_once = rows.residual(text_inputs(text[0].tolist(), 16).batch(layout), cache)
        torch.testing.assert_close(rows.logits(at_once), expected, rtol=1e-12, atol=1e-12)
        states = rows.new_cache(1, 16, 3)[0]
        for place in range(length):  # token by token, two requests at once: one of them is another text
            tokens = torch.stack([text[0, place], (text[0, place] + 1) % 61])
            is_first = torch.tensor([place == 0, place == 0])
            hidden = rows._decode(tokens, torch.tensor([2, 0]), is_first, states)
            torch.testing.assert_close(rows.logits(hidden)[0], expected[place], rtol=1e-12, atol=1e-12)
    assert float((expected[-1] - expected[0]).abs().max()) > 1e-3  # the state matters


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_by_token_is_torchs_own_in_float64(kind: str) -> None:
    """With the gradients of all that it reads."""
    layer = tiny_recurrent(kind).double().layers[0]
    assert isinstance(layer, RecurrentLayer)
    rows, *state = (
        torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((3, 7, 12), *[(1, 3, 12)] * 2)
    )
    state = state if kind == "lstm" else state[:1]
    read, found = [rows, *state, *layer.parameters()], []
    for run in (layer.run, layer.run_by_token):
        hidden, after = run(rows, tuple(state))
        results = [hidden, *after]
        found.append([*results, *torch.autograd.grad(sum(one.sin().sum() for one in results), read)])  # type: ignore[arg-type]
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_layers_are_not_called_with_bf16_on_a_cpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would initialise CUDA, after which no rank can be forked."""
    model, text = tiny_recurrent(kind), torch.arange(6)[None]
    expected = model(text).detach()
    monkeypatch.setattr(torch, kind, lambda *given: pytest.fail("it was called"))
    assert 0 < float((model.bfloat16()(text).detach().float() - expected).abs().max()) < 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_gives_the_models_tokens_in_any_chunks_and_memory(kind: str) -> None:
    model = tiny_recurrent(kind)
    requests = [Request(str(n), tuple((3 * n + i) % 61 for i in range(n)), 9, GREEDY) for n in (1, 2, 5, 16, 31)]
    expected = {one.name: likeliest(model, one.tokens, one.max_tokens) for one in requests}
    assert len({tuple(one) for one in expected.values()}) > 3
    for options in ({"token_budget": 3, "num_blocks": 12, "max_running": 3}, {"token_budget": 64}, {"max_running": 1}):
        engine = make_engine(tiny_recurrent(kind), **options)
        assert tokens_of(serve_all(engine, requests, every=1)) == expected
        assert tokens_of(serve_all(engine, requests)) == expected  # rows that others have used
        assert engine.state().num_prefix_tokens == 0
    seeded = [replace(one, sampling=Sampling(0.9, seed=3, num_logprobs=1)) for one in requests]
    one, other = (make_engine(tiny_recurrent(kind), max_running=number) for number in (1, 5))
    assert tokens_of(serve_all(one, seeded)) == tokens_of(serve_all(other, seeded))


def test_weights_are_held_once() -> None:
    rows = RecurrentRows(tiny_recurrent("lstm"))
    first, layer = rows.layers
    assert isinstance(first, FusedLSTM)
    assert isinstance(layer, FusedLSTM)
    own = rows.model.get_parameter("layers.1.weight_hh")
    assert layer._weight is not None
    assert own.untyped_storage().data_ptr() == layer._weight.untyped_storage().data_ptr()
    assert first._weight is None  # the rows of the state's weights lie end to end beside a table
    assert first._of_state.data_ptr() == rows.model.get_parameter("layers.0.weight_hh").data_ptr()
    assert first._of_state.is_contiguous()
    gru = RecurrentRows(tiny_recurrent("gru"))
    assert isinstance(gru.layers[1], FusedGRU)
    assert gru.layers[1]._state.data_ptr() == gru.model.get_parameter("layers.1.weight_hh").data_ptr()


@torch.inference_mode()
def test_a_layer_beside_a_table_takes_inputs_too() -> None:
    model = tiny_recurrent("lstm").double()
    state, row = (torch.randn(1, 12).double(), torch.randn(1, 12).double()), torch.randn(1, 12).double()
    layer = cast(RecurrentLayer, model.layers[0])
    apart = FusedLSTM(layer, has_table=True).step(row, state)
    torch.testing.assert_close(apart, FusedLSTM(layer).step(row, state), rtol=1e-12, atol=1e-12)


def test_a_graph_of_the_head_goes_with_it() -> None:
    model = tiny_recurrent("gru")
    head = GraphHead(build_graph(*output_matrix(model, 61), degree=6), output_identity(model, 61), 4, 61, 1.0)
    requests = [Request("x", (1, 2, 3), 9, GREEDY)]
    found = tokens_of(serve_all(make_engine(tiny_recurrent("gru"), head=head), requests))
    assert found == {"x": likeliest(model, (1, 2, 3), 9)}


def test_folders_are_written_and_read_and_others_refused(tmp_path: Path) -> None:
    for tied in (False, True):
        folder = tmp_path / str(tied)
        model = tiny_recurrent("lstm", tie_word_embeddings=tied)
        save_folder(folder, model)
        read = build(read_config(folder))
        assert isinstance(read, RecurrentModel)
        read_weights(folder, read)
        text = torch.arange(9)[None]
        assert torch.equal(read(text), model(text))
        assert (read.lm_head.weight is read.embed_tokens.weight) == tied
        torchs = torch.nn.LSTM(12, 12, 2, batch_first=True)
        stored = load_file(folder / "model.safetensors")
        torchs.load_state_dict({name.removeprefix("rnn."): one for name, one in stored.items() if "rnn." in name})
        hidden = torchs(model.embed_tokens(text))[0]
        torch.testing.assert_close(model.lm_head(hidden), model(text), rtol=1e-5, atol=1e-5)
    save_folder(tmp_path / "gru", tiny_recurrent("gru"))
    (tmp_path / "gru" / "config.json").write_text((tmp_path / "False" / "config.json").read_text())
    with pytest.raises(WeftError, match="but the config needs"):
        read_weights(tmp_path / "gru", tiny_recurrent("lstm"))
    weights = tmp_path / "True" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(WeftError, match="is not a whole safetensors file"):
        read_weights(tmp_path / "True", tiny_recurrent("lstm", tie_word_embeddings=True))
    about = json.loads((tmp_path / "True" / "config.json").read_text())
    (tmp_path / "True" / "config.json").write_text(json.dumps({**about, "hidden": 3}))
    with pytest.raises(ConfigError, match="unknown key 'hidden'"):
        read_config(tmp_path / "True")
    with pytest.raises(ConfigError, match="'rnn' is not recurrent; use lstm or gru"):
        RecurrentConfig("rnn")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculate": "ngram"}, "and no keys and values; leave out --speculate"),
        ({"cache": CacheFormat(FourBitStorage()), "block_size": 64}, "leave out --cache"),
        ({"swap_blocks": 2}, "leave out --swap-blocks"),
        ({"stream_weights": 1}, "leave out --stream-weights"),
    ],
)
def test_what_needs_keys_and_values_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_engine(tiny_recurrent("lstm"), **options)


def test_there_is_nothing_to_calibrate() -> None:
    with pytest.raises(ConfigError, match="a recurrent model keeps no keys, so there is nothing to calibrate"):
        calibrate(tiny_recurrent("lstm"), [], LokiChoice(0.25, 0.25, 64, 1024))


def test_weft_generate_continues_with_a_recurrent_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tiny_recurrent("gru", vocab_size=257)
    save_folder(tmp_path / "model", model)
    weft = caller(monkeypatch, capfd)
    asked = ("generate", tmp_path / "model", "--device", "cpu", "--prompt", "ab", "--tokens", 6, "--temperature", 0)
    done = weft(*asked, "--tokenizer", "bytes", "--json")
    assert done.status == 0, done.err
    number = len(done.json["text"].encode(errors="replace"))
    assert number > 0
    for options, words in ((("--weights", "int4"), "leave out --weights"), ((), "no tokenizer.json")):
        given = (*options, "--tokenizer", "bytes") if options else ()
        refused = weft(*asked, *given)
        assert refused.status == 2
        assert words in refused.err
