"""Options that are given as empty text are refused, where they would count as not given."""

from __future__ import annotations

import pytest
from commands_for_tests import Weft

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
