"""Steps that Triton kernels of the server share.

Early launch (programmatic dependent launch, on NVIDIA GPUs from Hopper on): a small kernel takes a few microseconds to
start and to end, in which the memory is idle. A kernel that is launched early does what needs no results of others,
such as reading its weights, and then calls `wait_for_results`. After that, everything that kernels before it wrote can
be read. All kernels of a chain must call it, so that each knows that those before the one before it are done, too.

Codes: those of 4 bits and numbers of float8 become numbers of 16 or 32 bits, or are multiplied as integers, four bytes
at once (dp4a). An input is then an integer of 16 bits, 256 times a signed byte plus an unsigned one. The two bytes of
four inputs lie in two words: so a product with four codes is two instructions, and exact. Interpreters run no PTX.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_results(IS_EARLY: tl.constexpr):
    """Let the next kernel start, and wait until the kernels before this one are done."""
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()


def early_launch(tensor: Tensor) -> dict[str, bool]:
    """Return arguments for a kernel that has IS_EARLY: it is launched early if the device can."""
    is_early = tensor.is_cuda and _can_launch_early(tensor.device)
    return {"IS_EARLY": True, "launch_pdl": True} if is_early else {"IS_EARLY": False}


@cache
def _can_launch_early(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def _unpacking(shift: int, kind: str, magic: str, one: str, minus: str) -> tl.constexpr:
    """Return PTX that makes of four bytes the codes in the bits from `shift` on, as four numbers of 16 bits.

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
def _bf16_of(codes, PTX: tl.constexpr):
    """Return what PTX makes of four codes at a time, as bf16."""
    return tl.inline_asm_elementwise(PTX, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def _fp16_of(codes, PTX: tl.constexpr):
    """Return what PTX makes of four codes at a time, as fp16."""
    return tl.inline_asm_elementwise(PTX, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def four_bit_numbers(codes, DTYPE: tl.constexpr, BY_PTX: tl.constexpr):
    """Return the codes in the low and in the high halves of bytes, as numbers of a type. Interpreters run no PTX."""
    if BY_PTX:
        if tl.bfloat16 == DTYPE:
            low = _bf16_of(codes, _LOW_BF16)
            high = _bf16_of(codes, _HIGH_BF16)
        else:
            low = _fp16_of(codes, _LOW_FP16)
            high = _fp16_of(codes, _HIGH_FP16)
    else:
        low, high = (codes & 15).to(DTYPE), (codes >> 4).to(DTYPE)
    return low, high


def _raising(shift: int, magic: str) -> tl.constexpr:
    """Return PTX that makes of four bytes the codes in the bits from `shift` on, plus 128 (bf16) or 1024 (fp16)."""
    given = f"shr.b32 c, $2, {shift}; and.b32 c, c, 0x0f0f0f0f; " if shift else "and.b32 c, $2, 0x0f0f0f0f; "
    return tl.constexpr(f"{{ .reg .b32 c; {given}prmt.b32 $0, c, {magic}, 0x4140; prmt.b32 $1, c, {magic}, 0x4342; }}")


_LOW_RAISED_BF16, _HIGH_RAISED_BF16 = _raising(0, "0x43434343"), _raising(4, "0x43434343")
_LOW_RAISED_FP16, _HIGH_RAISED_FP16 = _raising(0, "0x64646464"), _raising(4, "0x64646464")
_ONES_BF16 = tl.constexpr("{ .reg .b32 a; mov.b32 a, $2; mov.b32 $0, 0x3f803f80; mov.b32 $1, 0x3f803f80; }")
_ONES_FP16 = tl.constexpr("{ .reg .b32 a; mov.b32 a, $2; mov.b32 $0, 0x3c003c00; mov.b32 $1, 0x3c003c00; }")


@triton.jit
def raised_four_bit_numbers(codes, DTYPE: tl.constexpr, BY_PTX: tl.constexpr):
    """Return the codes in the low and in the high halves of bytes, each plus the same number, and that number.

    So the number is not subtracted from each code: a product with inputs has it as a factor of the inputs' sum.
    """
    if BY_PTX:
        if tl.bfloat16 == DTYPE:
            low = _bf16_of(codes, _LOW_RAISED_BF16)
            high = _bf16_of(codes, _HIGH_RAISED_BF16)
            raised = 128.0
        else:
            low = _fp16_of(codes, _LOW_RAISED_FP16)
            high = _fp16_of(codes, _HIGH_RAISED_FP16)
            raised = 1024.0
    else:
        low, high, raised = (codes & 15).to(DTYPE), (codes >> 4).to(DTYPE), 0.0
    return low, high, raised


@triton.jit
def ones_like(codes, DTYPE: tl.constexpr, BY_PTX: tl.constexpr):
    """Return 1 for each code. A product with them gives sums of inputs; made from codes, they lie in registers as codes
    do.
    """
    if BY_PTX:
        ones = _bf16_of(codes, _ONES_BF16) if tl.bfloat16 == DTYPE else _fp16_of(codes, _ONES_FP16)
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
    """Return bytes of float8 (e4m3, none of them NaN) as numbers of a type. GPUs have no fast way from float8
    to bf16.
    """
    if BY_PTX and tl.bfloat16 == DTYPE:
        numbers = _bf16_of(codes, _FP8_BF16)
    else:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    return numbers


@triton.jit
def small_fp8_numbers(codes, DTYPE: tl.constexpr, BY_PTX: tl.constexpr):
    """Return bytes of float8 as numbers times a power of two, and the root of its inverse, by which inputs and results
    of a product are to be multiplied. So not each number is multiplied.
    """
    if BY_PTX and tl.bfloat16 == DTYPE:
        root = 2.0**60
        numbers = _bf16_of(codes, _SMALL_FP8_BF16)
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
    """Return the float8 in a byte of words."""
    return ((words >> (8 * PLACE)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def wide_fp8(words, BY_PTX: tl.constexpr):
    """Return the four float8 of words as numbers of 32 bits."""
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
def halves(both):
    """Return the scale and the zero point (float16) in the low 32 bits of integers."""
    scale = (both & 65535).to(tl.uint16).to(tl.float16, bitcast=True)
    return scale, ((both >> 16) & 65535).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def two_ranges(both, BY_PTX: tl.constexpr):
    """Return the scale and the zero point in the low 32 bits of integers, as float32."""
    if BY_PTX:
        scale, zero_point = tl.inline_asm_elementwise(
            _TWO_RANGES, "=f,=f,r", [both.to(tl.int32)], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
        )
    else:
        scale, zero_point = halves(both)
        scale, zero_point = scale.to(tl.float32), zero_point.to(tl.float32)
    return scale, zero_point


# The sum of a number and 1.5 * 2^23 has its integer in its last bits.
_BYTES = tl.constexpr(
    "{ .reg .f32 a, b, c, d, m; .reg .b32 e, f; mov.f32 m, 0f4B400000; "
    "fma.rn.f32 a, $2, $6, m; fma.rn.f32 b, $3, $6, m; fma.rn.f32 c, $4, $6, m; fma.rn.f32 d, $5, $6, m; "
    "prmt.b32 e, a, b, 0x5140; prmt.b32 f, c, d, 0x5140; prmt.b32 $0, e, f, 0x7632; prmt.b32 $1, e, f, 0x5410; }"
)
_EIGHT = tl.constexpr("dp4a.u32.s32 $0, $2, $3, 0; dp4a.u32.u32 $1, $2, $4, 0;")


@triton.jit
def bytes_of(a, b, c, d, factor, BY_PTX: tl.constexpr):
    """Four numbers times a factor, rounded to 16 bits: their high bytes in a word, and their low bytes in another."""
    if BY_PTX:
        high, low = tl.inline_asm_elementwise(
            _BYTES, "=r,=r,f,f,f,f,f", [a, b, c, d, factor], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        a, b = tl.floor(a * factor + 0.5).to(tl.int32), tl.floor(b * factor + 0.5).to(tl.int32)
        c, d = tl.floor(c * factor + 0.5).to(tl.int32), tl.floor(d * factor + 0.5).to(tl.int32)
        high = ((a >> 8) & 255) | (((b >> 8) & 255) << 8) | (((c >> 8) & 255) << 16) | ((d >> 8) << 24)
        low = (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)
    return high, low


@triton.jit
def _of_bytes(codes, inputs, SHIFT: tl.constexpr):
    """Return the products of the four bytes of codes with those of inputs. Those of inputs are signed if SHIFT
    is 24.
    """
    total = codes * 0
    for place in tl.static_range(4):
        byte = (inputs << (24 - 8 * place)) >> 24
        total += ((codes >> (8 * place)) & 255) * (byte if SHIFT == 24 else byte & 255)
    return total


@triton.jit
def products(codes, high, low, UNITS: tl.constexpr, UNIT: tl.constexpr, BY_PTX: tl.constexpr):
    """Return the sums of the products of the four bytes of words with four inputs, over all words of a unit."""
    if BY_PTX:
        of_high, of_low = tl.inline_asm_elementwise(
            _EIGHT, "=r,=r,r,r,r", [codes, high, low], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        of_high, of_low = _of_bytes(codes, high, 24), _of_bytes(codes, low, 0)
    of_high = tl.sum(tl.reshape(of_high, [UNITS, UNIT]), 1)
    return (of_high * 256 + tl.sum(tl.reshape(of_low, [UNITS, UNIT]), 1)).to(tl.float32)
