"""What ranks that do not schedule do: compute their parts of steps that they are told of, and take newer weights."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from torch import nn

from weft.errors import WeftError
from weft.health.rank_status import GOING_BACK
from weft.serve.model.model_part import ModelPart


def follow_steps(part: ModelPart) -> None:
    """Compute what the scheduling rank tells, until it tells this rank to end."""
    assert part.ranks is not None
    while True:
        message = part.ranks.next_message()
        if message.kind == "stop":
            return
        if message.kind == "step":
            assert message.inputs is not None
            part.logits(message.inputs)
        elif message.kind == "text":
            assert message.inputs is not None
            part.hidden_states(message.inputs)
        elif message.kind == "score":
            assert message.inputs is not None
            part.text_logprobs(message.inputs, part.paged.vocab_size, 0)
        elif message.kind == "idle":
            part.ranks.is_watched = True  # from the first one on, which comes after the warm-up
            part.ranks.meet()
        elif message.kind == "pass":
            part.pass_by()
        elif message.kind == "order":
            assert message.order is not None
            with suppress(WeftError):  # the scheduling rank says why; the weights in use stay
                part.take_weights(read_together(part, Path(message.order["weights"])))


def read_together(part: ModelPart, checkpoint: Path) -> nn.Module:
    """Read this rank's part of a checkpoint. Raises WeftError on all ranks if it is not usable on one."""
    assert part.load is not None, "the part does not know how to read other weights"
    error: Exception | None = None
    if part.ranks is not None:
        part.ranks.mesh.ledger.phase(GOING_BACK)  # which takes long without a hang
    try:
        model = part.load(checkpoint)
        part.refuse_weights(model)
    except Exception as caught:  # whatever it is, requests go on
        error = caught
    any_fails = error is not None if part.ranks is None else part.ranks.who_fails(error is not None)[0]
    if part.ranks is not None:
        part.ranks.mesh.ledger.phase("serving")
    if error is not None:
        raise WeftError(f"{type(error).__name__}: {error}") from error
    if any_fails:
        raise WeftError("another rank cannot use it")
    return model
