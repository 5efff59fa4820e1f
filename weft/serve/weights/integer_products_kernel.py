"""Products of codes with inputs as integers, inside Triton kernels: GPUs multiply and add four bytes at once (dp4a).

An input is an integer of 16 bits, 256 times a signed byte plus an unsigned one. The two bytes of four inputs lie in two
words: so a product with four codes is two instructions, and exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
    """The products of the four bytes of codes with those of inputs. Those of inputs are signed if SHIFT is 24."""
    total = codes * 0
    for place in tl.static_range(4):
        byte = (inputs << (24 - 8 * place)) >> 24
        total += ((codes >> (8 * place)) & 255) * (byte if SHIFT == 24 else byte & 255)
    return total


@triton.jit
def products(codes, high, low, UNITS: tl.constexpr, UNIT: tl.constexpr, BY_PTX: tl.constexpr):
    """The sums of the products of the four bytes of words with four inputs, over all words of a unit."""
    if BY_PTX:
        of_high, of_low = tl.inline_asm_elementwise(
            _EIGHT, "=r,=r,r,r,r", [codes, high, low], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        of_high, of_low = _of_bytes(codes, high, 24), _of_bytes(codes, low, 0)
    of_high = tl.sum(tl.reshape(of_high, [UNITS, UNIT]), 1)
    return (of_high * 256 + tl.sum(tl.reshape(of_low, [UNITS, UNIT]), 1)).to(tl.float32)
