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


def _raising(shift: int, magic: str) -> tl.constexpr:
    """PTX that takes four bytes and gives the codes in the bits from `shift` on, plus `RAISE`."""
    given = f"shr.b32 c, $2, {shift}; and.b32 c, c, 0x0f0f0f0f; " if shift else "and.b32 c, $2, 0x0f0f0f0f; "
    return tl.constexpr(f"{{ .reg .b32 c; {given}prmt.b32 $0, c, {magic}, 0x4140; prmt.b32 $1, c, {magic}, 0x4342; }}")


_LOW_RAISED_BF16, _HIGH_RAISED_BF16 = _raising(0, "0x43434343"), _raising(4, "0x43434343")
_LOW_RAISED_FP16, _HIGH_RAISED_FP16 = _raising(0, "0x64646464"), _raising(4, "0x64646464")
_ONES_BF16 = tl.constexpr("{ .reg .b32 a; mov.b32 a, $2; mov.b32 $0, 0x3f803f80; mov.b32 $1, 0x3f803f80; }")
_ONES_FP16 = tl.constexpr("{ .reg .b32 a; mov.b32 a, $2; mov.b32 $0, 0x3c003c00; mov.b32 $1, 0x3c003c00; }")


@triton.jit
def raised_four_bit_numbers(codes, DTYPE: tl.constexpr, BY_PTX: tl.constexpr):
    """The codes in the low and in the high halves of bytes, each plus the same number, and that number.

    So the number is not subtracted from each code: a product with inputs has it as a factor of the inputs' sum.
    """
    if BY_PTX:
        if tl.bfloat16 == DTYPE:
            low = tl.inline_asm_elementwise(
                _LOW_RAISED_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
            )
            high = tl.inline_asm_elementwise(
                _HIGH_RAISED_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
            )
            raised = 128.0
        else:
            low = tl.inline_asm_elementwise(
                _LOW_RAISED_FP16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
            )
            high = tl.inline_asm_elementwise(
                _HIGH_RAISED_FP16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
            )
            raised = 1024.0
    else:
        low, high, raised = (codes & 15).to(DTYPE), (codes >> 4).to(DTYPE), 0.0
    return low, high, raised


@triton.jit
def ones_like(codes, DTYPE: tl.constexpr, BY_PTX: tl.constexpr):
    """1 for each code. A product with them gives sums of inputs; made from codes, they lie in registers as codes do."""
    if BY_PTX:
        if tl.bfloat16 == DTYPE:
            ones = tl.inline_asm_elementwise(_ONES_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
            ones = tl.inline_asm_elementwise(_ONES_FP16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        ones = (codes * 0 + 1).to(DTYPE)
    return ones


# A byte is widened by its sign; sign, exponent and fraction of e4m3 are put where bf16 has them. The exponent is then
# 120 too low.
_SMALL_FP8_BF16 = tl.constexpr(
    "{ .reg .b32 a, b; prmt.b32 a, $2, 0, 0x9180; prmt.b32 b, $2, 0, 0xb3a2; "
    "shl.b32 a, a, 4; shl.b32 b, b, 4; and.b32 $0, a, 0x87f087f0; and.b32 $1, b, 0x87f087f0; }"
)
_FP8_BF16 = tl.constexpr(
    "{ .reg .b32 a, b, d, e; mov.b32 d, 0x7b807b80; mov.b32 e, 0x80008000; "
    "prmt.b32 a, $2, 0, 0x9180; prmt.b32 b, $2, 0, 0xb3a2; "
    "shl.b32 a, a, 4; shl.b32 b, b, 4; and.b32 a, a, 0x87f087f0; and.b32 b, b, 0x87f087f0; "
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


@triton.jit
def small_fp8_numbers(codes, DTYPE: tl.constexpr, BY_PTX: tl.constexpr):
    """Bytes of float8 as numbers times a power of two, and the root of its inverse, by which inputs and results of a
    product are to be multiplied. So not each number is multiplied.
    """
    if BY_PTX and tl.bfloat16 == DTYPE:
        root = 2.0**60
        numbers = tl.inline_asm_elementwise(
            _SMALL_FP8_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        root, numbers = 1.0, codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    return numbers, root


_WIDE_FP8 = tl.constexpr(
    "{ .reg .b16 a, b, e, f, g, h; .reg .b32 c, d; mov.b32 {a, b}, $4; "
    "cvt.rn.f16x2.e4m3x2 c, a; cvt.rn.f16x2.e4m3x2 d, b; mov.b32 {e, f}, c; mov.b32 {g, h}, d; "
    "cvt.f32.f16 $0, e; cvt.f32.f16 $1, f; cvt.f32.f16 $2, g; cvt.f32.f16 $3, h; }"
)
_TWO_RANGES = tl.constexpr("{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }")


@triton.jit
def _fp8_of(words, PLACE: tl.constexpr):
    """The float8 in a byte of words."""
    return ((words >> (8 * PLACE)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def wide_fp8(words, BY_PTX: tl.constexpr):
    """The four float8 of words as numbers of 32 bits."""
    if BY_PTX:
        a, b, c, d = tl.inline_asm_elementwise(
            _WIDE_FP8,
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        a, b, c, d = _fp8_of(words, 0), _fp8_of(words, 1), _fp8_of(words, 2), _fp8_of(words, 3)
    return a, b, c, d


@triton.jit
def two_ranges(both, BY_PTX: tl.constexpr):
    """A scale and a least value, of the low 32 bits of integers."""
    if BY_PTX:
        scale, least = tl.inline_asm_elementwise(
            _TWO_RANGES, "=f,=f,r", [both.to(tl.int32)], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
        )
    else:
        scale = (both & 65535).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        least = ((both >> 16) & 65535).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, least
