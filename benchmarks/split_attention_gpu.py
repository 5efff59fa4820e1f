"""Measures attention over pages that two ranks hold together, on one GPU: one rank's work against that of all pages.

    python benchmarks/split_attention_gpu.py          the heads of an 8B Llama; a minute on a GPU
    python benchmarks/split_attention_gpu.py --tiny   tiny sizes, to try the benchmark itself, also on a CPU

One layer: a decode of one request, and a chunk of 2,048 tokens at the end of a prompt, by number of tokens in the
cache. A rank attends to its own half of the pages and gives log-sum-exps, then adds up both halves; the all-gather
between is left out, because ranks that share a GPU say nothing of one between GPUs. Times are medians, in
microseconds, of calls recorded as CUDA graphs. Writes benchmarks/results/split-attention-gpu.json.
"""

from __future__ import annotations

from collections.abc import Callable

import harness
import torch
from torch import Tensor

from weft.serve.attention.attend import add_up
from weft.serve.attention.batch import PagedBatch, PageShare
from weft.serve.attention.decode_attention_kernel import add_up_by_kernel
from weft.serve.attention.plain import PlainPages

PAGE, DEGREE, REPEATS = 16, 2, 15


def microseconds(function: Callable[[], Tensor], device: torch.device) -> float:
    """The median time of a call, in rows of ten, as a CUDA graph."""
    run: Callable[[], object] = function
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        run = graph.replay
    return round(1e6 * harness.call_seconds(run, device, 10, REPEATS, left_out=3), 1)


def attend(query: Tensor, pages: PlainPages, batch: PagedBatch) -> Tensor:
    """The attention of a batch, or one rank's part of it."""
    return pages.attend(query, pages.keys, pages.values, batch, None)


def row(num_queries: int, length: int, heads: tuple[int, int, int], device: torch.device) -> dict[str, float]:
    """One decode, or a chunk of a prompt, that ends at `length` tokens."""
    num_heads, num_key_heads, head_dim = heads
    dtype = torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    num_blocks = -(-length // (DEGREE * PAGE))
    keys, values = (random(num_blocks, DEGREE, PAGE, num_key_heads, head_dim) for _ in range(2))
    query = random(num_queries, num_heads, head_dim)
    tables = torch.randperm(num_blocks, generator=generator, device=device).to(torch.int32)[None]
    lengths = torch.tensor([length], dtype=torch.int32, device=device)
    decodes = int(num_queries == 1)
    prompts = ((), ()) if decodes else ((num_queries,), (length,))

    def batch(block_size: int, share: PageShare | None) -> PagedBatch:
        return PagedBatch(*[tables] * 3, tables, lengths, lengths, block_size, decodes, *prompts, share=share)

    whole = batch(DEGREE * PAGE, None)
    all_pages = PlainPages(*(one.flatten(1, 2) for one in (keys, values)))
    own, pages = [], []
    for index in range(DEGREE):
        own.append(batch(PAGE, PageShare(index, DEGREE, PAGE)))
        pages.append(PlainPages(*(one[:, index].contiguous() for one in (keys, values))))
    parts = torch.stack([attend(query, pages[i], own[i]) for i in range(DEGREE)])
    by = add_up_by_kernel if device.type == "cuda" else add_up
    expected = attend(query, all_pages, whole)
    return {
        "tokens": length,
        "queries": num_queries,
        "difference": float((by(parts, dtype) - expected).abs().max()),
        "all pages": microseconds(lambda: attend(query, all_pages, whole), device),
        "own pages": microseconds(lambda: attend(query, pages[0], own[0]), device),
        "add up": microseconds(lambda: by(parts, dtype), device),
    }


def main() -> None:
    given = harness.options(__doc__, "split-attention-gpu.json", harness.NOT_WRITTEN).parse_args()
    is_tiny = given.tiny
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    heads = (4, 2, 16) if is_tiny else (32, 8, 128)
    cases = [(1, 90), (20, 90)] if is_tiny else [(q, n) for n in (8192, 32768, 131072) for q in (1, 2048)]
    rows = []
    for num_queries, length in cases:
        rows.append(row(num_queries, length, heads, device))
        print(rows[-1], flush=True)
    if not is_tiny:
        harness.write(given.out, {"rows": rows}, device=device)


if __name__ == "__main__":
    main()
