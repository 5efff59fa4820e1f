"""`weft plan --serve` on a CPU, by the command: presets, folders, JSON and words, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands_for_tests import Weft
from decode_rates_for_tests import made_up_rates, write_machine

from weft.architectures import DecoderConfig, RecurrentConfig
from weft.commands import bench, plan_serve_cpu
from weft.models import RecurrentModel, save_folder, write_config
from weft.models.catalog import load_model
from weft.planner.serving_cpu import predict_decode
from weft.serve.attention.formats import Loki, save_loki
from weft.serve.cpu_costs import CpuCosts
from weft.serve.head import graph_head
from weft.serve.head.graph_head import GraphHead, VocabularyGraph
from weft.serve.measurement import measure_decode

MODEL = "mpt-125m"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    return write_machine(tmp_path / "machine.toml", made_up_rates())


def test_a_preset_is_priced_in_json_and_in_words(weft: Weft, machine: Path) -> None:
    given = ("plan", "--serve", "--model", MODEL, "--cluster", machine, "--prompt", 100, "--output", 40)
    found = weft(*given, "--weights", "int4", "--head", "int8", "--json").json
    costs = CpuCosts(load_model(MODEL), "float32", "int4", "int8")  # type: ignore[arg-type]
    expected = predict_decode(costs, made_up_rates(), 120)
    assert found["tokens_per_second"] == pytest.approx(expected.tokens_per_second)
    assert found["seconds_by_cause"] == pytest.approx(dict(expected.seconds_by_cause))
    assert (found["weights"], found["head"], found["threads"], found["tokens"]) == ("int4", "int8", 1, 120)
    assert found["read_bytes_per_token"] == expected.read_bytes
    plain = weft(*given, "--precision", "fp32", "--json").json
    assert plain["read_bytes_per_token"] > found["read_bytes_per_token"]
    half = weft(*given, "--precision", "bf16", "--json").json
    assert (half["precision"], 2 * half["read_bytes_per_token"]) == ("bf16", plain["read_bytes_per_token"])
    assert (
        "weft serve FOLDER --device cpu --precision bf16 --head int8"
        in weft(*given, "--precision", "bf16", "--head", "int8").out
    )
    words = weft(*given, "--weights", "int4")
    assert words.status == 0
    for part in (
        "One request alone:",
        "products of layers",
        "weft serve FOLDER --device cpu --weights int4",
        "Not priced on a CPU: prompts, several requests at once",
    ):
        assert part in words.out
    assert found["doubt"] is None
    assert "Doubtful" not in words.out


def test_figures_of_a_machine_that_others_used_are_called_doubtful(weft: Weft, tmp_path: Path) -> None:
    file = write_machine(tmp_path / "machine.toml", replace(made_up_rates(), memory_spread=1.4))
    given = ("plan", "--serve", "--model", MODEL, "--cluster", file)
    assert (
        "Doubtful: while this CPU was measured, equal reads of memory differed by a factor of 1.40" in weft(*given).out
    )
    assert "1.40" in weft(*given, "--json").json["doubt"]


def test_folders_are_priced_by_their_config_alone(
    monkeypatch: pytest.MonkeyPatch, weft: Weft, machine: Path, tmp_path: Path
) -> None:
    model = RecurrentModel(RecurrentConfig("gru", 300, 64, 2))
    save_folder(tmp_path / "gru", model)
    (tmp_path / "gru" / "model.safetensors").unlink()
    given = ("plan", "--serve", "--cluster", machine, "--json", "--model")
    found = weft(*given, tmp_path / "gru").json
    assert found["tokens_per_second"] == pytest.approx(
        predict_decode(CpuCosts(model.config, "float32"), made_up_rates(), 640).tokens_per_second
    )
    (tmp_path / "llama").mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    about = {"architectures": ["LlamaForCausalLM"], "vocab_size": 300, "max_position_embeddings": 768, **sizes}
    about |= {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False, "hidden_act": "silu"}
    (tmp_path / "llama" / "config.json").write_text(json.dumps(about))
    costs = CpuCosts(DecoderConfig(vocab_size=300, **sizes), "float32")  # type: ignore[arg-type]
    expected = predict_decode(costs, made_up_rates(), 640)
    assert weft(*given, tmp_path / "llama").json["tokens_per_second"] == pytest.approx(expected.tokens_per_second)
    monkeypatch.setattr("weft.serve.loading.computes_in", lambda folder: torch.bfloat16)  # as a run may have saved it
    assert weft(*given, tmp_path / "llama").json["precision"] == "bf16"


def test_a_folder_in_fewer_bits_is_priced_by_the_nearest_format(weft: Weft, machine: Path, tmp_path: Path) -> None:
    write_config(tmp_path, DecoderConfig("llama", 300, 64, 128, 2, 4))
    for cluster in (machine, "h200:1x1"):
        config = json.loads((tmp_path / "config.json").read_text())
        config.pop("quantization_config", None)
        (tmp_path / "config.json").write_text(json.dumps(config))
        given = ("plan", "--serve", "--model", tmp_path, "--cluster", cluster)
        expected = weft(*given, "--weights", "int4", "--json").json
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert weft(*given, "--json").json == expected
        words = weft(*given).out
        assert "Serve it: weft serve FOLDER" in words
        assert "--weights" not in words


def test_a_run_file_is_priced_with_its_changes(weft: Weft, machine: Path, tmp_path: Path) -> None:
    weft("init", tmp_path / "run.toml")
    given = ("plan", "--serve", tmp_path / "run.toml", "--cluster", machine, "--json")
    small, large = weft(*given), weft(*given, "model.num_hidden_layers=9")
    assert large.json["read_bytes_per_token"] > small.json["read_bytes_per_token"]
    half = weft(*given, "plan.precision=bf16", "plan.memory.master=false", "plan.exact=false").json  # saves bf16
    assert (small.json["precision"], half["precision"]) == ("fp32", "bf16")
    refused = weft("plan", "--serve", "--model", MODEL, "model.num_hidden_layers=9")
    assert refused.status == 2
    assert f"'model.num_hidden_layers=9' changes a run file, and --model {MODEL} has none" in refused.err


def test_a_graph_is_priced_by_the_counts_in_its_file(weft: Weft, machine: Path, tmp_path: Path) -> None:
    graph = VocabularyGraph(torch.zeros(50257, 4, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    head = GraphHead(graph, "", 64, 64, num_scored=1000.0, num_rounds=5.0, num_edges=3000.0)
    graph_head.save(tmp_path / "graph", head)
    given = ("plan", "--serve", "--model", MODEL, "--cluster", machine, "--head", f"graph={tmp_path / 'graph'}")
    seconds = weft(*given, "--json").json["seconds_by_cause"]
    assert seconds["the search for likely tokens"] == pytest.approx(
        made_up_rates().search.seconds(5, 3000, 1000, 4 * 768)
    )
    graph_head.save(tmp_path / "graph", replace(head, num_scored=40000.0))
    words = weft(*given).out
    assert "A search would read more than the dense head, so weft serve uses that one." in words
    assert "the head" in words
    graph_head.save(tmp_path / "graph", replace(head, num_rounds=0.0))
    refused = weft(*given)
    assert refused.status == 2
    assert "run weft index again" in refused.err
    assert "cannot be read" in weft(*given[:-1], "graph=nowhere").err


def test_a_cpu_that_was_not_measured_and_options_without_a_price_are_refused(
    weft: Weft, machine: Path, tmp_path: Path
) -> None:
    old = write_machine(tmp_path / "old.toml", None)
    for cluster in ("local", old, "frontera:1x1"):
        refused = weft("plan", "--serve", "--model", MODEL, "--cluster", cluster)
        assert refused.status == 2, cluster
        assert "weft bench machine --serve --write machine.toml" in refused.err
    given = ("plan", "--serve", "--model", MODEL, "--cluster", machine)
    for options, part in (
        (("--cache", "int4"), "--cache is not priced on a CPU"),
        (("--stream-weights", 2), "--stream-weights is not priced on a CPU"),
        (("--speculate", "ngram"), "--speculate is not priced on a CPU"),
        (("--precision", "fp16"), "--precision fp16 is unknown; give fp32 or bf16"),
        (("--prompt", 2000, "--output", 49), "2000 and --output 49 are 2049 tokens, and mpt-125m is made for 2048 ("),
        (("--weights", ""), "--weights is given as empty text; give a value, or leave it out"),
        (("--weights", "int3"), "--weights int3 is unknown"),
        (("--head", "int3"), "--head int3 is unknown"),
    ):
        refused = weft(*given, *options)
        assert refused.status == 2, options
        assert part in refused.err
    assert "unknown model 'nowhere'" in weft("plan", "--serve", "--model", "nowhere", "--cluster", machine).err
    empty = tmp_path / "empty"
    empty.mkdir()
    assert weft("plan", "--serve", "--model", empty, "--cluster", machine).status == 2
    for cluster in (machine, "h200:8x8"):
        latent = weft("plan", "--serve", "--model", "deepseek-v3", "--cluster", cluster)
        assert latent.status == 2
        assert "weft does not serve architecture 'deepseek_v3' yet" in latent.err
    large = weft("plan", "--serve", "--model", "llama3-70b", "--cluster", machine)
    assert "do not fit the machine's 2.0 GB" in large.err


def test_what_only_a_cpu_has_is_refused_for_gpus(weft: Weft, tmp_path: Path) -> None:
    given = ("plan", "--serve", "--cluster", "h200:1x1", "--model")
    assert "--head int4 is for a CPU" in weft(*given, "llama3-8b", "--head", "int4").err
    assert "--precision fp32 is for a CPU" in weft(*given, "llama3-8b", "--precision", "fp32").err
    save_folder(tmp_path / "lstm", RecurrentModel(RecurrentConfig("lstm", 300, 64)))
    assert "LSTM and GRU models are priced on a CPU only" in weft(*given, tmp_path / "lstm").err


def test_axes_of_another_model_are_refused(weft: Weft, tmp_path: Path) -> None:
    path = tmp_path / "axes"
    given = ("plan", "--serve", "--cluster", "h200:1x1", "--model", "llama3-8b", "--requests", 1, "--cache")
    save_loki(path, Loki(torch.eye(128).expand(32, 8, 128, 128), identity="any"))
    assert weft(*given, f"loki={path}").status == 0
    save_loki(path, Loki(torch.eye(24).expand(3, 2, 24, 24), identity="any"))
    refused = weft(*given, f"loki={path}")
    assert refused.status == 2
    assert "is of 3 layers with 2 key heads of 24, and llama3-8b has 32 with 8 of 128; run weft cal" in refused.err


def test_bench_machine_measures_decodes_if_asked(monkeypatch: pytest.MonkeyPatch, weft: Weft, tmp_path: Path) -> None:
    told = list[str]()

    def measured(progress: object) -> object:
        told.append("measured")
        progress(1, 1)  # type: ignore[operator]
        return made_up_rates()

    monkeypatch.setattr(measure_decode, "measure_decode", measured)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert bench._measured_decodes() == made_up_rates()
    assert told == ["measured"]
    refused = weft("bench", "machine", "--serve", "--device", "cuda", "--write", tmp_path / "m.toml")
    assert refused.status == 2
    assert "--serve measures decodes on a CPU, not with --device cuda" in refused.err
    assert "machine --serve" in plan_serve_cpu.HOW_TO_MEASURE


def test_options_that_a_plan_would_ignore_are_refused(weft: Weft) -> None:
    for given in (("--best", "cost"), ("--where", "pipe=1"), ("--write", "a"), ("--timeline",), ("--what-if",)):
        refused = weft("plan", "--model", MODEL, "--serve", *given)
        assert refused.status == 2
        assert f"{given[0]} is about training, and --serve plans to serve" in refused.err
    for given in (("--weights", "int4"), ("--stream-weights", "1"), ("--speculate", "ngram"), ("--prompt", "512")):
        refused = weft("plan", "--model", MODEL, *given)
        assert refused.status == 2
        assert f"{given[0]} is about serving the model; give --serve too" in refused.err


def test_the_folder_of_a_machine_file_is_there_before_anything_is_measured(tmp_path: Path, weft: Weft) -> None:
    refused = weft("bench", "machine", "--write", tmp_path / "none" / "machine.toml")
    assert refused.status == 2
    assert f"the folder {tmp_path / 'none'} does not exist; make it" in refused.err


def test_a_service_on_a_cpu_is_refused(weft: Weft, machine: Path) -> None:
    for given in (("--rate", 1), ("--report", "a"), ("--first-token", 1)):
        refused = weft("plan", "--model", MODEL, "--serve", "--cluster", machine, *given)
        assert refused.status == 2
        assert "a CPU has prices of one request, and none of a service" in " ".join(refused.err.split())
