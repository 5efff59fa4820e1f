"""Recall against time of the graph search over an output matrix (FGD), beside the dense product on one CPU thread.

    python benchmarks/vocabulary_search.py train --out head            on a GPU: minutes; any .py files of this Python
    python benchmarks/vocabulary_search.py measure head                on a CPU: a minute; writes the result
    python benchmarks/vocabulary_search.py measure --random 4000 32    a random matrix, to try the benchmark itself

`train` makes a tokenizer of 32,768 tokens and trains a small Llama, so that the matrix and the hidden states are real
ones; it writes them in 16 bits as files of at most 16 MiB. `measure` builds the graph from the matrix and searches for
hidden states of texts that were not trained on, half of which choose the beam. Milliseconds are those of a core.
Writes benchmarks/results/vocabulary-search-cpu.json.
"""

from __future__ import annotations

import sysconfig
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.models import DecoderConfig, build, initialise
from weft.serve.calibration.graph_index import NUM_LIKELY
from weft.serve.head.graph_head import GraphHead, VocabularyGraph, build_graph, search, with_chosen_beam

RESULT = harness.RESULTS / "vocabulary-search-cpu.json"
VOCAB, WIDTH, SEQUENCE, BATCH, NUM_STATES = 32768, 512, 256, 64, 2000
BEAMS = (64, 256, 1024, 4096)
NUM_CURVE, NUM_CHOOSING, NUM_CHECKED = 150, 200, 300  # hidden states
NUMBERS = (1, 10, 64)  # of the likeliest tokens that recall is stated for


def corpus(num_bytes: int) -> list[str]:
    """Python files of this Python and its packages, in a fixed order that mixes them."""
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}
    paths = sorted({path for folder in folders for path in Path(folder).rglob("*.py")}, key=lambda path: path.name)
    texts, total = list[str](), 0
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="ignore")
        texts.append(text)
        total += len(text)
        if total > num_bytes:
            break
    return texts


def tokens_of(texts: list[str]) -> Tensor:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts[: len(texts) // 2], trainer)
    return torch.tensor([token for one in tokenizer.encode_batch(texts) for token in one.ids], dtype=torch.int32)


def train(out: Path, seconds: float, num_bytes: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = tokens_of(corpus(num_bytes))
    rows = tokens[: len(tokens) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE).to(device)
    held_out, rows = rows[::50], torch.cat([rows[start::50] for start in range(1, 50)])
    config = DecoderConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=SEQUENCE,
    )  # fmt: skip
    model = build(config).to(device)
    initialise(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    began, step = time.perf_counter(), 0

    def loss_of(batch: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(batch[:, :-1].long())
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten().long())

    while (share := (time.perf_counter() - began) / seconds) < 1:
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 100, 5 * (1 - share))
        loss = loss_of(rows[torch.randint(len(rows), (BATCH,), device=device)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 200 == 0:
            print(f"step {step}: loss {float(loss.detach()):.3f}", flush=True)
    found = list[Tensor]()
    model.lm_head.register_forward_pre_hook(lambda module, given: found.append(given[0].flatten(0, 1).half().cpu()))
    with torch.no_grad():
        loss = sum(float(loss_of(batch)) for batch in held_out[:64].split(16)) / 4
    states = torch.cat(found)
    states = states[:: len(states) // NUM_STATES][:NUM_STATES]
    out.mkdir(parents=True, exist_ok=True)
    about = {"steps": str(step), "loss": str(loss), "tokens": str(rows.numel())}
    for index, part in enumerate(model.lm_head.weight.detach().half().cpu().chunk(4)):
        save_file({"weight": part.contiguous()}, out / f"weight-{index}.safetensors")
    save_file({"states": states.contiguous()}, out / "states.safetensors", about)
    print(about, "tokens in all", len(tokens))


def read(folder: Path) -> tuple[Tensor, Tensor, dict[str, Any]]:
    from safetensors import safe_open

    parts = [load_file(path)["weight"].float() for path in sorted(folder.glob("weight-*.safetensors"))]
    with safe_open(str(folder / "states.safetensors"), "pt") as file:
        return torch.cat(parts), file.get_tensor("states").float(), dict(file.metadata() or {})


def dense_milliseconds(weight: Tensor, states: Tensor, number: int) -> float:
    """The least of several medians, as another process may disturb some."""
    medians = []
    for _ in range(3):
        times = []
        for state in states[:30]:
            begin = time.process_time()
            F.linear(state[None], weight).topk(number)
            times.append(time.process_time() - begin)
        medians.append(sorted(times)[15])
    return 1e3 * min(medians)


def _logits(weight: Tensor, state: Tensor, tokens: Tensor) -> Tensor:
    return torch.mv(weight.index_select(0, tokens), state)


def curve(weight: Tensor, states: Tensor, graph: VocabularyGraph) -> list[dict[str, float]]:
    """Recall, logits and milliseconds by beam."""
    most = max(NUMBERS)
    dense = torch.cat([F.linear(some, weight).topk(most).indices for some in states.split(256)])
    rows = []
    for beam in [one for one in BEAMS if one < len(weight)]:
        hits, scored, times = dict.fromkeys(NUMBERS, 0), 0, []
        for state, expected in zip(states, dense, strict=True):
            logits_of = partial(_logits, weight, state)
            begin = time.process_time()
            found = search(graph, logits_of, min(beam, most), beam)
            times.append(time.process_time() - begin)
            scored += found.num_scored
            tokens = found.tokens.tolist()
            for number in NUMBERS:
                hits[number] += len(set(tokens) & set(expected[:number].tolist()))
        row: dict[str, float] = {"beam": beam, "logits": scored / len(states)}
        row |= {f"recall@{number}": hits[number] / number / len(states) for number in NUMBERS}
        row["milliseconds"] = 1e3 * sorted(times)[len(times) // 2]
        print(row, flush=True)
        rows.append(row)
    return rows


@torch.no_grad()
def measure(weight: Tensor, states: Tensor, about: dict[str, Any], degrees: list[int]) -> dict[str, Any]:
    dense = dense_milliseconds(weight, states, max(NUMBERS))
    result: dict[str, Any] = {"matrix": list(weight.shape), "trained": about}
    result |= {"threads": 1, "seconds": "of a core", "dense_milliseconds": dense, "curves": {}}
    print("dense", dense)
    some, others = states[::2], states[1::2]
    likely = torch.cat([F.linear(one, weight).topk(NUM_LIKELY).indices for one in some.split(256)])
    graphs = {}
    for degree in degrees:
        begin = time.process_time()
        graphs[degree] = build_graph(weight, None, degree, likely)
        built = time.process_time() - begin
        print(f"degree {degree}: built in {built:.0f} s", flush=True)
        rows = curve(weight, others[:NUM_CURVE], graphs[degree])
        result["curves"][str(degree)] = {"build_seconds": built, "rows": rows}
    head, _ = with_chosen_beam(GraphHead(graphs[degrees[0]], ""), weight, None, some[:NUM_CHOOSING])
    others = others[-NUM_CHECKED:]
    likeliest = F.linear(others, weight).argmax(1).tolist()
    times, equal = [], 0
    for state, expected in zip(others, likeliest, strict=True):
        begin = time.process_time()
        tokens = head.best(state, weight, None).tokens
        times.append(time.process_time() - begin)
        equal += int(tokens[0]) == expected
    chosen = 1e3 * sorted(times)[len(times) // 2]
    result["chosen"] = {
        "beam": head.beam,
        "degree": degrees[0],
        "logits": head.num_scored,
        "agreement_on_other_text": equal / len(others),
        "milliseconds": chosen,
        "times_as_fast_as_dense": dense / chosen,
    }
    print(result["chosen"])
    return result


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("what", choices=["train", "measure"])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path("head"))
    parser.add_argument("--train-seconds", type=float, default=150.0)
    parser.add_argument("--corpus-bytes", type=int, default=60_000_000)
    parser.add_argument("--random", type=int, nargs=2, help="tokens and width; results are printed, not written")
    parser.add_argument("--degrees", type=int, nargs="+", default=[32])
    given = parser.parse_args()
    if given.what == "train":
        train(given.out, given.train_seconds, given.corpus_bytes)
        return
    torch.set_num_threads(1)
    if given.random:
        size, width = given.random
        generator = torch.Generator().manual_seed(0)
        matrix, states = (torch.randn(one, width, generator=generator) for one in (size, 200))
        measure(matrix, states, {}, given.degrees)
        return
    if given.folder is None:
        parser.error("give the folder that train wrote, or --random")
    harness.write(RESULT, measure(*read(given.folder), given.degrees), device="cpu")


if __name__ == "__main__":
    main()
