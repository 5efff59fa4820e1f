"""Proves numerically that a module can be split: computes it whole and in parts, and compares the results.

A pair is some linears that are split by outputs (the "columns") and a later one that is split by inputs (the "row").
Each part gets its share of the columns' outputs and of the row's inputs, and the row's partial results are added. If
the sum equals the whole result, the split is correct, whatever the operations in between are. The same run shows which
other parameters are applied to a part only (their gradients are partial sums), and whether anything but the columns
uses the module's input.

The linears are replaced by random ones of low rank. This does not change the operations between them, and even the
largest model is probed in milliseconds on a CPU. Pairs with more than MAX_PROBED_WIDTH features between their linears
are probed with PROBED_WIDTH of them first.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from weft.inspection.parameter_cut import Interval

NUM_TOKENS = 4
RANK = 4  # of the random linears
MAX_PROBED_WIDTH, PROBED_WIDTH = 1 << 18, 64
ADAPTER = ("lora_A", "lora_B")  # parameters of a low-rank update [rank, in] and [out, rank] beside a linear's weight
TOLERANCE = 1e-4  # some modules compute in float32 for any input; the error of a wrong split is far larger
Intervals = Sequence[Interval]
_LINEAR: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # results of `_equals_linear`


@dataclass(frozen=True)
class SplitProof:
    """The result of a successful probe.

    `inner` are parameters that each part applies to its own features. `takes_only_input`: the columns take the module's
    input itself, and nothing else uses that input. `tables` are parameters with one column for each head, which are
    split as the heads are.
    """

    inner: frozenset[str]
    takes_only_input: bool
    tables: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PairShares:
    """How to split a pair into `degree` parts.

    `columns` gives the intervals of each column's outputs for the index of a part, and `row_inputs` those of the row's
    inputs. `scale` divides a module's attributes, such as its number of heads, by the degree. `tables` are parameters
    whose last dim is split into equal parts.
    """

    degree: int
    columns: Mapping[str, Callable[[int], Intervals]]
    row: str
    row_inputs: Callable[[int], Intervals]
    scale: Callable[[nn.Module, int], None] = lambda module, degree: None
    tables: frozenset[str] = frozenset()
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the module's forward, beside its input


def prove_pair(module: nn.Module, shares: PairShares) -> SplitProof | str:
    """Returns the proof that `module` can be split by `shares`, or the reason why it cannot."""
    generator = torch.Generator().manual_seed(0)
    width = linear_sizes(module.get_submodule(next(iter(shares.columns))))[0]
    value = torch.randn(2, NUM_TOKENS, width, dtype=torch.float64, generator=generator).requires_grad_()
    try:
        whole = random_copy(module, generator)
        expected = _first_tensor(whole(value, **shares.arguments))
        return _compare_parts(whole, shares, value, expected.detach())
    except Exception as error:  # anything that the user's code may raise
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0] if text else 'no message'}"


def is_feature_wise(module: nn.Module) -> bool:
    """Can the two halves of the features be computed independently of each other?"""
    generator = torch.Generator().manual_seed(0)
    widths = {parameter.shape[-1] for parameter in module.parameters() if parameter.dim()}
    if len(widths) != 1 or (width := widths.pop()) % 2:
        return False
    value = torch.randn(2, 4, width, dtype=torch.float64, generator=generator)
    halves = []
    try:
        whole = random_copy(module, generator)
        with torch.no_grad():
            for index in range(2):
                half = copy.deepcopy(whole)
                for owner in half.modules():
                    for leaf, parameter in owner._parameters.items():
                        if parameter is not None and parameter.dim():
                            owner._parameters[leaf] = nn.Parameter(parameter.chunk(2, -1)[index])
                halves.append(half(value.chunk(2, -1)[index]))
            return _equal(torch.cat(halves, -1), whole(value))
    except Exception:  # anything that the user's code may raise
        return False


def is_token_wise(module: nn.Module) -> bool:
    """Does a module with parameters compute each token of [batch, token, features] independently of the others?"""
    generator = torch.Generator().manual_seed(0)
    try:
        whole = random_copy(module, generator)
        value = torch.randn(2, 4, next(whole.parameters()).shape[-1], dtype=torch.float64, generator=generator)
        with torch.no_grad():
            return _equal(torch.cat([whole(half) for half in value.chunk(2, 1)], 1), whole(value))
    except Exception:  # anything that the user's code may raise
        return False


def mixes_tokens(module: nn.Module, width: int, arguments: Mapping[str, Any]) -> bool:
    """Does a token of [batch, token, width] change the results of others? False, too, if the module cannot be tried."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(2, NUM_TOKENS, width, dtype=torch.float64, generator=generator)
    other = value.clone()
    other[:, 1] = torch.randn(2, width, dtype=torch.float64, generator=generator)
    try:
        whole = random_copy(module, generator)
        with torch.no_grad():
            before, after = (_first_tensor(whole(one, **arguments)) for one in (value, other))
        alone = [token for token in range(NUM_TOKENS) if token != 1]
        return before.shape[:2] == value.shape[:2] and not _equal(after[:, alone], before[:, alone])
    except Exception:  # anything that the user's code may raise
        return False


def random_copy(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Returns a float64 copy on the CPU with random parameters, and with linears replaced by random low-rank ones.

    The module may be on any device, also on meta.
    """
    low_rank: dict[int, Any] = {
        id(inner): _LowRankLinear(*linear_sizes(inner), getattr(inner, "bias", None) is not None)
        for inner in module.modules()
        if is_linear(inner)
    }
    made: nn.Module = copy.deepcopy(module, low_rank)
    for owner in made.modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is not None:
                value = torch.rand(parameter.shape, dtype=torch.float64, generator=generator)
                is_matrix = isinstance(owner, _LowRankLinear)
                value = (value - 0.5) * 4 * parameter.shape[0] ** -0.5 if is_matrix else value + 0.1
                owner._parameters[leaf] = nn.Parameter(value)
        for leaf, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[leaf] = torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer.cpu()
    return made.double().eval()


def narrowed(module: nn.Module, columns: Mapping[nn.Module, int], row: nn.Module) -> nn.Module:
    """Returns a copy of a module with PROBED_WIDTH features between the columns and the row of a pair.

    `columns` has the number of parts of each column; each part has PROBED_WIDTH features.
    """
    others: dict[int, Any] = {
        id(column): _meta_linear(linear_sizes(column)[0], PROBED_WIDTH * count, column)
        for column, count in columns.items()
    }
    others[id(row)] = _meta_linear(PROBED_WIDTH, linear_sizes(row)[1], row)
    made: nn.Module = copy.deepcopy(module, others)
    return made


def _meta_linear(in_features: int, out_features: int, like: nn.Module) -> nn.Linear:
    return nn.Linear(in_features, out_features, getattr(like, "bias", None) is not None, device="meta")


def is_linear(module: nn.Module) -> bool:
    """Is the module an nn.Linear, or transformers' Conv1D? A subclass must compute what nn.Linear does.

    One with a low-rank update (`models/tuning.py`) does: the update is a linear, too.
    """
    if has_adapter(module):
        return True
    if set(module._parameters) != {"weight", "bias"}:
        return False  # such as one under weight_norm, whose weight is computed
    return type(module) is nn.Linear or has_transposed_weight(module) or _computes_linear(module)


def has_adapter(module: nn.Module) -> bool:
    """Is the module a linear with a low-rank update?"""
    return isinstance(module, nn.Linear) and set(module._parameters) == {"weight", "bias", *ADAPTER}


def _computes_linear(module: nn.Module) -> bool:
    """Does a subclass of nn.Linear compute a linear? It is tried with a small random weight and bias."""
    if not isinstance(module, nn.Linear) or module._modules or module._buffers:
        return False
    if module not in _LINEAR:
        with _disable_current_modes():  # a profile may be counting, on fake tensors
            _LINEAR[module] = _equals_linear(module)
    return _LINEAR[module]


def _equals_linear(module: nn.Linear) -> bool:
    generator = torch.Generator().manual_seed(0)
    small = copy.copy(module)
    weight = torch.randn(3, 5, dtype=torch.float64, generator=generator)
    bias = None if module.bias is None else torch.randn(3, dtype=torch.float64, generator=generator)
    own = nn.Parameter(weight.clone())
    small._parameters = {"weight": own, "bias": None if bias is None else nn.Parameter(bias.clone())}
    small._forward_hooks, small._forward_pre_hooks = OrderedDict(), OrderedDict()
    value = torch.randn(2, 4, 5, dtype=torch.float64, generator=generator)
    try:
        with torch.no_grad():
            result = small(value)  # which may also change its weight
            return _equal(result, torch.nn.functional.linear(value, weight, bias)) and torch.equal(own, weight)
    except Exception:  # anything that the user's code may raise: it is not taken for a linear
        return False


def has_transposed_weight(module: nn.Module) -> bool:
    """Is a linear's weight [in, out], as in transformers' Conv1D?"""
    return type(module).__name__ == "Conv1D"


def is_convolution(module: nn.Module) -> bool:
    """Can the channels be split? True for a plain convolution with groups = 1 and a weight of its own."""
    is_plain = type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and "weight" in module._parameters
    return is_plain and getattr(module, "groups", None) == 1


def num_spatial_dims(module: Any) -> int:
    """Returns the number of dims after the channels in the input: 1 to 3 for a convolution, 0 for a linear."""
    return len(module.kernel_size) if is_convolution(module) else 0


def linear_sizes(module: nn.Module) -> tuple[int, int]:
    """Returns the input and output features of a linear, or channels of a convolution."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return (weight.shape[0], weight.shape[1]) if has_transposed_weight(module) else (weight.shape[1], weight.shape[0])


class _LowRankLinear(nn.Module):
    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.down = nn.Parameter(torch.empty(in_features, RANK))
        self.up = nn.Parameter(torch.empty(RANK, out_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, input: Tensor) -> Tensor:  # the name that nn.Linear's argument has
        out = input @ self.down @ self.up
        return out if self.bias is None else out + self.bias

    def keep_outputs(self, intervals: Intervals) -> None:
        self.up = nn.Parameter(_take(self.up, intervals))
        self.bias = None if self.bias is None else nn.Parameter(_take(self.bias, intervals))
        self.out_features = self.up.shape[1]

    def keep_inputs(self, intervals: Intervals, with_bias: bool) -> None:
        self.down = nn.Parameter(_take(self.down.t(), intervals).t())
        if self.bias is not None and not with_bias:
            self.bias = nn.Parameter(torch.zeros_like(self.bias))
        self.in_features = self.down.shape[0]


class _ModulePart:
    """One part of a module. Autograd's graph is cut before its columns and after its row."""

    def __init__(self, whole: nn.Module, shares: PairShares, index: int) -> None:
        self.module, self.arguments = copy.deepcopy(whole), shares.arguments
        self.column_inputs: list[Tensor] = []
        self.row_outputs: list[Tensor] = []
        self.others = torch.zeros(())  # the sum of the row's results of the other parts
        for name, intervals in shares.columns.items():
            column = self.module.get_submodule(name)
            assert isinstance(column, _LowRankLinear)
            column.keep_outputs(intervals(index))
            column.register_forward_pre_hook(self._before_column, with_kwargs=True)
        row = self.module.get_submodule(shares.row)
        assert isinstance(row, _LowRankLinear)
        row.keep_inputs(shares.row_inputs(index), with_bias=index == 0)
        row.register_forward_hook(self._after_row)
        shares.scale(self.module, shares.degree)
        for name in shares.tables:
            owner, _, leaf = name.rpartition(".")
            table = self.module.get_parameter(name)
            part = nn.Parameter(table.detach().chunk(shares.degree, -1)[index])
            self.module.get_submodule(owner)._parameters[leaf] = part
        inside = (*shares.columns, shares.row)
        self.parameters = {n: p for n, p in self.module.named_parameters() if _owner(n) not in inside}

    def _before_column(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        given = args[0] if args else kwargs["input"]
        self.column_inputs.append(given)
        return (given.detach(),), {}

    def _after_row(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        self.row_outputs.append(output)
        return (output + self.others).detach()

    def reached_from(self, tensors: Sequence[Tensor]) -> set[str]:
        """Returns the names of parameters (and "" for the input) that a gradient of these tensors reaches.

        It follows the graph without running it: where torch sees GPUs, a process that has run a backward cannot fork
        ranks.
        """
        names = {id(self.value): "", **{id(parameter): name for name, parameter in self.parameters.items()}}
        found = {names[id(tensor)] for tensor in tensors if tensor.grad_fn is None and id(tensor) in names}
        waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) in names:
                found.add(names[id(leaf)])
            following = {node for node, _ in node.next_functions if node is not None} - seen
            seen |= following
            waiting += following
        return found

    def run(self, value: Tensor) -> Tensor:
        self.value = value
        return _first_tensor(self.module(value, **self.arguments))


def _compare_parts(whole: nn.Module, shares: PairShares, value: Tensor, expected: Tensor) -> SplitProof | str:
    parts = [_ModulePart(whole, shares, index) for index in range(shares.degree)]
    first, *others = parts
    for part in others:
        part.run(value)
    first.others = sum((output.detach() for part in others for output in part.row_outputs), torch.zeros(()))
    found = first.run(value)
    if any(len(part.row_outputs) != 1 or len(part.column_inputs) != len(shares.columns) for part in parts):
        return f"its forward does not call {', '.join(shares.columns)} and {shares.row} once each"
    if not _equal(found, expected):
        return f"the parts of {', '.join(shares.columns)} and {shares.row} do not add up to the whole result"
    inside, outside = first.reached_from(first.row_outputs), first.reached_from([found])
    before = first.reached_from(first.column_inputs)
    if "" in inside:
        return f"its input is used between {', '.join(shares.columns)} and {shares.row}, beside going into them"
    if linears := [
        name for name in map(_owner, inside) if isinstance(first.module.get_submodule(name), _LowRankLinear)
    ]:
        return f"'{linears[0]}' works between {', '.join(shares.columns)} and {shares.row}"
    if both := sorted(inside & (outside | before)):
        return f"its parameter '{both[0]}' is used both inside the split and outside"
    takes_only_input = "" not in outside and all(column_input is value for column_input in first.column_inputs)
    if outer := sorted(shares.tables - inside):
        return f"its parameter '{outer[0]}' does not work between {', '.join(shares.columns)} and {shares.row}"
    return SplitProof(frozenset(inside) - shares.tables, takes_only_input, shares.tables)


def _equal(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    return float((found - expected).detach().abs().max()) <= TOLERANCE * float(expected.abs().max())


def _owner(parameter_name: str) -> str:
    return parameter_name.rpartition(".")[0]


def _take(value: Tensor, intervals: Intervals) -> Tensor:
    return torch.cat([value[..., begin:end] for begin, end in intervals], -1).detach()


def _first_tensor(output: Any) -> Tensor:
    found = next(_tensors(output), None)
    if found is None:
        raise TypeError(f"it returned {type(output).__name__} and no tensor")
    return found


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _tensors(item)
