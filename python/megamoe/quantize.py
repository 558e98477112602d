# SPDX-License-Identifier: Apache-2.0
"""From weights to 4-bit codes and block scales and back, in numpy.

MXFP4: 32 consecutive k share the smallest power of two under which none exceeds 6. NVFP4: a matrix
has the global scale FP32(largest / 2688), and 16 consecutive k the scale
E4M3(largest of them / (6 * global scale)), at least 2^-9. Each weight becomes the E2M1 code nearest
to its exact quotient, ties to the even code.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ._errors import InvalidArgumentError
from ._weights import GROUP

_E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6], np.float32)
# Between codes. A tie goes to the even one, so above an odd code the bound itself belongs to it.
BOUNDS = np.array([.25, np.nextafter(.75, 0), 1.25, np.nextafter(1.75, 0), 2.5,
                    np.nextafter(3.5, 0), 5])


class Quantized(NamedTuple):
    """codes uint8 [..., n / 2], the low nibble first; scales uint8 [..., n / 32 or n / 16];
    global_scale float32 [...] without the last two dimensions (1 for MXFP4). numpy arrays, of
    `megamoe.torch.quantize` tensors."""

    codes: Any
    scales: Any
    global_scale: Any


def _e4m3(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of E4M3, ties to even, and what they stand for; values in its positive range."""
    exponent = np.maximum(np.frexp(values)[1] - 1, -6)
    mantissa = np.rint(np.ldexp(values, 3 - exponent)).astype(np.int32)
    # Eighths beyond the first carry into the exponent's field; a subnormal's has none.
    return (((exponent + 6) << 3) + mantissa).astype(np.uint8), np.ldexp(
        mantissa.astype(np.float64), exponent - 3)


def quantize(weight: Any, format: str) -> Quantized:
    """weight: float32 [..., out, in] (whatever numpy makes of it), in a multiple of the block.

    format: "mxfp4" or "nvfp4". Each [out, in] matrix has a global scale of its own.
    """
    if format not in GROUP:
        raise InvalidArgumentError(f"format={format!r}; expected one of {', '.join(GROUP)}")
    block = GROUP[format]
    weight = np.ascontiguousarray(weight, np.float32)
    if weight.ndim < 2 or weight.shape[-1] % block or weight.shape[-1] == 0:
        raise InvalidArgumentError(f"weight: shape {list(weight.shape)}; expected [..., out, in] "
                                   f"with `in` a multiple of {block}")
    groups = weight.reshape(*weight.shape[:-1], -1, block)
    largest = np.abs(groups).max(axis=-1)
    if not np.isfinite(largest).all():
        raise InvalidArgumentError("weight: NaN or infinity; expected finite values")
    # Quotients in double: they have 53 bits, and none that is no tie comes nearer to one than 2^-34.
    if format == "mxfp4":
        global_scale = np.ones(weight.shape[:-2], np.float32)
        fraction, exponent = np.frexp(largest)
        exponent = np.where(largest > 0, exponent - np.where(fraction > .75, 2, 3), 0)
        exponent = np.clip(exponent, -127, 127)
        scales = (exponent + 127).astype(np.uint8)
        scale = np.ldexp(1.0, exponent)
    else:
        top = largest.max(axis=(-2, -1)).astype(np.float64)
        global_scale = np.where(top > 0, np.maximum((top / 2688).astype(np.float32),
                                                    np.finfo(np.float32).tiny), np.float32(1))
        unit = global_scale[..., None, None].astype(np.float64)
        wanted = np.where(largest > 0, largest / (6 * unit), 1)
        scales, rounded = _e4m3(np.clip(wanted, 2.0**-9, 448).astype(np.float32))
        scale = rounded * unit
    quotient = groups / scale[..., None]
    codes = np.searchsorted(BOUNDS, np.abs(quotient), side="left").astype(np.uint8)
    codes |= np.signbit(quotient).astype(np.uint8) << 3
    codes = codes.reshape(weight.shape)
    return Quantized(codes[..., 0::2] | codes[..., 1::2] << 4, scales, global_scale)


def dequantize(quantized: Quantized, format: str) -> np.ndarray:
    """The values of `quantize`'s result: float32 [..., out, in], exact but for NVFP4's product."""
    codes = np.stack([quantized.codes & 15, quantized.codes >> 4], axis=-1)
    codes = codes.reshape(*quantized.codes.shape[:-1], -1)
    values = np.where(codes & 8, -_E2M1[codes & 7], _E2M1[codes & 7])
    scales = quantized.scales.astype(np.int32)
    if format == "mxfp4":
        scale = np.ldexp(np.float32(1), scales - 127)
    else:
        exponent = scales >> 3
        scale = np.where(exponent > 0, np.ldexp(1 + (scales & 7) / 8, exponent - 7),
                         np.ldexp((scales & 7) / 8.0, -6)).astype(np.float32)
        scale = scale * quantized.global_scale[..., None, None]
    return (values * np.repeat(scale, GROUP[format], axis=-1)).astype(np.float32)
