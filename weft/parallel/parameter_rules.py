"""What flat buffers ask of a model's parameters: real floating-point numbers, dense gradients, and no hooks on these.

A rank holds pieces of flat buffers, also if it is the only one (mixed precision, state on the host), and their
gradients are sums over ranks. A hook that the user registered on a parameter would see the gradient of one rank's
samples, or nothing.
"""

from __future__ import annotations

from torch import nn

from weft.plan import Plan
from weft.profiling import Profile
from weft.sharding.layout import needs_units
from weft.sharding.units import PARALLEL_ALREADY, units_of


def refuse_parameters(profile: Profile, plan: Plan) -> str | None:
    """Returns why a model's parameters cannot be held in flat buffers; None if they can."""
    if not needs_units(plan) or profile.model is None:
        return None
    if units_of(profile.model) is not None:
        return PARALLEL_ALREADY
    for name, module in profile.model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            return (
                f"the embedding '{name}' has sparse gradients (sparse = True), and this plan holds gradients in dense "
                f"buffers; use sparse = False"
            )
    for name, parameter in profile.model.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        if parameter.is_complex():
            return (
                f"parameter '{name}' is of {dtype}, and weft holds real numbers; let the parameter be "
                f"torch.view_as_real of it, and use torch.view_as_complex in forward"
            )
        if not parameter.is_floating_point():
            return (
                f"parameter '{name}' is of {dtype}, and this plan holds parameters in buffers of floating-point "
                f"numbers; register it as a buffer (register_buffer)"
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return (
                f"parameter '{name}' has a hook on its gradient (register_hook), which weft would not call: with this "
                f"plan ranks hold pieces of buffers, and sums of their gradients; scale or change gradients inside of "
                f"the model (an autograd.Function, or a hook on a result), or between backward and the optimizer's step"
            )
    return None
