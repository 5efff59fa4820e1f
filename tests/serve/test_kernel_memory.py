"""Kernels of prompts need no more shared memory than GPUs have, for which they are compiled here."""

from __future__ import annotations

from typing import Any

import pytest

from weft.serve.attention.attend import A100, L40S, has_room_for_four_bits, has_room_for_tiles

pytestmark = pytest.mark.processes

SHARED = {90: 232_448, 80: A100, 89: L40S, 75: 65_536}  # bytes of a program, by the GPU's compute capability
STRIDES = dict.fromkeys(("query_stride", "table_stride", "row_stride", "page_stride", "tile_stride"), "i32")
NUMBERS = {"factor": "fp32", "scale": "fp32", **STRIDES}
CODES = dict.fromkeys(("key_code_ptr", "value_code_ptr"), "*u8")
HALVES = ("query_ptr", "key_ptr", "value_ptr", "tail_ptr", "out_ptr")


def needed(kernel: Any, constants: dict[str, object], capability: int, num_warps: int, num_stages: int) -> int:
    """The bytes of shared memory of a compiled kernel."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    pointers = {name: "*i32" for name in names if name.endswith("_ptr")}
    halves = dict.fromkeys(HALVES, "*bf16" if capability >= 80 else "*fp16")
    types = {**pointers, **halves, **CODES, **NUMBERS, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        kernel,
        {name: types[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name.endswith("_ptr")},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return int(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared)


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(("num_heads", "num_key_heads", "head_dim", "page"), [(64, 1, 128, 64), (16, 2, 256, 128)])
@pytest.mark.sampled(8)
def test_prompts_over_4_bits_fit(num_heads: int, num_key_heads: int, head_dim: int, page: int, capability: int) -> None:
    pytest.importorskip("triton")
    from weft.serve.attention.four_bit_prompt_kernel import _attend, launch_of

    shared, group = SHARED[capability], num_heads // num_key_heads
    if not has_room_for_four_bits(shared):
        assert capability == 75
        return
    launch = launch_of(page, group, shared)
    constants = {
        "PAGE": page,
        "NUM_HEADS": num_heads,
        "NUM_KEY_HEADS": num_key_heads,
        "HEAD_DIM": head_dim,
        "NUM_GROUPS": 1 if head_dim <= page else 2,
        "WINDOW": 0,
        "QUERIES": launch.queries,
        "GROUP": group,
        "WIDTH": head_dim // 2,
        "BY_PTX": True,
    }
    assert needed(_attend, constants, capability, launch.num_warps, launch.num_stages) <= shared


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(
    ("num_heads", "num_key_heads", "head_dim"), [(64, 4, 128), (8, 1, 256), (32, 8, 128), (64, 1, 128), (64, 2, 64)]
)
@pytest.mark.sampled(20)
def test_prompts_in_tiles_fit(num_heads: int, num_key_heads: int, head_dim: int, capability: int) -> None:
    pytest.importorskip("triton")
    from weft.serve.attention.prompt_attention_kernel import _NUM_STAGES, _NUM_WARPS, _TOKENS, TILE_QUERIES, _tiles

    shared = SHARED[capability]
    constants = {
        "NUM_HEADS": num_heads,
        "NUM_KEY_HEADS": num_key_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 16,
        "WINDOW": 0,
        "QUERIES": TILE_QUERIES,
        "GROUP": num_heads // num_key_heads,
        "WIDTH": head_dim,
        "TOKENS": _TOKENS,
        "NUM_RANKS": 1,
        "RANK": 0,
        "OUT_WIDTH": head_dim,
        "IS_EARLY": False,
    }
    if has_room_for_tiles(num_heads, num_key_heads, head_dim, shared):
        assert needed(_tiles, constants, capability, _NUM_WARPS, _NUM_STAGES) <= shared
    else:
        assert head_dim > 128 or num_heads // num_key_heads > 16 or capability == 75
