"""Products of codes with inputs as integers, inside Triton kernels: GPUs multiply and add four bytes at once (dp4a).

An input is an integer of 16 bits, 256 times a signed byte plus an unsigned one. The two bytes of four inputs lie in two
words: so a product with four codes is two instructions, and exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The sum of a number and 1.5 * 2^23 has its integer in its last bits.
_BYTES = tl.constexpr(
    "{ .reg .f32 a, b, c, d; .reg .b32 e, f; "
    "add.f32 a, $2, 0f4B400000; add.f32 b, $3, 0f4B400000; add.f32 c, $4, 0f4B400000; add.f32 d, $5, 0f4B400000; "
    "prmt.b32 e, a, b, 0x5140; prmt.b32 f, c, d, 0x5140; prmt.b32 $0, e, f, 0x7632; prmt.b32 $1, e, f, 0x5410; }"
)
_EIGHT = tl.constexpr("{ .reg .b32 a; dp4a.u32.s32 a, $1, $2, 0; shl.b32 a, a, 8; dp4a.u32.u32 $0, $1, $3, a; }")
_FOUR = tl.constexpr(
    "{ .reg .b32 a, b, c; and.b32 b, $2, 0x0f0f0f0f; shr.b32 c, $2, 4; and.b32 c, c, 0x0f0f0f0f; "
    "dp4a.u32.s32 a, b, $3, 0; shl.b32 a, a, 8; dp4a.u32.u32 $0, b, $4, a; "
    "dp4a.u32.s32 a, c, $5, 0; shl.b32 a, a, 8; dp4a.u32.u32 $1, c, $6, a; }"
)


@triton.jit
def bytes_of(a, b, c, d, BY_PTX: tl.constexpr):
    """Four numbers, rounded to integers of 16 bits: their high bytes in a word, and their low bytes in another."""
    if BY_PTX:
        high, low = tl.inline_asm_elementwise(
            _BYTES, "=r,=r,f,f,f,f", [a, b, c, d], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        a, b = tl.floor(a + 0.5).to(tl.int32), tl.floor(b + 0.5).to(tl.int32)
        c, d = tl.floor(c + 0.5).to(tl.int32), tl.floor(d + 0.5).to(tl.int32)
        high = ((a >> 8) & 255) | (((b >> 8) & 255) << 8) | (((c >> 8) & 255) << 16) | ((d >> 8) << 24)
        low = (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)
    return high, low


@triton.jit
def _byte_product(codes, high, low, PLACE: tl.constexpr):
    signed = (high << (24 - 8 * PLACE)) >> 24
    return ((codes >> (8 * PLACE)) & 255) * (signed * 256 + ((low >> (8 * PLACE)) & 255))


@triton.jit
def eight_products(codes, high, low, BY_PTX: tl.constexpr):
    """The sums of the products of the four bytes of words with four inputs."""
    if BY_PTX:
        total = tl.inline_asm_elementwise(_EIGHT, "=r,r,r,r", [codes, high, low], dtype=tl.int32, is_pure=True, pack=1)
    else:
        total = _byte_product(codes, high, low, 0) + _byte_product(codes, high, low, 1)
        total += _byte_product(codes, high, low, 2) + _byte_product(codes, high, low, 3)
    return total


@triton.jit
def four_products(codes, high, low, next_high, next_low, BY_PTX: tl.constexpr):
    """The same of the low halves of bytes with four inputs, and of the high halves with the next four."""
    if BY_PTX:
        first, second = tl.inline_asm_elementwise(
            _FOUR,
            "=r,=r,r,r,r,r,r",
            [codes, high, low, next_high, next_low],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        first = eight_products(codes & 0x0F0F0F0F, high, low, BY_PTX)
        second = eight_products((codes >> 4) & 0x0F0F0F0F, next_high, next_low, BY_PTX)
    return first, second
