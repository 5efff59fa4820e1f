"""Codes of 4 bits and numbers of float8 as numbers of 16 bits, inside Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


def _unpacking(shift: int, kind: str, magic: str, one: str, minus: str) -> tl.constexpr:
    """PTX that takes four bytes and gives the codes in the bits from `shift` on, as four numbers of 16 bits.

    Codes are put into the last bits of 128 (bf16) or 1024 (fp16), which is then subtracted, two numbers at a time: GPUs
    convert integers more slowly.
    """
    given = f"shr.b32 c, $2, {shift}; and.b32 c, c, 0x0f0f0f0f; " if shift else "and.b32 c, $2, 0x0f0f0f0f; "
    return tl.constexpr(
        f"{{ .reg .b32 a, b, c, d, e; {given}mov.b32 d, {one}; mov.b32 e, {minus}; "
        f"prmt.b32 a, c, {magic}, 0x4140; prmt.b32 b, c, {magic}, 0x4342; "
        f"fma.rn.{kind} $0, a, d, e; fma.rn.{kind} $1, b, d, e; }}"
    )


_BF16 = ("bf16x2", "0x43434343", "0x3f803f80", "0xc300c300")
_FP16 = ("f16x2", "0x64646464", "0x3c003c00", "0xe400e400")
_LOW_BF16, _HIGH_BF16 = _unpacking(0, *_BF16), _unpacking(4, *_BF16)
_LOW_FP16, _HIGH_FP16 = _unpacking(0, *_FP16), _unpacking(4, *_FP16)


@triton.jit
def four_bit_numbers(codes, DTYPE: tl.constexpr, BY_PTX: tl.constexpr):
    """The codes in the low and in the high halves of bytes, as numbers of a type. Interpreters run no PTX."""
    if BY_PTX:
        if tl.bfloat16 == DTYPE:
            low = tl.inline_asm_elementwise(_LOW_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
            high = tl.inline_asm_elementwise(_HIGH_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
            low = tl.inline_asm_elementwise(_LOW_FP16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
            high = tl.inline_asm_elementwise(_HIGH_FP16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        low, high = (codes & 15).to(DTYPE), (codes >> 4).to(DTYPE)
    return low, high


# Sign, exponent and fraction of e4m3 are put where bf16 has them; the exponent is then 120 too low.
_FP8_BF16 = tl.constexpr(
    "{ .reg .b32 a, b, c, d, e; mov.b32 d, 0x7b807b80; mov.b32 e, 0x80008000; "
    "prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424; "
    "shr.b32 c, a, 4; and.b32 c, c, 0x07f007f0; and.b32 a, a, e; or.b32 a, a, c; "
    "shr.b32 c, b, 4; and.b32 c, c, 0x07f007f0; and.b32 b, b, e; or.b32 b, b, c; "
    "fma.rn.bf16x2 $0, a, d, e; fma.rn.bf16x2 $1, b, d, e; }"
)


@triton.jit
def fp8_numbers(codes, DTYPE: tl.constexpr, BY_PTX: tl.constexpr):
    """Bytes of float8 (e4m3, none of them NaN) as numbers of a type. GPUs have no fast way from float8 to bf16."""
    if BY_PTX and tl.bfloat16 == DTYPE:
        numbers = tl.inline_asm_elementwise(_FP8_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    return numbers
