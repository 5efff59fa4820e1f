"""A tiny model of transformers in a folder with a chat template, conversations, and a plain training loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.architectures.lora import Lora
from weft.models.tuning import initial_adapter

SEQUENCE, STEPS, LEARNING_RATE, DECAY = 48, 20, 1e-2, 0.1
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
BOS, EOS = "<|endoftext|>", "<|im_end|>"
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d!"},
        ]
    },
    {"prompt": "say hi: ", "completion": "hi"},
    {"prompt": [{"role": "user", "content": "x"}], "completion": [{"role": "assistant", "content": "yz"}]},
    {"prompt": "count: ", "completion": "one two"},
    {"prompt": "the last one is rather long: ", "completion": "yes"},
]
PREFERENCES: list[dict[str, Any]] = [
    {"prompt": "say: ", "chosen": "yes", "rejected": "no, never"},
    {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
    {"prompt": "a", "chosen": "bc", "rejected": "xyz"},
    {
        "prompt": [{"role": "user", "content": "q"}],
        "chosen": [{"role": "assistant", "content": "r"}],
        "rejected": [{"role": "assistant", "content": "sss"}],
    },
]
# The texts of each conversation, and whether they are answers: what the rows above mean, written by hand.
EXPECTED: list[list[tuple[str, bool]]] = [
    [(f"{BOS}<user>2+2?<assistant>", False), (f"4{EOS}", True)],
    [
        (f"{BOS}<user>a<assistant>", False),
        (f"b{EOS}", True),
        ("<user>c<assistant>", False),
        (f"d!{EOS}", True),
    ],
    [("say hi: ", False), (f"hi{EOS}", True)],
    [(f"{BOS}<user>x<assistant>", False), (f"yz{EOS}", True)],
    [("count: ", False), (f"one two{EOS}", True)],
    [("the last one is rather long: ", False), (f"yes{EOS}", True)],
]


# The prompt of each preference, and its two answers.
EXPECTED_PAIRS = [
    ("say: ", f"yes{EOS}", f"no, never{EOS}"),
    ("2+2=", f"4{EOS}", f"5{EOS}"),
    ("a", f"bc{EOS}", f"xyz{EOS}"),
    (f"{BOS}<user>q<assistant>", f"r{EOS}", f"sss{EOS}"),
]


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes with two special tokens, and the chat template beside it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": {"content": EOS}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(folder: Path, name: str) -> nn.Module:
    """A tiny model of transformers (`Llama` or `Qwen2`) with random float64 weights, written to a folder."""
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=258, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    model: Any = getattr(transformers, f"{name}ForCausalLM")(config).double()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return with_exact_norms(model)


def with_exact_norms(model: nn.Module) -> nn.Module:
    """Returns a model of transformers whose norms do not cast to float32, which rounds float64 models to 1e-7."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            setattr(module, "forward", partial(_norm, module))  # noqa: B010 (a method to mypy)
    return model


def _norm(module: Any, hidden: Tensor) -> Tensor:
    variance = hidden.square().mean(-1, keepdim=True)
    normed: Tensor = module.weight * (hidden * torch.rsqrt(variance + module.variance_epsilon))
    return normed


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_run_file(folder: Path, model: Path, more: str = "", kind: str = "chat") -> Path:
    """A run file that fine-tunes a model on `CHATS` or `PREFERENCES`: all rows in every step, in float64."""
    rows = CHATS if kind == "chat" else PREFERENCES
    path = folder / "chat.toml"
    path.write_text(f"""
folder = "{folder / "run"}"
[model]
from = "{model}"
[data]
kind = "{kind}"
source = "{write_rows(folder / f"{kind}s.jsonl", rows)}"
sequence = {SEQUENCE}
held_out = 0.0
cache = "{folder / "cache"}"
[train]
steps = {STEPS}
batch = 4
learning_rate = {LEARNING_RATE}
schedule = "constant"
weight_decay = {DECAY}
device = "cpu"
[plan]
precision = "fp64"
{more}
""")
    return path


@dataclass(frozen=True)
class Example:
    """A conversation alone: its tokens, the mask of its targets, and where it begins in its row."""

    tokens: Tensor
    is_target: Tensor
    start: int


def examples(encode: Callable[[str], Sequence[int]], texts: Iterable[Sequence[tuple[str, bool]]]) -> list[Example]:
    """Conversations one after another, each where it lies if rows of `SEQUENCE` are filled in order."""
    found: list[Example] = []
    used = SEQUENCE
    for parts in texts:
        ids = [(token, counts) for text, counts in parts for token in encode(text)]
        if used + len(ids) - 1 > SEQUENCE:
            used = 0
        found.append(Example(torch.tensor([i for i, _ in ids]), torch.tensor([c for _, c in ids]), used))
        used += len(ids) - 1
    return found


def add_lora_of_peft(model: nn.Module, lora: Lora) -> None:
    """LoRA by PEFT, in float64 and with weft's initial values."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets), lora_dropout=0.0)  # type: ignore[arg-type]
    inject_adapter_in_model(config, model)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        is_down = ".lora_A." in name
        if is_down or ".lora_B." in name:
            initial = initial_adapter(weft_name(name), tuple(parameter.shape), seed=0)
            parameter.data = initial.double() if is_down else torch.zeros_like(parameter, dtype=torch.float64)


def weft_name(path: str) -> str:
    """The name in weft of a parameter of a model with LoRA by PEFT."""
    path = path.replace(".base_layer.", ".")
    return path.removesuffix(".default.weight") if ".lora_" in path else path


def sum_of_losses(model: nn.Module, given: Sequence[Example]) -> Tensor:
    """The cross-entropy summed over the targets of conversations, each computed alone."""
    total = torch.zeros((), dtype=torch.float64)
    for one in given:
        positions = one.start + torch.arange(len(one.tokens) - 1)
        logits = model(one.tokens[None, :-1], position_ids=positions[None], use_cache=False).logits[0]
        picked = logits.log_softmax(-1).gather(1, one.tokens[1:, None])[:, 0]
        total = total - picked[one.is_target[1:]].sum()
    return total


def mean_loss(model: nn.Module, given: Sequence[Example]) -> Tensor:
    """The mean cross-entropy of all targets."""
    return sum_of_losses(model, given) / sum(int(one.is_target[1:].sum()) for one in given)


def preference_loss(model: nn.Module, reference: nn.Module, pairs: Sequence[Sequence[Example]], beta: float) -> Tensor:
    """DPO's mean loss, as its paper has it, with a second model as the reference."""
    losses = []
    for chosen, rejected in pairs:
        with torch.no_grad():
            before = sum_of_losses(reference, [rejected]) - sum_of_losses(reference, [chosen])
        now = sum_of_losses(model, [rejected]) - sum_of_losses(model, [chosen])
        losses.append(-(beta * (now - before)).sigmoid().log())
    return torch.stack(losses).mean()


def train_plainly(model: nn.Module, loss: Callable[[], Tensor], steps: int = STEPS) -> list[float]:
    """A plain loop: clipping at 1, torch's AdamW. Returns losses."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for _ in range(steps):
        total = loss()
        total.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses
