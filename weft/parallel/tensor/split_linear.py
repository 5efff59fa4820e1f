"""Forwards that replace those of a linear split over x and y, and of a module whose columns share one input.

Each replaced forward is a method of its own object, and uses no module names when it runs. So torch.compile compiles
one block and uses the result for all equal blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from weft.comm import Axis
from weft.errors import PlanError
from weft.inspection.rng import INNER, PART, WHOLE, ScopedRng
from weft.inspection.split_probe import has_adapter, linear_sizes
from weft.inspection.tensor_splits import Split
from weft.parallel.tensor.operations import gather, leave, own_part, scatter
from weft.parallel.tensor.overlapped_matmul import SEQUENCE_DIM, StreamSplit, into_region, out_of_region
from weft.parallel.tensor.sequence_stream import SequenceSplitter


class SplitLinear:
    """A linear that is split over x and y. It has one forward for each kind of `Split`, named by the kind.

    Their argument is named `input`, as that of nn.Linear: a model may pass it by name.
    """

    def __init__(
        self,
        module: Any,
        split: Split,
        x: Axis,
        y: Axis,
        stream: StreamSplit | None,
        chain: SequenceSplitter,
        rng: ScopedRng | None,
        is_whole: bool,
    ) -> None:
        """`stream` is given if the linear's input (or a row's result) is split along the sequence. `is_whole`: the
        residual stream has all its features on every rank of y.
        """
        self.module, self.split, self.transposed = module, split, split.transposed
        self.is_adapted = has_adapter(module)
        self.has_parent = split.parent is not None
        self.x, self.y, self.stream, self.chain, self.rng = x, y, stream, chain, rng
        self.is_whole = is_whole and y.degree > 1
        self.width = linear_sizes(module)[0] // (1 if self.is_whole else y.degree)  # features of a column's input
        self.given: Tensor | None = None  # the input for which `products` were computed
        self.products: Sequence[Tensor] | None = (
            None  # those of `weights`, set by `SharedInput` before the module's forward runs
        )

    def column(self, input: Tensor) -> Tensor:
        """Forward of a linear that is split by outputs and followed by a row."""
        given, products = self.given, self.products
        self.given = self.products = None
        if products is None or given is not input:
            if self.has_parent and self.stream is not None:
                raise PlanError(
                    f"'{self.split.module}' was called twice, or given something else than '{self.split.parent}' was, "
                    f"which tensor.sequence = true does not split; use false"
                )
            if self.rng is not None:
                self.rng.enter(INNER)
            products = self._enter(input)
        return self._add_bias(leave(self._add_update(products), self.y))

    def row(self, input: Tensor) -> Tensor:
        """Forward of a linear that is split by inputs; its results are summed over x."""
        if self.rng is not None:
            self.rng.enter(WHOLE if self.stream is None else PART)
        if self.stream is not None:
            out = out_of_region(input, self.module.weight, self.transposed, self.x, self.y, self.stream)
        else:
            products = into_region(input, self.weights, self.transposed, self.y)
            out = leave(self._add_update(products), self.x)
        out = self._add_bias(out)
        return gather(out, self.y, -1) if self.is_whole else out

    def gathered(self, input: Tensor) -> Tensor:
        """Forward of a linear that is split by outputs, which are gathered over x."""
        out = gather(self._add_bias(leave(self._add_update(self._enter(input)), self.y)), self.x, -1)
        return out if self.stream is None else scatter(out, self.x, SEQUENCE_DIM)

    def head(self, input: Tensor) -> Tensor:
        """Forward of the head. It is split by outputs (the classes), which stay split."""
        if self.stream is not None:
            self.chain.check_input(input, f"'{self.split.module}'")
        return self._add_bias(leave(self._add_update(self._enter(input)), self.y))

    def _enter(self, value: Tensor) -> Sequence[Tensor]:
        return into_region(self.own(value), self.weights, self.transposed, self.x, self.stream)

    @property
    def weights(self) -> list[Tensor]:
        """The weight and, if the linear has a low-rank update, its A: both are multiplied with the input."""
        return [self.module.weight, self.module.lora_A] if self.is_adapted else [self.module.weight]

    def _add_update(self, products: Sequence[Tensor]) -> Tensor:
        """Returns the linear's product from those of `weights`."""
        if not self.is_adapted:
            return products[0]
        out: Tensor = self.module.add_update(*products)
        return out

    def own(self, value: Tensor) -> Tensor:
        """Returns this rank's features of an input that is whole over y; any other input unchanged."""
        return own_part(value, self.y, -1) if self.is_whole else value

    def _add_bias(self, value: Tensor) -> Tensor:
        out: Tensor = value if self.module.bias is None else value + self.module.bias
        return out


class SharedInput:
    """A module whose columns share its input, so that the input's gradient is summed over x once for all columns.

    All columns are multiplied before the module's own forward runs. When that forward calls a column with the input,
    the column uses its products. If the input is a part of the sequence, the module's forward gets a placeholder of
    the whole sequence's shape, filled with NaN.
    """

    def __init__(self, name: str, forward: Callable[..., Any], columns: Sequence[SplitLinear]) -> None:
        self.name, self.inner, self.columns = name, forward, columns

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Multiply all columns with the input, and then run the module's own forward."""
        first = self.columns[0]
        width = first.width
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        inputs = [key for key, value in given.items() if _is_hidden(value, width)]
        if not inputs or any(given[key].requires_grad for key in inputs[1:]):
            raise PlanError(
                f"'{self.name}' got {len(inputs)} tensors with {width} features, but the tensor axes split attention "
                f"to one input (self-attention) only; use tensor.x = tensor.y = 1"
            )
        if first.rng is not None:
            first.rng.enter(INNER)
        value = given[inputs[0]]
        weights = [weight for column in self.columns for weight in column.weights]
        products = into_region(first.own(value), weights, first.transposed, first.x, first.stream)
        if first.stream is not None:
            value = given[inputs[0]] = value.new_full((), float("nan")).expand(*products[0].shape[:-1], width)
        rest = iter(products)
        for column in self.columns:
            column.given, column.products = value, [next(rest) for _ in column.weights]
        del products, rest  # so that only its column refers to each product
        return self.inner(*(given[number] for number in range(len(args))), **{key: given[key] for key in kwargs})


def _is_hidden(value: Any, width: int) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1] == width
