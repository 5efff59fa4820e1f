"""The attention interface of transformers: its models call the function that their config names.

`watch_attention` sees these calls while a model is profiled. `use_attention` lets another function than torch's compute
them, one that is causal and gets the part of a sequence that a rank holds. transformers is not needed here: a model can
only use the interface if it has been imported.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import PlanError
from weft.inspection.annotations import Annotation
from weft.inspection.split_probe import is_convolution

# Computes [batch, heads, sequence, head_dim] of query, key and value, the scale of scores and the sliding window.
Attend = Callable[[Tensor, Tensor, Tensor, float | None, int | None], Tensor]
Watch = Callable[[nn.Module, Tensor, Tensor, Tensor], None]

SDPA, OWN = "sdpa", "weft"  # names of implementations: torch's, and the one of `use_attention`
POSITIONS = "position_ids"
_IMAGES = "pixel_values"
# Layers whose tokens are independent of others but for attention.
_PLAIN_LAYERS = ("full_attention", "sliding_attention")
_LENGTH_DEPENDENT_ROTATIONS = ("dynamic", "longrope")
# Arguments of an attention call that do not change the result of torch's attention: windows come with the mask. Others
# must be None or False.
_WITHOUT_EFFECT = ("sliding_window", "position_ids", "cache_position", "position_embeddings", "use_cache")
_ATTEND = Annotation[Attend]("attend")


def interface_models(model: nn.Module) -> list[nn.Module]:
    """Returns the outermost models of transformers in a model: mostly the model itself, or none."""
    if "transformers" not in sys.modules:
        return []
    from transformers.modeling_utils import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return [model]
    return [found for child in model.children() for found in interface_models(child)]


def refuse_interface(model: nn.Module) -> str | None:
    """Returns why the attention of a model of transformers cannot be replaced by `use_attention`; None if it can.

    What only the calls tell (masks, dropout) is refused when they are made.
    """
    config: Any = model.config
    kind = type(model).__name__
    if model.main_input_name == _IMAGES:
        return f"{kind} is given images ({_IMAGES}), which are no sequence of tokens"
    if not model._can_set_attn_implementation():  # type: ignore[operator]
        return f"{kind} computes attention in its own code, and not by transformers' attention interface"
    mixer = next((name for name in getattr(config, "layer_types", None) or () if name not in _PLAIN_LAYERS), None)
    if mixer is not None:
        return f"{kind} has layers of the type '{mixer}', which mix tokens and are not attention"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return f"the scores of {kind} have a soft cap (attn_logit_softcapping = {config.attn_logit_softcapping})"
    if config._attn_implementation != SDPA:
        return f"{kind} uses attn_implementation = '{config._attn_implementation}', and only '{SDPA}' can be replaced"
    if POSITIONS not in inspect.signature(model.forward).parameters:
        return f"the forward of {kind} takes no {POSITIONS}, by which it could be told which tokens a rank has"
    open_ended = next((name for name, one in model.named_modules() if getattr(one, "is_causal", None) is False), None)
    if open_ended is not None:
        return f"the attention of '{open_ended}' is not causal: tokens see later ones"
    convolution = next((name for name, module in model.named_modules() if is_convolution(module)), None)
    if convolution is not None:
        return f"'{convolution}' of {kind} is a convolution, which may mix tokens"
    rotation = next((one for one in _rotations(config) if one in _LENGTH_DEPENDENT_ROTATIONS), None)
    if rotation is not None:
        return f"the rotary frequencies of {kind} (rope_type = '{rotation}') depend on the positions of all tokens"
    return None


def _rotations(config: Any) -> Iterator[str]:
    """Yields the types of a config's rotary embeddings, which may differ between types of layers."""
    pending = [getattr(config, "rope_parameters", None)]
    while pending:
        found = pending.pop()
        if isinstance(found, Mapping):
            pending += found.values()
            yield from [found["rope_type"]] if isinstance(found.get("rope_type"), str) else []


@contextmanager
def watch_attention(saw: Watch) -> Iterator[None]:
    """Inside the context, `saw(module, query, key, value)` is called before each call of torch's attention."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    compute = ALL_ATTENTION_FUNCTIONS[SDPA]

    def watched(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        saw(module, query, key, value)
        return compute(module, query, key, value, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[SDPA] = watched
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[SDPA]
        if ALL_ATTENTION_FUNCTIONS[SDPA] is not compute:  # a user's, set in the same way
            ALL_ATTENTION_FUNCTIONS[SDPA] = compute


def use_attention(model: nn.Module, attend: Attend) -> None:
    """Compute the attention of a model of transformers by `attend`. Other models with the same config keep theirs."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(OWN, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(OWN, _mask)
    copies: dict[int, Any] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            own: Any = copies.get(id(config)) or copies.setdefault(id(config), copy.deepcopy(config))
            own._attn_implementation = OWN
            module.config = own
            _ATTEND.set(module, attend)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function of the interface: [batch, heads, sequence, head_dim] to [batch, sequence, heads, ...]."""
    attend = _ATTEND.get(module)

    def refused(why: str) -> PlanError:
        layer = getattr(module, "layer_idx", None)
        where = "" if layer is None else f" of layer {layer}"
        return PlanError(f"{type(module).__name__}{where} {why}; change that, or use context = 1")

    if attend is None:
        raise refused("has no config of its own, by which weft could find it")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise refused("is not causal: tokens see later ones")
    if key.shape[2] != query.shape[2]:
        raise refused(
            f"has {query.shape[2]} queries and {key.shape[2]} keys, and not those of one sequence; if it keeps keys "
            f"in a cache, set use_cache = False"
        )
    if dropout:
        raise refused(f"drops attention weights (dropout {dropout:g}), which has to be 0")
    for name, given in others.items():
        if name not in _WITHOUT_EFFECT and given is not None and given is not False:
            raise refused(f"is called with {name}, which weft does not know")
    window = None
    if attention_mask is not None:
        if attention_mask.dim() != 4 or attention_mask.shape[0]:
            raise refused("is given a mask that weft did not make")
        window = attention_mask.shape[1]
    out = attend(query, key, value, scaling, window)
    return out.transpose(1, 2).contiguous(), None


# --- masks: a tensor without elements, whose shape [0, window, 1, 1] states the sliding window, or None


def _mask(*, mask_function: Any, attention_mask: Tensor | None = None, device: Any = None, **_: Any) -> Tensor | None:
    """A mask function of the interface. `mask_function` is composed of functions of transformers' masking_utils."""
    if attention_mask is not None and not attention_mask.all():  # some models make one themselves, of ones
        raise PlanError(
            "the model masks tokens of its own, and weft splits only sequences without padding; use context = 1"
        )
    window = None
    for name, values in _parts(mask_function):
        if name == "sliding_window_overlay":
            window = int(values["sliding_window"])
        elif name == "bidirectional_mask_function":
            raise PlanError(
                "tokens of the model see later ones, and weft splits causal attention only; use context = 1"
            )
        # transformers takes a gap in the positions of a rank's tokens for the end of a document.
        elif name not in ("causal_mask_function", "packed_sequence_mask_function"):
            raise PlanError(
                f"the model masks keys by '{name}', and weft splits attention with a causal mask or a sliding window "
                f"along the sequence; use context = 1"
            )
    return None if window is None else torch.empty((0, window, 1, 1), dtype=torch.bool, device=device)


def _parts(mask_function: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the names of the functions whose conjunction a mask function is, and the values that they use."""
    if getattr(mask_function, "__module__", "") != "transformers.masking_utils":
        yield getattr(mask_function, "__qualname__", type(mask_function).__name__), {}
        return
    name, values = mask_function.__qualname__.partition(".")[0], inspect.getclosurevars(mask_function).nonlocals
    if name == "remap_positions_for_packed_sequence":  # the same mask, with positions in place of indices
        yield from _parts(values["mask_function"])
    elif name == "and_masks":
        for part in values["mask_functions"]:
            yield from _parts(part)
    else:
        yield name, values
