"""Products of rows with quantised weights, by the kernel that was chosen (`fast_path.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from weft.models.attention import RMSNorm
from weft.serve.weights.fast_path import Kernel
from weft.serve.weights.plain_steps import AfterProduct
from weft.serve.weights.weight_formats import Grouped, RowFp8, WeightFormat

WITH_NORM = ("row", "token", "few rows")  # kernels that compute the RMSNorm before a product


def quantised_product(
    kernel: Kernel,
    form: WeightFormat,
    hidden: Tensor,
    parts: Sequence[Tensor],
    after: AfterProduct,
    norm: RMSNorm | None = None,
) -> Tensor:
    """Return norm(hidden) [rows, in] @ weight.T, and what follows. Only kernels WITH_NORM take a norm. The owner of a
    weight multiplies with "codes", which are arranged for a CPU.
    """
    if kernel == "dequantise":
        return after.of(form.product(hidden, parts))
    assert isinstance(form, Grouped | RowFp8), "kernels of GPUs take no others"
    if kernel == "float8":
        assert isinstance(form, RowFp8)
        return after.of(form.float8_product(hidden, parts))
    given = (hidden, *form.kernel_parts(parts), form.block(hidden.shape[-1]), after)
    if kernel == "token":
        from weft.serve.weights.packed_token_kernel import product_of_token_by_kernel

        return product_of_token_by_kernel(*given, norm)
    if kernel == "few rows":
        from weft.serve.weights.packed_row_kernel import product_of_rows_by_kernel

        return product_of_rows_by_kernel(*given, norm)
    from weft.serve.weights.packed_product_kernel import packed_product_by_kernel

    assert kernel == "tiles"
    return packed_product_by_kernel(*given)
