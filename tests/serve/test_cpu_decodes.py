"""Serving on a CPU: the number of threads, and packed weights."""

from __future__ import annotations

import pytest
from serving_for_tests import GREEDY, make_engine, serve_all, tiny_model, tokens_of

from weft.serve.measurement.cpu_threads import fastest_threads
from weft.serve.scheduling.request import Request
from weft.serve.weights.packed_linear import pack_model
from weft.serve.weights.weight_formats import weight_format


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_an_engine_with_packed_weights_gives_the_tokens_of_the_decoded_ones(kind: str) -> None:
    requests, answers = [Request("one", (3, 1, 4, 1, 5), 12, GREEDY)], []
    for is_packed in (True, False):
        model, form = tiny_model("llama"), weight_format(kind)
        if is_packed:
            pack_model(model, form)
        else:
            for name, parameter in model.named_parameters():
                if "proj" in name and parameter.dim() == 2:
                    parameter.data = form.dequantise(form.quantise(parameter.data), parameter.dtype)
        answers.append(tokens_of(serve_all(make_engine(model, num_blocks=12), requests)))
    assert answers[0] == answers[1]


def test_the_fastest_number_of_threads_is_found() -> None:
    seconds = {1: 1.0, 2: 0.6, 4: 0.59, 8: 0.4, 12: 0.9}
    assert fastest_threads(12, seconds.__getitem__) == 8
    assert fastest_threads(4, seconds.__getitem__) == 2  # four gain too little
    assert fastest_threads(1, seconds.__getitem__) == 1
