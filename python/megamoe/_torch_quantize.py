# SPDX-License-Identifier: Apache-2.0
"""`megamoe.quantize` in torch, on the device of the weights: the same bits, at a GPU's speed."""
from __future__ import annotations

import torch

from ._errors import InvalidArgumentError
from ._weights import GROUP
from .quantize import BOUNDS, Quantized

_PART = 1 << 26  # weights at a time: each takes some 30 bytes meanwhile


def quantize(weight: torch.Tensor, format: str) -> Quantized:
    """weight: floating point [..., out, in], in a multiple of the block. Returns tensors on its
    device: codes uint8 [..., out, in / 2], scales uint8 [..., out, in / 32 or in / 16] and
    global_scale float32 [...]; `megamoe.quantize` gives the same from the same values in float32.

    format: "mxfp4" or "nvfp4". Each [out, in] matrix has a global scale of its own.
    """
    if format not in GROUP:
        raise InvalidArgumentError(f"format={format!r}; expected one of {', '.join(GROUP)}")
    block = GROUP[format]
    if weight.dim() < 2 or weight.shape[-1] % block or weight.shape[-1] == 0:
        raise InvalidArgumentError(f"weight: shape {list(weight.shape)}; expected [..., out, in] "
                                   f"with `in` a multiple of {block}")
    rows, columns = weight.shape[-2:]
    matrices = weight.detach().reshape(-1, rows, columns)
    codes = matrices.new_empty((len(matrices), rows, columns // 2), dtype=torch.uint8)
    scales = matrices.new_empty((len(matrices), rows, columns // block), dtype=torch.uint8)
    globals_ = matrices.new_ones(len(matrices), dtype=torch.float32)
    step = max(1, _PART // max(1, rows * columns))
    for start in range(0, len(matrices), step):
        part = slice(start, start + step)
        _part(matrices[part], format, codes[part], scales[part], globals_[part])
    lead = weight.shape[:-2]
    return Quantized(codes.view(*lead, rows, -1), scales.view(*lead, rows, -1),
                     globals_.view(lead))


def _part(weight: torch.Tensor, format: str, codes: torch.Tensor, scales: torch.Tensor,
          globals_: torch.Tensor) -> None:
    groups = weight.float().contiguous().double().unflatten(-1, (-1, GROUP[format]))
    largest = groups.abs().amax(dim=-1)
    if not torch.isfinite(largest).all():
        raise InvalidArgumentError("weight: NaN or infinity; expected finite values")
    if format == "mxfp4":
        # The smallest power of two under which `largest` is at most 6 = 1.5 * 2^2.
        exponent = _exponent(largest) - 2 + (_mantissa(largest) > 1.5)
        exponent = torch.where(largest > 0, exponent.clamp(-127, 127), 0)
        scales.copy_(exponent + 127)
        scale = _power(exponent)
    else:
        top = largest.amax(dim=(-2, -1))
        tiny = torch.finfo(torch.float32).tiny
        globals_.copy_(torch.where(top > 0, (top / 2688).float().clamp(min=tiny), 1))
        unit = globals_.double()[:, None, None]
        wanted = torch.where(largest > 0, largest / (6 * unit), 1)
        wanted = wanted.clamp(2.0**-9, 448).float().double()
        exponent = _exponent(wanted).clamp(min=-6)
        eighths = torch.round(wanted * _power(3 - exponent))
        # Eighths beyond the first carry into the exponent's field; a subnormal's has none.
        scales.copy_(((exponent + 6) << 3) + eighths.long())
        scale = eighths * _power(exponent - 3) * unit
    quotient = groups / scale[..., None]
    bounds = torch.tensor(BOUNDS, dtype=torch.float64, device=weight.device)
    nibbles = torch.bucketize(quotient.abs(), bounds, out_int32=True).to(torch.uint8)
    nibbles |= torch.signbit(quotient).to(torch.uint8) << 3
    nibbles = nibbles.flatten(-2)
    codes.copy_(nibbles[..., 0::2] | nibbles[..., 1::2] << 4)


# float64 by its bits: what frexp and ldexp give differs between devices for some values.

def _exponent(values: torch.Tensor) -> torch.Tensor:
    """e of m * 2^e, 1 <= m < 2; values positive and normal."""
    return (values.view(torch.int64) >> 52) - 1023


def _mantissa(values: torch.Tensor) -> torch.Tensor:
    return ((values.view(torch.int64) & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    return ((exponent + 1023) << 52).view(torch.float64)
