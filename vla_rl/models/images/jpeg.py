"""JPEG round trip for a whole batch, on any device, bit for bit as TensorFlow does it.

    RGB ─► YCbCr, chroma halved ─► 8x8 DCT ─► quantised ─► back, chroma doubled by the triangle filter ─► RGB

The training data of the public OpenVLA checkpoints were JPEG files, so their images go through JPEG
at evaluation too. TensorFlow writes with libjpeg's accurate integer transform ("islow") and by
default reads with its fast one ("ifast"), which gives other pixels than Pillow. Both, the colour
conversion and the resampling are integer arithmetic: reimplemented in torch, they give the same
bytes without a codec and without leaving the device. Entropy coding loses nothing and is left out.
Source: ITU-T T.81, and the constants of the transforms of Loeffler, Ligtenberg and Moschytz 1989
(forward) and of Arai, Agui and Nakajima 1988 (inverse).
"""

import math
from typing import Final

import torch
from torch import Tensor

from vla_rl.engines.device_lane import to_device

_CONST_BITS, _PASS1_BITS = 13, 2
_SCALE_BITS = 2
"""Fraction bits of the coefficients that the fast inverse transform takes."""

_LUMINANCE: Final = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMINANCE: Final = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *(((99,) * 8,) * 4),
)
"""Example tables of the standard, which every encoder scales by the quality."""


def jpeg_round_trip(images: Tensor, quality: int = 95) -> Tensor:
    """Encode and decode images as JPEG with 4:2:0 chroma, as TensorFlow writes and reads it.

    Args:
        images: uint8 [B, 3, H, W], RGB.
        quality: 1 to 100, in libjpeg's scale.

    Returns: uint8 [B, 3, H, W] on the same device. Raises: ValueError for another shape, dtype or
    quality.
    """
    if images.dtype is not torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(
            f"images are {images.dtype} {list(images.shape)}, expected uint8 [B, 3, H, W] (RGB)."
        )
    if not 1 <= quality <= 100:
        raise ValueError(f"quality is {quality}, expected 1 to 100.")
    height, width = images.shape[2:]
    luma, blue, red = _to_ycc(images.to(torch.int32))
    luma = _through_dct(_fill(luma, 8), _table(_LUMINANCE, quality, images.device))[
        :, :height, :width
    ]
    chroma = [_through_chroma(plane, quality) for plane in (blue, red)]
    return _to_rgb(luma, *(plane[:, :height, :width] for plane in chroma))


def _through_chroma(plane: Tensor, quality: int) -> Tensor:
    height, width = (-(-side // 2) for side in plane.shape[1:])
    wide = _fill(plane, 2, to_width=16 * -(-plane.shape[2] // 16))
    halved = _fill(_halve(wide), 8)
    restored = _through_dct(halved, _table(_CHROMINANCE, quality, plane.device))
    return _double(restored[:, :height, :width])


def _to_ycc(rgb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert int32 [B, 3, H, W] to three planes [B, H, W]; 16-bit fixed point."""
    r, g, b = rgb.unbind(1)
    half, offset = 1 << 15, 128 << 16
    luma = (19595 * r + 38470 * g + 7471 * b + half) >> 16
    blue = (-11059 * r - 21709 * g + 32768 * b + offset + half - 1) >> 16
    red = (32768 * r - 27439 * g - 5329 * b + offset + half - 1) >> 16
    return luma, blue, red


def _to_rgb(luma: Tensor, blue: Tensor, red: Tensor) -> Tensor:
    half, cb, cr = 1 << 15, blue - 128, red - 128
    r = luma + ((91881 * cr + half) >> 16)
    g = luma + ((-22554 * cb - 46802 * cr + half) >> 16)
    b = luma + ((116130 * cb + half) >> 16)
    return torch.stack([r, g, b], dim=1).clamp(0, 255).to(torch.uint8)


def _fill(plane: Tensor, multiple: int, to_width: int | None = None) -> Tensor:
    """Repeat the last row and column until both sides are multiples."""
    height, width = plane.shape[1:]
    right = (to_width or multiple * -(-width // multiple)) - width
    bottom = multiple * -(-height // multiple) - height
    if right:
        plane = torch.cat([plane, plane[:, :, -1:].expand(-1, -1, right)], dim=2)
    if bottom:
        plane = torch.cat([plane, plane[:, -1:].expand(-1, bottom, -1)], dim=1)
    return plane


# libjpeg alternates the rounding from column to column, so that halving adds no colour cast.
def _halve(plane: Tensor) -> Tensor:
    """Average 2x2 blocks, rounded down and up alternately from column to column."""
    sums = plane[:, 0::2, 0::2] + plane[:, 0::2, 1::2] + plane[:, 1::2, 0::2] + plane[:, 1::2, 1::2]
    bias = 1 + torch.arange(sums.shape[2], device=plane.device, dtype=torch.int32) % 2
    return (sums + bias) >> 2


def _double(plane: Tensor) -> Tensor:
    """Double the height and width: a new sample is 3/4 of the nearer and 1/4 of the farther
    neighbour, each way.
    """
    above = torch.cat([plane[:, :1], plane[:, :-1]], dim=1)
    below = torch.cat([plane[:, 1:], plane[:, -1:]], dim=1)
    rows = torch.stack([3 * plane + above, 3 * plane + below], dim=2).flatten(1, 2)
    left = torch.cat([rows[:, :, :1], rows[:, :, :-1]], dim=2)
    right = torch.cat([rows[:, :, 1:], rows[:, :, -1:]], dim=2)
    return torch.stack([(3 * rows + left + 8) >> 4, (3 * rows + right + 7) >> 4], dim=3).flatten(
        2, 3
    )


# libjpeg's scale: 50 keeps the standard's tables, and 95, TensorFlow's default, divides them by
# ten.
def _table(base: tuple[tuple[int, ...], ...], quality: int, device: torch.device) -> Tensor:
    """Return the divisors of the coefficients, int32 [8, 8]."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    table = to_device(torch.tensor(base, dtype=torch.int32), device)
    return ((table * scale + 50) // 100).clamp(1, 255)


def _through_dct(plane: Tensor, table: Tensor) -> Tensor:
    """Quantise int32 [B, 8h, 8w] in the frequency domain, block by block.

    The result is in 0..255 again.
    """
    batch, height, width = plane.shape
    blocks = (plane - 128).view(batch, height // 8, 8, width // 8, 8).transpose(2, 3)
    coefficients = _forward(_forward(blocks.unbind(-1), -1, first=True).unbind(-2), -2, first=False)
    divisor = 8 * table
    quantised = torch.sign(coefficients) * ((coefficients.abs() + divisor // 2) // divisor)
    scaled = quantised * _multipliers(table)
    rows = _inverse(_inverse(scaled.unbind(-2), -2).unbind(-1), -1) >> (_SCALE_BITS + 3)
    return (rows + 128).clamp(0, 255).transpose(2, 3).reshape(batch, height, width)


def _multipliers(table: Tensor) -> Tensor:
    """Return the fast inverse's factors for the coefficients, int32 [8, 8].

    They include its own scaling.
    """
    roots = [1.0] + [math.cos(k * math.pi / 16) * math.sqrt(2.0) for k in range(1, 8)]
    scales = [[round(row * column * (1 << 14)) for column in roots] for row in roots]
    return _descale(
        table * to_device(torch.tensor(scales, dtype=torch.int32), table.device), 14 - _SCALE_BITS
    )


def _descale(x: Tensor, bits: int) -> Tensor:
    return (x + (1 << (bits - 1))) >> bits


# TensorFlow writes with libjpeg's accurate transform and reads with its fast one, so a decoder
# such as Pillow's gives bytes that differ by up to 14.
def _forward(d: tuple[Tensor, ...], dim: int, *, first: bool) -> Tensor:
    """Run one pass of the forward transform over 8 slices.

    The first leaves 2 fraction bits for the second.
    """
    sums = [d[i] + d[7 - i] for i in range(4)]
    differences = [d[i] - d[7 - i] for i in range(4)]
    even_sum, even_difference = sums[0] + sums[3], sums[0] - sums[3]
    odd_sum, odd_difference = sums[1] + sums[2], sums[1] - sums[2]
    bits = _CONST_BITS - _PASS1_BITS if first else _CONST_BITS + _PASS1_BITS
    out = [even_sum] * 8
    if first:
        out[0], out[4] = (even_sum + odd_sum) << _PASS1_BITS, (even_sum - odd_sum) << _PASS1_BITS
    else:
        out[0], out[4] = (
            _descale(even_sum + odd_sum, _PASS1_BITS),
            _descale(even_sum - odd_sum, _PASS1_BITS),
        )
    turned = (odd_difference + even_difference) * 4433
    out[2] = _descale(turned + even_difference * 6270, bits)
    out[6] = _descale(turned - odd_difference * 15137, bits)
    d7, d6, d5, d4 = differences
    odd = _odd(d4, d5, d6, d7)
    out[7], out[5], out[3], out[1] = (_descale(x, bits) for x in odd)
    return torch.stack(out, dim=dim)


def _inverse(c: tuple[Tensor, ...], dim: int) -> Tensor:
    """Run one pass of the fast inverse transform over 8 slices of scaled coefficients."""
    plus, minus, both = c[0] + c[4], c[0] - c[4], c[2] + c[6]
    turned = _times(c[2] - c[6], 362) - both
    even = (plus + both, minus + turned, minus - turned, plus - both)
    z10, z11, z12, z13 = c[5] - c[3], c[1] + c[7], c[1] - c[7], c[5] + c[3]
    shared = _times(z10 + z12, 473)
    odd0 = z11 + z13
    odd1 = _times(z10, -669) + shared - odd0
    odd2 = _times(z11 - z13, 362) - odd1
    odd3 = -(_times(z12, 277) - shared + odd2)
    odd = (odd0, odd1, odd2, odd3)
    out = [e + o for e, o in zip(even, odd, strict=True)]
    out += [e - o for e, o in reversed(list(zip(even, odd, strict=True)))]
    return torch.stack(out, dim=dim)


def _times(x: Tensor, constant: int) -> Tensor:
    """Multiply by a constant with 8 fraction bits; truncated, not rounded."""
    return (x * constant) >> 8


def _odd(x0: Tensor, x1: Tensor, x2: Tensor, x3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotate the odd coefficients."""
    shared = (x0 + x2 + x1 + x3) * 9633
    z1, z2 = (x0 + x3) * -7373, (x1 + x2) * -20995
    z3, z4 = (x0 + x2) * -16069 + shared, (x1 + x3) * -3196 + shared
    return x0 * 2446 + z1 + z3, x1 * 16819 + z2 + z4, x2 * 25172 + z2 + z3, x3 * 12299 + z1 + z4
