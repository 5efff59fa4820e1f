"""Loki: all tokens chosen is dense attention, the chosen are those of a search through all, calibrated axes are best,
and files for other models are refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attention_for_tests import chosen_attention
from commands_for_tests import caller
from serving_for_tests import GREEDY, likeliest, make_engine, serve_all, tiny_model, tokens_of
from torch import Tensor

from weft.errors import ConfigError
from weft.models import DecoderConfig, build, initialise, save_folder
from weft.models.attention import rotate
from weft.serve.attention.batch import CacheSizes, PagedBatch, PageShare, slots_of
from weft.serve.attention.choice import LokiChoice, LokiPages, chosen_tokens
from weft.serve.attention.formats import CacheFormat, Loki, cache_format, load_loki, save_loki
from weft.serve.attention.plain import PlainStorage, decode_attention
from weft.serve.calibration.loki_calibration import (
    RecordingFormat,
    best_axes,
    calibrate,
    explained_shares,
    principal_axes,
)
from weft.serve.model.model_part import EngineOptions, ModelPart
from weft.serve.model.step_inputs import text_inputs
from weft.serve.scheduling.request import Request

HEADS, KEY_HEADS, DIM, SIZE = 4, 2, 8, 4
ALL = LokiChoice(dims=0.25, tokens=1.0, newest=1, dense_below=1)
SOME = LokiChoice(dims=0.5, tokens=0.3, newest=2, dense_below=1)


def axes_of(seed: int = 0, dim: int = DIM) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(KEY_HEADS, dim, dim, generator=generator, dtype=torch.float64))[0]


def decodes(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries of three requests, keys and values in 16 blocks, block tables and lengths."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(3, HEADS, DIM, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(2, 16 * SIZE, KEY_HEADS, DIM, generator=generator, dtype=torch.float64)
    tables = torch.randperm(16, generator=generator)[:15].view(3, 5).to(torch.int32)
    return query, keys, values, tables, torch.tensor([20, 1, 11], dtype=torch.int32)


def along(heads: Tensor, axes: Tensor) -> Tensor:
    return torch.einsum("thgd,hde->thge", heads.unflatten(1, (KEY_HEADS, -1)), axes).flatten(1, 2)


@pytest.mark.parametrize("window", [None, 6])
def test_all_tokens_chosen_is_dense_attention(window: int | None) -> None:
    query, keys, values, tables, lengths = decodes()
    expected = decode_attention(query, keys, values, tables, lengths, SIZE, window)
    axes = axes_of()
    given = (along(keys, axes), values, tables, lengths, SIZE, window)
    found = chosen_attention(along(query, axes), *given, ALL)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    few = chosen_attention(along(query, axes), *given, LokiChoice(dims=0.25, tokens=0.25, newest=1, dense_below=99))
    torch.testing.assert_close(few, expected, rtol=0, atol=1e-12)  # dense below a length
    wrong = chosen_attention(query, *given, ALL)  # the control: the query is not turned
    assert float((wrong - expected).abs().max()) > 1e-2
    other = chosen_attention(along(query, axes_of(1)), *given, ALL)  # the control: the axes of another layer
    assert float((other - expected).abs().max()) > 1e-2


def test_the_chosen_tokens_are_those_of_a_search_through_all() -> None:
    query, keys, values, tables, lengths = decodes()
    keys[:, :, 0] = keys[:, :, 0].round()  # equal scores are frequent
    keys[:, :, 1:] = 0
    slots = slots_of(tables, 20, SIZE).long()
    places, counts = chosen_tokens(query, keys[..., :4][slots], lengths, None, SOME, PageShare(0, 1, SIZE))
    for request, length in enumerate(lengths.tolist()):
        for head in range(HEADS):
            pair = query[request, head // 2 * 2 :][:2, :4]  # the queries that share the key head
            both = keys[slots[request, :length], head // 2, :4] @ pair.T
            scores = (both - both.amax(0)).amax(1).tolist()
            forced = {0, *range(max(0, length - 2), length)}
            number = min(length, max(-(-3 * length // 10), 3))
            ranked = sorted(range(length), key=lambda place: (place not in forced, -scores[place], place))
            expected = sorted(ranked[:number])
            assert sorted(places[request, head // 2][counts[request, head // 2]].tolist()) == expected
            found = chosen_attention(query, keys, values, tables, lengths, SIZE, None, SOME)[request, head]
            rows = slots[request][torch.tensor(expected)]
            weights = (keys[rows, head // 2] @ query[request, head] / DIM**0.5).softmax(0)
            torch.testing.assert_close(found, weights @ values[rows, head // 2], rtol=0, atol=1e-12)


def test_how_tokens_are_added_changes_no_page() -> None:
    sizes = CacheSizes(4, SIZE, 1, KEY_HEADS, DIM, torch.float64, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 11, KEY_HEADS, DIM, generator=generator, dtype=torch.float64)
    query = torch.randn(11, HEADS, DIM, generator=generator, dtype=torch.float64)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    pages = []
    for cuts in ([0, 11], [0, 3, 4, 9, 11], list(range(12))):
        layer = LokiPages(axes_of(), SOME, PlainStorage().new_pages(sizes), sizes)
        for begin, end in zip(cuts, cuts[1:], strict=False):  # noqa: RUF007
            places = torch.arange(begin, end)
            slots = table[0].long()[places // SIZE] * SIZE + places % SIZE
            one, rest = (1, ()) if end - begin == 1 else (0, ([end - begin], [end]))
            lengths, rows = torch.tensor([end], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
            batch = PagedBatch(places, places, slots, table, lengths, rows, SIZE, one, *rest)
            own, room, room_values = layer.room(batch)
            room[own], room_values[own] = keys[begin:end], values[begin:end]
            layer.attend(query[begin:end], room, room_values, batch, None)
        pages.append(layer.pages)
    for other in pages[1:]:
        for one, two in zip(pages[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["mistral", "llama", "gpt2", "qwen3"])
@pytest.mark.full(2)
def test_an_engine_that_chooses_all_tokens_gives_the_tokens_of_a_plain_one(name: str) -> None:
    model = tiny_model(name).double()
    texts = [torch.randint(0, 61, (3, 24), generator=torch.Generator().manual_seed(0))]
    loki, explained, is_before = calibrate(tiny_model(name).double(), texts, ALL)
    assert not bool(is_before.any()) or name != "gpt2"  # which does not rotate
    assert bool((explained.diff(dim=-1) >= -1e-12).all())
    requests = [Request(str(i), (7 * i + 1, 5, 3, i), 14, GREEDY) for i in range(4)]
    engine = make_engine(tiny_model(name).double(), cache=CacheFormat(loki=loki), num_blocks=12, token_budget=9)
    assert tokens_of(serve_all(engine, requests, every=1)) == {
        one.name: likeliest(model, one.tokens, 14) for one in requests
    }
    few = CacheFormat(loki=Loki(loki.axes, LokiChoice(0.2, 0.2, 1, 1)))
    assert tokens_of(serve_all(make_engine(tiny_model(name).double(), cache=few), requests)) != {
        one.name: likeliest(model, one.tokens, 14) for one in requests
    }  # it is not exact


def test_calibrated_axes_choose_better_than_others() -> None:
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(KEY_HEADS, 2, DIM, generator=generator, dtype=torch.float64)  # keys near a plane
    query, keys, values, tables, lengths = decodes(3)
    keys = torch.einsum("the,hed->thd", torch.randn(64, KEY_HEADS, 2, generator=generator).double(), mixing) * 2
    keys += 0.05 * torch.randn(keys.shape, generator=generator).double()
    moments = torch.einsum("thd,the->hde", keys, keys)
    best = torch.linalg.eigh(moments)[1].flip(-1)
    lengths = torch.tensor([20, 20, 20], dtype=torch.int32)
    exact = decode_attention(query, keys, values, tables, lengths, SIZE, None)
    choice = LokiChoice(dims=0.25, tokens=0.4, newest=1, dense_below=1)

    def error(axes: Tensor) -> float:
        turned = (along(keys, axes), values, tables, lengths, SIZE, None)
        return float((chosen_attention(along(query, axes), *turned, choice) - exact).square().mean())

    assert error(best) < 0.5 * min(error(axes_of(seed)) for seed in range(5))


def rotated_keys(seed: int, lengths: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Keys near a plane, rotated by position and as they are, and cos and sin; of positions between two."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(2, DIM, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    keys = torch.randn(lengths[1] - lengths[0], 2, generator=generator, dtype=torch.float64) @ mixing
    keys += 0.1 * torch.randn(keys.shape, generator=generator, dtype=torch.float64)
    places = torch.arange(*lengths, dtype=torch.float64)[:, None] * 0.5 ** torch.arange(DIM // 2, dtype=torch.float64)
    tables = torch.stack([places.cos().repeat(1, 2), places.sin().repeat(1, 2)])
    return rotate(keys, *tables), keys, tables


def test_axes_after_rotation_explain_most_of_the_text_on_which_they_are_found() -> None:
    """And those before rotation are taken for heads whose keys on held-out rows they explain more of."""
    after, before, _ = rotated_keys(0, (0, 300))
    sums = torch.stack([one.T @ one for one in (after, before)])
    shares = explained_shares(principal_axes(sums), sums[0].expand_as(sums))
    assert bool((shares[0] >= shares[1] - 1e-12).all())  # for every number of dims
    assert float(shares[0, 2] - shares[1, 2]) > 0.05
    for seed in range(5):
        others = axes_of(seed)[0]
        assert bool((explained_shares(others, sums[0]) <= shares[0] + 1e-12).all())
    near = torch.stack([one.T @ one for one in rotated_keys(1, (0, 300))[:2]])
    _, is_before = best_axes(sums, near, 3)
    assert not bool(is_before)
    # Rotations that the text does not have: its keys are of late positions, and held-out rows of the first ones.
    late, first = (torch.stack([one.T @ one for one in rotated_keys(2, places)[:2]]) for places in ((2, 8), (0, 2)))
    axes, is_before = best_axes(late, first, 2)
    assert bool(is_before)
    torch.testing.assert_close(axes, principal_axes((late + first)[1]))


def test_to_turn_keys_before_they_are_rotated_is_noticed() -> None:
    """Axes before or after rotation are applied to rotated keys and queries: a rotation does not go through them."""
    after, before, tables = rotated_keys(3, (0, 20))
    axes = axes_of()[0]
    exact = after[-1] @ after.T
    torch.testing.assert_close((after[-1] @ axes) @ (after @ axes).T, exact, rtol=0, atol=1e-12)
    wrong = rotate(before @ axes, *tables)
    assert float((wrong[-1] @ wrong.T - exact).abs().max()) > 0.1


def test_calibration_sees_keys_before_rotation() -> None:
    model, recording = tiny_model("llama").double(), RecordingFormat()
    row = [3, 1, 4, 1, 5, 9, 2, 6]
    part = ModelPart(model, EngineOptions(num_blocks=1, max_running=1, cache=recording))
    recording.rotary = part.paged.rotary  # type: ignore[union-attr]
    part.hidden_states(text_inputs(row, part.layout.block_size))
    layer = model.model.layers[0]  # type: ignore[union-attr, index]
    with torch.no_grad():
        hidden = layer.input_layernorm(model.model.embed_tokens(torch.tensor(row)))  # type: ignore[union-attr, operator]
        keys = layer.self_attn.k_proj(hidden).unflatten(-1, (2, -1))  # type: ignore[union-attr, operator]
    expected = torch.einsum("thd,the->hde", keys, keys)
    torch.testing.assert_close(recording.sums[0, False][1], expected, rtol=1e-5, atol=1e-5)  # angles are of float32
    assert float((recording.sums[0, False][0] - expected).abs().max()) > 1e-2


def test_the_newest_and_the_first_token_are_always_chosen() -> None:
    choice = LokiChoice(dims=0.5, tokens=0.1, newest=4, dense_below=0)
    assert choice.num_tokens(torch.tensor([1, 3, 5, 20, 100])).tolist() == [1, 3, 5, 5, 10]


def test_a_file_is_read_again_and_refused_for_another_model(tmp_path: Path) -> None:
    path, texts = tmp_path / "axes", [torch.arange(24).view(1, 24)]
    found = calibrate(tiny_model("llama"), texts, SOME).loki
    save_loki(path, found)
    again = load_loki(path)
    assert again.choice == SOME
    assert torch.equal(again.axes, found.axes.float())
    product = again.axes.mT @ again.axes
    assert float((product - torch.eye(product.shape[-1])).abs().max()) < 1e-6
    make_engine(tiny_model("llama").bfloat16(), cache=cache_format(f"loki={path}"))  # in another dtype, too
    for other in (tiny_model("llama", seed=1), tiny_model("qwen2")):
        with pytest.raises(ConfigError, match="is of another model; run weft calibrate on the model that is served"):
            make_engine(other, cache=CacheFormat(loki=again))
    save_loki(path, Loki(found.axes * 1.1, SOME, found.identity))
    with pytest.raises(ConfigError, match="are not orthogonal: the file is damaged"):
        load_loki(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot be read"):
        cache_format(f"loki={path}")
    for name in ("int3", "int4-48", "int4,", f"int4,loki={path}", f"loki={path},int4", "loki="):
        with pytest.raises(ConfigError, match=r"give int4, int4-32 or int4-128, or loki=FILE|cannot be read"):
            cache_format(name)
    with pytest.raises(ConfigError, match=r"dims = 0.0 of Loki must be above 0 and at most 1"):
        LokiChoice(dims=0.0)


@pytest.mark.full
def test_commands_use_all_ways_and_refuse_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = DecoderConfig(vocab_size=257, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                           num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)  # fmt: skip
    model = build(config)
    initialise(model, 0)
    save_folder(tmp_path / "model", model)  # type: ignore[arg-type]
    (tmp_path / "text").write_text("some words, some words, and some more words " * 9)
    weft, axes = caller(monkeypatch, capfd), tmp_path / "axes"
    folder = (tmp_path / "model", "--tokenizer", "bytes", "--device", "cpu")
    done = weft("calibrate", *folder, "--data", tmp_path / "text", "--out", axes, "--dense-below", 8, "--json")
    assert done.status == 0, done.err
    assert done.json["dims"] == 2
    assert all(0.25 < share <= 1 for share in done.json["explained"])
    generate = ("generate", *folder, "--tokens", 8, "--prompt", "ab ab ab ab", "--temperature", 0, "--json")
    plain = weft(*generate)
    assert weft(*generate, "--speculate", "ngram").out == plain.out
    assert weft(*generate, "--speculate", tmp_path / "model").out == plain.out
    assert weft(*generate, "--speculate", "layers=1").out == plain.out
    graph = tmp_path / "graph"
    indexed = weft("index", *folder[:3], "--data", tmp_path / "text", "--out", graph, "--json")
    assert indexed.status == 0, indexed.err
    assert indexed.json["agreement"] >= 0.999
    assert weft(*generate, "--head", f"graph={graph}").out == plain.out
    for options in (
        ("--weights", "int4", "--cache", "int4"),
        ("--weights", "fp8", "--cache", f"loki={axes}", "--speculate", "ngram"),
    ):
        found = weft(*generate, *options)
        assert found.status == 0, found.err
    mistakes = {
        "--weights int3 is unknown": ("--weights", "int3"),
        "--cache int3 is unknown": ("--cache", "int3"),
        "is no folder; give ngram": ("--speculate", "nowhere"),
        "layers=2 of a model with 2 layers": ("--speculate", "layers=2"),
        "graph=nowhere cannot be read": ("--head", "graph=nowhere"),
        "give temperature 0 or a top_k from 1 to 64": ("--head", f"graph={graph}", "--temperature", 1, "--top-k", 99),
    }
    for message, options in mistakes.items():
        found = weft(*generate, *options)
        assert found.status == 2
        assert message in found.err
        assert len(found.err.strip().splitlines()) == 1
