# SPDX-License-Identifier: Apache-2.0
"""Tensors of others as pointers with shapes: numpy arrays, and whatever speaks DLPack."""
from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any

import numpy as np

from . import _abi
from ._errors import InvalidArgumentError

KDL_CPU, KDL_CUDA, KDL_CUDA_HOST, KDL_CUDA_MANAGED = 1, 2, 3, 13
_CUDA_LEGACY_STREAM = 1  # what DLPack calls the default stream


class _DLTensor(Structure):
    _fields_ = [("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32),
                ("ndim", c_int32), ("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16),
                ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)),
                ("byte_offset", c_uint64)]


# (kind, bits) as DLPack numbers them: 0 int, 1 unsigned, 2 float, 4 bfloat, 10 and up 8-bit floats.
_DLPACK_DTYPES = {(0, 8): "int8", (1, 8): "uint8", (1, 16): "uint16", (0, 32): "int32",
                  (0, 64): "int64", (2, 16): "float16", (2, 32): "float32", (2, 64): "float64",
                  (4, 16): "bfloat16", (10, 8): "float8_e4m3fn", (14, 8): "float8_e8m0fnu"}

# What holds which element of the library. numpy has no BF16 of its own: uint16 holds its bits.
_CODES = {"bfloat16": _abi.DTYPE_BF16, "uint16": _abi.DTYPE_BF16, "float32": _abi.DTYPE_F32,
          "int32": _abi.DTYPE_I32, "int64": _abi.DTYPE_I64}

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = c_void_p, [ctypes.py_object, ctypes.c_char_p]


class Tensor:
    """A borrowed tensor. `strides` count elements; `owner` keeps the memory alive."""

    __slots__ = ("data", "dtype", "shape", "strides", "device", "owner")

    def __init__(self, data: int, dtype: str, shape: tuple, strides: tuple, device: str, owner):
        self.data, self.dtype, self.shape, self.strides = data, dtype, shape, strides
        self.device, self.owner = device, owner

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)} on {self.device}"


def borrow(value: Any, what: str, stream: int | None = None) -> Tensor:
    """The tensor behind `value`. On a GPU its producer is ordered before `stream` (DLPack)."""
    if isinstance(value, np.ndarray):
        size = value.dtype.itemsize
        if not value.dtype.isnative or any(step % size for step in value.strides):
            raise InvalidArgumentError(f"{what}: strides {value.strides} or byte order of "
                                       f"{value.dtype} do not fit; pass a copy")
        return Tensor(value.ctypes.data, value.dtype.name, value.shape,
                      tuple(step // size for step in value.strides), "cpu", value)
    if not hasattr(value, "__dlpack__"):
        raise InvalidArgumentError(f"{what}: {type(value).__name__}; expected a numpy array or a "
                                   "tensor with __dlpack__")
    kind, index = value.__dlpack_device__()
    if kind in (KDL_CUDA, KDL_CUDA_MANAGED):
        device = f"cuda:{int(index)}"
        capsule = value.__dlpack__(stream=stream or _CUDA_LEGACY_STREAM)
    elif kind in (KDL_CPU, KDL_CUDA_HOST):
        device = "cpu"
        capsule = value.__dlpack__()
    else:
        raise InvalidArgumentError(f"{what}: on DLPack device {kind}:{index}; expected the CPU or "
                                   "CUDA")
    # The capsule is not consumed: while it lives it owns the tensor, and then gives it back.
    tensor = ctypes.cast(_get_pointer(capsule, b"dltensor"), POINTER(_DLTensor)).contents
    dtype = _DLPACK_DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise InvalidArgumentError(f"{what}: DLPack dtype {tensor.code}/{tensor.bits}/"
                                   f"{tensor.lanes} is not known here")
    shape = tuple(tensor.shape[:tensor.ndim])
    if tensor.strides:
        strides = tuple(tensor.strides[:tensor.ndim])
    else:
        steps = [1]
        for extent in shape[:0:-1]:
            steps.insert(0, steps[0] * extent)
        strides = tuple(steps[:tensor.ndim])
    return Tensor((tensor.data or 0) + tensor.byte_offset, dtype, shape, strides, device, capsule)


class CudaArray:
    """Memory of the library on a GPU, for whoever knows `__cuda_array_interface__`."""

    def __init__(self, interface: dict[str, Any], owner: Any):
        self.__cuda_array_interface__ = interface
        self._owner = owner

    @property
    def shape(self) -> tuple[int, ...]:
        return self.__cuda_array_interface__["shape"]


class _HostArray:
    """The same of the host, as numpy takes it."""

    def __init__(self, interface: dict[str, Any], owner: Any):
        self.__array_interface__ = interface
        self._owner = owner


# How numpy and CUDA's array interface name the library's elements; what they do not know is bytes.
_TYPES = {_abi.DTYPE_BF16: "<u2", _abi.DTYPE_F32: "<f4", _abi.DTYPE_E4M3: "|u1",
          _abi.DTYPE_E8M0: "|u1", _abi.DTYPE_I32: "<i4", _abi.DTYPE_I64: "<i8",
          _abi.DTYPE_I8: "|i1"}


def memory(view: _abi.View, columns: int, kind: str, owner: Any) -> Any:
    """Memory of the library [rows, columns]: a numpy array of the CPU, a CudaArray of a GPU."""
    size = int(_TYPES[view.dtype][2:])
    interface = {"shape": (view.rows, columns), "typestr": _TYPES[view.dtype],
                 "strides": ((view.stride or columns) * size, size), "data": (view.data, False),
                 "version": 3}
    return (CudaArray(interface, owner) if kind == "cuda"
            else np.asarray(_HostArray(interface, owner)))


def rows_view(tensor: Tensor, what: str, columns: int) -> _abi.View:
    """The view of a matrix [rows, columns] whose columns lie side by side."""
    if len(tensor.shape) != 2 or tensor.shape[1] != columns:
        raise InvalidArgumentError(f"{what}: shape {list(tensor.shape)}; expected [rows, "
                                   f"{columns}]")
    if columns > 1 and tensor.strides[1] != 1 and tensor.shape[0]:
        raise InvalidArgumentError(f"{what}: the elements of a row lie {tensor.strides[1]} apart; "
                                   "expected them side by side")
    if tensor.dtype not in _CODES:
        raise InvalidArgumentError(f"{what}: {tensor.dtype}; expected {', '.join(_CODES)}, where "
                                   "uint16 holds the bits of BF16")
    stride = tensor.strides[0] if tensor.shape[0] > 1 else 0
    if stride and stride < columns:
        raise InvalidArgumentError(f"{what}: rows lie {stride} elements apart and overlap")
    return _abi.View(tensor.data, _CODES[tensor.dtype], tensor.shape[0], stride)


def current_stream(value: Any) -> int:
    """The stream on which torch would now use `value`; the default one for others' tensors."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.is_cuda:
        return torch.cuda.current_stream(value.device).cuda_stream
    return 0


def to_bfloat16(values: Any) -> np.ndarray:
    """The bits of BF16, rounded to nearest even. float32 of any shape -> uint16 of that shape."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    high = bits >> np.uint32(16)
    rounded = (bits + np.uint32(0x7FFF) + (high & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), high | np.uint32(0x40), rounded).astype(np.uint16)


def from_bfloat16(bits: Any) -> np.ndarray:
    """The values of BF16 bits. uint16 (or ml_dtypes' bfloat16) of any shape -> float32."""
    bits = np.ascontiguousarray(bits)
    return (bits.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
