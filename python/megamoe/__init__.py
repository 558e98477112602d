# SPDX-License-Identifier: Apache-2.0
"""The expert layers of mixture-of-experts models, with 4-bit weights, as one operation.

    import megamoe
    with megamoe.Layer.open("layer0.mmoe") as layer:
        y = layer(x, topk_ids, topk_weights)

Tensors are numpy arrays or anything that speaks DLPack, on the CPU or on the GPU that computes.
numpy has no BF16: its bits are uint16 (`to_bfloat16`, `from_bfloat16`), or ml_dtypes' bfloat16.
`megamoe.torch` and `megamoe.transformers` are imported on their own.
"""
from ._abi import lib as _lib
from ._comm import Comm
from ._errors import (CapacityError, CheckError, DeadlineError, DeviceError, ExpertIdError,
                      FileError, FormatError, InexactError, InvalidArgumentError, MegaMoEError,
                      NotFoundError, OutOfMemoryError, PeerError, StateError, UnsupportedError)
from ._layer import Layer, Workspace, balance_experts, forward_group
from ._objects import Checkpoint, Device, cuda_available, cuda_built, device_count
from ._tensor import from_bfloat16, to_bfloat16
from ._weights import Activation, Projection, Router, Weights
from .quantize import Quantized, dequantize, quantize

__version__: str = _lib.megamoe_version().decode()

__all__ = [
    "Activation", "CapacityError", "CheckError", "Checkpoint", "Comm", "DeadlineError", "Device",
    "DeviceError", "ExpertIdError", "FileError", "FormatError", "InexactError",
    "InvalidArgumentError", "Layer", "MegaMoEError", "NotFoundError", "OutOfMemoryError",
    "PeerError", "Projection", "Quantized", "Router", "StateError", "UnsupportedError", "Weights",
    "Workspace", "__version__", "balance_experts", "cuda_available", "cuda_built", "dequantize",
    "device_count", "forward_group", "from_bfloat16", "quantize", "to_bfloat16",
]
