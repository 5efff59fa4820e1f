"""What plans ask of a model, and do to it, whatever its axes."""

from __future__ import annotations

from torch import nn

from weft.mesh import Mesh
from weft.models.loss_head import install_loss_head, is_loss_in_head
from weft.models.vision.pools import fix_average_gradients
from weft.plan import Plan
from weft.profiling import Profile
from weft.sharding.layout import needs_units
from weft.sharding.units import PARALLEL_ALREADY, units_of
from weft.strategy import Strategy, Values


class LossInHead(Strategy):
    """Lets the model's head compute the loss, so that whole logits are never in memory."""

    name = "loss in head"

    def prepare(self, model: nn.Module, plan: Plan) -> None:
        if is_loss_in_head(plan):
            install_loss_head(model)


class FlatParameters(Strategy):
    """Asks of parameters what flat buffers need: real floating-point numbers, dense gradients, and no hooks on these.

    A rank holds pieces of flat buffers, also if it is the only one (mixed precision, state on the host), and their
    gradients are sums over ranks. A hook that the user registered on a parameter would see the gradient of one rank's
    samples, or nothing.
    """

    name = "flat parameters"

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        if not needs_units(plan) or profile.model is None:
            return None
        if units_of(profile.model) is not None:
            return PARALLEL_ALREADY
        for name, module in profile.model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                return (
                    f"the embedding '{name}' has sparse gradients (sparse = True), and this plan holds gradients in "
                    f"dense buffers; use sparse = False"
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
                    f"parameter '{name}' has a hook on its gradient (register_hook), which weft would not call: with "
                    f"this plan ranks hold pieces of buffers, and sums of their gradients; scale or change gradients "
                    f"inside of the model (an autograd.Function, or a hook on a result), or between backward and the "
                    f"optimizer's step"
                )
        return None


class AveragePools(Strategy):
    """Corrects the gradients of average pools. Tiles and statistics of the whole batch have pools of their own."""

    name = "average pools"

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        if not plan.is_viewed:
            fix_average_gradients(model)
        return model
