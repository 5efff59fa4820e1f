"""lm-evaluation-harness drives a model of weft: against log-probabilities and greedy tokens computed plainly.

Most tests use a stand-in for the harness: the base class that models derive from, and the registry. Where the harness
is installed, one test lets it evaluate a task.
"""

from __future__ import annotations

import abc
import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import tokenizers
import torch
from chats_for_tests import BOS, write_model
from tokenizers import processors

from weft.errors import ConfigError
from weft.serve.loading import load_for_generation

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None


class StandIn(abc.ABC):
    """What the harness requires of a model."""

    def __init__(self) -> None:
        self._rank, self._world_size = 0, 1

    @abc.abstractmethod
    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]: ...

    @abc.abstractmethod
    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]: ...

    @abc.abstractmethod
    def generate_until(self, requests: list[Any]) -> list[str]: ...


class Asked(NamedTuple):
    args: tuple[Any, ...]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the adapter, imported beside the harness, or beside a stand-in where it is not installed."""
    if not HAS_HARNESS:
        names = ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry")
        for name in names:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(sys.modules["lm_eval.api.model"], "LM", StandIn, raising=False)
        registry = sys.modules["lm_eval.api.registry"]
        monkeypatch.setattr(registry, "register_model", lambda name: lambda kind: kind, raising=False)
    yield importlib.import_module("weft.serve.lm_harness")
    sys.modules.pop("weft.serve.lm_harness", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a context of 64 tokens, a tokenizer of bytes and a chat template."""
    path = tmp_path_factory.mktemp("harness") / "model"
    write_model(path, "Llama")
    return path


def log_probs(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """[tokens - 1] the log-probability of each token but the first, each computed alone from all before it."""
    found = []
    with torch.no_grad():
        for end in range(1, len(tokens)):
            found.append(model(torch.tensor([tokens[:end]]))[0, -1].float().log_softmax(-1)[tokens[end]])
    return torch.stack(found)


def test_log_likelihoods_are_those_of_single_texts(harness: Any, folder: Path) -> None:
    """Batches of unequal lengths, an empty context, a context that is cut, and a space before the continuation."""
    lm = harness.HarnessModel(folder, device="cpu", batch_size="3")
    model, tokenizer, length = load_for_generation(folder)
    assert length == 64
    pairs = [("2+2", "=4"), ("", "ab"), ("the cat ", "sat"), ("x" * 200, "yz")]
    found = lm.loglikelihood([Asked(pair) for pair in pairs])
    for (context, continuation), (value, is_greedy) in zip(pairs, found, strict=True):
        before, after = (tokenizer.encode(text).tolist() for text in (context.rstrip(), context + continuation))
        num_scored = len(after) - len(before)
        whole = ([] if before else [tokenizer.end]) + after
        expected = log_probs(model, whole[-length - 1 :])[-num_scored:].sum()
        assert value == pytest.approx(float(expected), abs=1e-4), context[:9]
        assert not is_greedy
    letters = [chr(code) for code in range(33, 127)]
    tokens = torch.tensor([tokenizer.encode(letter).tolist() for letter in letters])
    with torch.no_grad():
        texts = [tokenizer.decode(row.numpy()) for row in model(tokens)[:, -1].argmax(-1, keepdim=True)]
    context, greedy = next((one, text) for one, text in zip(letters, texts, strict=True) if text in letters)
    assert lm.loglikelihood([Asked((context, greedy))])[0][1], "the greedy continuation is said to be greedy"


def test_a_long_text_is_scored_once_with_the_longest_context(harness: Any, folder: Path) -> None:
    text = "".join(chr(97 + number * 7 % 26) for number in range(150))
    (value,) = harness.HarnessModel(folder, device="cpu").loglikelihood_rolling([Asked((text,))])
    model, tokenizer, length = load_for_generation(folder)
    tokens = [tokenizer.end, *tokenizer.encode(text).tolist()]
    expected = sum(
        float(log_probs(model, tokens[max(0, end - length - 1) : end])[start - end :].sum())
        for start, end in ((1, 65), (65, 129), (129, 151))
    )
    assert value == pytest.approx(expected, abs=1e-3)
    texts = harness.windows(range(10), (99,), 4)
    assert texts == [((99, 0, 1, 2, 3), 4), ((3, 4, 5, 6, 7), 4), ((5, 6, 7, 8, 9), 2)]  # tokens, and how many count


def test_texts_end_at_their_stop_strings(harness: Any, folder: Path) -> None:
    lm = harness.HarnessModel(folder, device="cpu", batch_size=2)
    prompts = ["2+2", "abc", "", "y" * 100]
    whole = lm.generate_until([Asked((prompt, {"max_gen_toks": 12})) for prompt in prompts])
    model, tokenizer, _ = load_for_generation(folder)
    tokens = tokenizer.encode("2+2").tolist()
    with torch.no_grad():
        for _ in range(12):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert whole[0] == tokenizer.decode(torch.tensor(tokens[3:]).numpy())
    stop = whole[0][5:7]
    cut = lm.generate_until([Asked(("2+2", {"max_gen_toks": 12, "until": [stop], "do_sample": False}))])
    assert cut == [whole[0][: whole[0].index(stop)]]
    sampled = [lm.generate_until([Asked(("a", {"temperature": 1.0, "max_gen_toks": 9}))])[0] for _ in range(2)]
    assert sampled[0] == sampled[1], "two runs give the same"


def test_chats_and_mistakes(harness: Any, folder: Path) -> None:
    lm = harness.HarnessModel(folder, device="cpu")
    assert lm.apply_chat_template([{"role": "user", "content": "hi"}]) == "<|endoftext|><user>hi<assistant>"
    assert "add_generation_prompt" in lm.chat_template(True)
    assert lm.chat_template(False) is None
    for options, words in (({"num_beams": 4}, "num_beams = 4"), ({"untill": "x"}, "untill")):
        with pytest.raises(ConfigError, match=words):
            lm.generate_until([Asked(("a", options))])
    with pytest.raises(ConfigError, match="adds no token"):
        lm.loglikelihood([Asked(("a", ""))])
    with pytest.raises(ConfigError, match="70 tokens exceeds the context of 64"):
        lm.loglikelihood([Asked(("a", "b" * 70))])
    with pytest.raises(ConfigError, match="batch_size = auto is not a number"):
        harness.HarnessModel(folder, batch_size="auto")


@pytest.mark.skipif(HAS_HARNESS, reason="lm_eval is installed")
def test_without_the_harness_the_import_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"is not installed .*pip install lm_eval"):
        importlib.import_module("weft.serve.lm_harness")


@pytest.mark.skipif(not HAS_HARNESS, reason="lm_eval is not installed: pip install lm_eval")
def test_the_harness_itself_evaluates_a_task(harness: Any, folder: Path, tmp_path: Path) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    (tmp_path / "rows.jsonl").write_text('{"question": "2+2=", "answer": 0}\n{"question": "a b ", "answer": 1}\n')
    (tmp_path / "tiny.yaml").write_text(f"""
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: ["4", "c"]
doc_to_target: answer
""")
    found = lm_eval.simple_evaluate(
        model="weft", model_args=f"folder={folder},device=cpu", tasks=["tiny"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False), bootstrap_iters=0,
    )  # fmt: skip
    lm = harness.HarnessModel(folder, device="cpu")
    right = 0
    for question, answer in (("2+2=", 0), ("a b ", 1)):
        values = [value for value, _ in lm.loglikelihood([Asked((question, " 4")), Asked((question, " c"))])]
        right += int(values.index(max(values)) == answer)
    assert found["results"]["tiny"]["acc,none"] == right / 2


def test_texts_begin_as_the_tokenizer_says_and_once(harness: Any, folder: Path, tmp_path: Path) -> None:
    """A text that a chat template wrote may have the begin token; `begin` takes its place."""
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 256)])
    backend.save(str(file))
    bare, own = harness.HarnessModel(folder), harness.HarnessModel(tmp_path / "model")
    pairs, begun = [Asked(("ab", "cd"))], [Asked((f"{BOS}ab", "cd"))]
    assert own.loglikelihood(pairs) == own.loglikelihood(begun) == bare.loglikelihood(begun)
    assert own.loglikelihood(pairs) != bare.loglikelihood(pairs)
    assert own.generate_until([Asked(("ab", {}))]) == own.generate_until([Asked((f"{BOS}ab", {}))])
    assert harness.HarnessModel(tmp_path / "model", begin="").loglikelihood(pairs) == bare.loglikelihood(pairs)
    assert own.tokenizer_name != bare.tokenizer_name
