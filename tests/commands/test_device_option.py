"""Options of commands: --device is read without CUDA, and an option that is given as empty text is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commands_for_tests import Weft
from serve_for_tests import ReachedError
from serving_for_tests import tiny_model

from weft.cluster.local_gpus import Gpu, hide_gpus
from weft.commands.arguments import chosen_device
from weft.commands.serve import serve_command
from weft.errors import ConfigError
from weft.launch.fork import fork_obstacle
from weft.models import save_folder


def test_device_is_chosen_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are forked later could not use CUDA if this process had initialised it."""

    def forbidden(*_: object) -> None:
        raise AssertionError("this initialises CUDA")

    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    monkeypatch.setattr("torch.cuda.get_device_properties", forbidden)
    monkeypatch.setattr("torch.cuda.is_available", lambda: os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1")
    assert [chosen_device(one) for one in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    with hide_gpus([]):
        assert chosen_device("auto") == "cpu"
        with pytest.raises(ConfigError, match="--device cuda, but torch sees no GPU; use auto or cpu"):
            chosen_device("cuda")
    with hide_gpus([Gpu("H200", 1 << 30, (9, 0))]):
        assert chosen_device("auto") == "cuda"


def test_ranks_of_weft_serve_are_forked_before_cuda_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    save_folder(folder, tiny_model("llama-deep"))  # type: ignore[arg-type]

    def forbidden(*_: object) -> None:
        raise AssertionError("ranks could not be forked any more")

    def reached(*_: object, **__: object) -> None:
        assert fork_obstacle() is None
        raise ReachedError

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda._lazy_init", forbidden)
    monkeypatch.setattr("torch.autograd._engine_run_backward", forbidden)  # where there is a GPU it starts threads
    monkeypatch.setattr("weft.launch.fork_server.ForkServer.__init__", reached)
    for plan in ("plan.data=2", "plan.tensor.x=2"):
        with pytest.raises(ReachedError):
            serve_command(source=folder, overrides=[plan], port=0, stream_weights=1, resident_blocks=1)


TEXTS = ("--weights", "--cache", "--head", "--speculate", "--device", "--tokenizer")
OPTIONS = {
    ("serve", "run"): (*TEXTS, "--sums", "--calibration"),
    ("generate", "run"): TEXTS,
    ("calibrate", "run", "--data", "text"): ("--device", "--out"),
    ("plan", "--serve", "--model", "gpt2"): ("--weights", "--cache", "--head", "--speculate", "--precision"),
    ("bench", "serve", "run"): ("--out",),
    ("bench", "machine", "--serve"): ("--write",),
}


@pytest.mark.parametrize("command", OPTIONS, ids=" ".join)
def test_empty_options_are_refused_by_every_command(weft: Weft, command: tuple[str, ...]) -> None:
    for option in OPTIONS[command]:
        for given in ((option, ""), (f"{option}=",)):
            left = weft(*command, *given)
            assert (left.status, left.out) == (2, "")
            assert left.err == f"weft: {option} is given as empty text; give a value, or leave it out\n"


def test_empty_arguments_are_refused_and_a_prompt_may_be_empty(weft: Weft) -> None:
    assert weft("serve", "").err == "weft: an argument is given as empty text; give a value, or leave it out\n"
    for given in (("--prompt", ""), ("--prompt=",)):
        assert "nowhere does not exist; give a run folder" in weft("generate", "nowhere", *given).err
