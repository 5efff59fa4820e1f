"""Random questions whose answers must agree: with the file, with a constraint, and with more hardware."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from weft.cluster.hardware import Cluster, load
from weft.commands.run_planning import catalog_run, with_plan
from weft.models import DecoderConfig, GPT2Config, LanguageConfig
from weft.planner.answer import Answer, ask
from weft.planner.predict import predict
from weft.planner.question import Question, parse_constraints

NUM_SAMPLED, NUM_SOAK, NUM_ALIKE = 1, 500, 20

TOLERANCE = 1 + 1e-9
WORDS = ("no pipe", "no recompute", "x=1", "shard<=2", "pipe<=2", "schedule=gpipe", "stage=1", "micro_batch<=2")


def question_of(seed: int) -> tuple[LanguageConfig, str, int, int]:
    """Returns a random model, cluster, batch and sequence.

    Questions in a row have models of equal blocks, because a model takes longer to profile than to plan.
    """
    rng = random.Random(seed // NUM_ALIKE)
    hidden, heads = rng.choice([(256, 4), (512, 8), (768, 12)])
    sequence = rng.choice([128, 256, 512])
    is_decoder, groups = rng.random() < 0.5, rng.choice([1, 2])
    vocabulary = rng.choice([4096, 8192, 32000])
    rng = random.Random(f"question {seed}")
    layers = rng.randint(2, 6)
    config: LanguageConfig = GPT2Config(
        vocab_size=vocabulary, n_positions=sequence, n_embd=hidden, n_layer=layers, n_head=heads
    )
    if is_decoder:
        config = DecoderConfig(
            vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=heads // groups, intermediate_size=2 * hidden,
            max_position_embeddings=sequence,
        )  # fmt: skip
    cluster = rng.choice(["h100:1x4", "h100:2x2", "a100-40:1x8", "a100-80:2x4", "h100:3x2", "v100-32:1x4"])
    return config, cluster, rng.choice([6, 8, 16, 24, 32]), sequence


def asked(config: LanguageConfig, cluster: Cluster, batch: int, sequence: int, *where: str) -> Answer:
    precision = "bf16" if "bf16" in cluster.node.device.peak_flops else "fp32"
    question = Question(batch, sequence, precision, parse_constraints(where))  # type: ignore[arg-type]
    return ask("random", config, cluster, question)


def more(cluster: Cluster) -> dict[str, Cluster]:
    """Returns clusters with twice as much of one thing, or a node more."""
    node = cluster.node
    device, intra, inter = node.device, node.intra, node.inter
    flops = {precision: 2 * rate for precision, rate in device.peak_flops.items()}
    changed = {
        "memory": {"device": replace(device, memory_bytes=2 * device.memory_bytes)},
        "FLOP/s": {"device": replace(device, peak_flops=flops)},
        "intra": {"intra": replace(intra, bandwidth_bytes_per_second=2 * intra.bandwidth_bytes_per_second)},
        "inter": {"inter": replace(inter, bandwidth_bytes_per_second=2 * inter.bandwidth_bytes_per_second)},
    }
    found = {what: replace(cluster, node=replace(node, **fields)) for what, fields in changed.items()}
    return {**found, "nodes": replace(cluster, num_nodes=cluster.num_nodes + 1)}


def check_question(seed: int, num_words: int = 2, num_larger: int = 5) -> None:
    """Checks the answer to a question, and those with `num_words` constraints and on `num_larger` larger clusters."""
    config, name, batch, sequence = question_of(seed)
    cluster = load(name)
    found = asked(config, cluster, batch, sequence)
    best = found.best
    run = replace(catalog_run("mpt-125m", name, batch * sequence, sequence), model=config)
    file = with_plan(run, found)
    predicted = predict(file, load(file.cluster))
    assert predicted.step_seconds == pytest.approx(best.seconds, rel=1e-6), file.plan
    assert predicted.cost.memory_bytes <= best.memory.total_bytes, file.plan
    assert predicted.cost.memory_bytes == pytest.approx(best.memory.tensor_bytes, rel=0.05), file.plan

    shown = found.to_json()["plans"][0]
    assert sum(shown["where"].values()) == pytest.approx(shown["seconds"])
    assert shown["bubble_share"] == pytest.approx(shown["where"]["bubble"] / shown["seconds"])
    assert f"computes for {shown['where']['compute'] / shown['seconds']:.0%}" in found.why

    for word in random.Random(seed).sample(WORDS, num_words):
        limited = asked(config, cluster, batch, sequence, word).found.best
        assert not limited or limited[0].seconds >= best.seconds / TOLERANCE, word
    for what, larger in random.Random(seed).sample(list(more(cluster).items()), num_larger):
        assert asked(config, larger, batch, sequence).best.seconds <= best.seconds * TOLERANCE, what


@pytest.mark.parametrize("seed", range(NUM_SAMPLED))
@pytest.mark.full
def test_answers_agree(seed: int) -> None:
    check_question(seed, num_words=1, num_larger=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(NUM_SOAK + NUM_SAMPLED))
def test_more_answers_agree(seed: int) -> None:
    check_question(seed)
