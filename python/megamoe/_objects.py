# SPDX-License-Identifier: Apache-2.0
"""Objects of the library: what they have in common, devices, and checkpoints."""
from __future__ import annotations

import ctypes
import os
import threading
import weakref
from ctypes import byref, c_int32, c_void_p
from typing import Any, Callable, Iterator

from . import _abi
from ._abi import lib
from ._errors import (DeviceError, InvalidArgumentError, NotFoundError, StateError,
                      UnsupportedError, check)


class Handle:
    """Owns one object of the library, until `close`, the end of `with`, or garbage collection."""

    def __init__(self, pointer: int | None, close: Any, *parents: "Handle"):
        self._pointer = pointer
        self._parents = parents  # they stay open as long as this is
        self._children: weakref.WeakSet[Handle] = weakref.WeakSet()
        for parent in parents:
            parent._children.add(self)
        # At exit finalizers run in the reverse order of creation, so children before parents.
        self._finalizer = weakref.finalize(self, close, pointer)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    @property
    def pointer(self) -> int | None:
        """The C pointer, for calls of the library."""
        if self.closed:
            raise StateError(f"this {type(self).__name__} is closed")
        return self._pointer

    def close(self) -> None:
        """Gives the object back. Refused while others that were made with it are open."""
        users = [child for child in self._children if not child.closed]
        if users and not self.closed:
            raise StateError(f"this {type(self).__name__} is in use by {len(users)} "
                             f"{type(users[0]).__name__}: close that first")
        self._finalizer()

    def __enter__(self):
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def choice(table: dict[str, int], value: str, what: str) -> int:
    """The constant for a word, such as nvfp4="folded"."""
    if value not in table:
        raise InvalidArgumentError(f"{what}={value!r}; expected one of {', '.join(table)}")
    return table[value]


def name_of(table: dict[str, int], value: int) -> str:
    return next(name for name, number in table.items() if number == value)


def members(struct: ctypes.Structure) -> dict[str, Any]:
    """The members of a C struct by name, its text as str."""
    names = [name for name, *_ in struct._fields_ if name != "struct_size"]
    return {name: value.decode(errors="replace") if isinstance(value, bytes) else value
            for name, value in ((name, getattr(struct, name)) for name in names)}


Progress = Callable[[int, int], None]


def progress_of(function: Progress | None) -> Any:
    """megamoe_progress that calls function(done, total), in bytes, maybe from another thread. It
    lives as long as the result does."""
    if function is None:
        return _abi.Progress()
    call = _abi.PROGRESS_FN(lambda user, done, total: function(done, total))
    return _abi.Progress(fn=call)


class Device(Handle):
    """The CPU or a Hopper GPU, opened by name: "cpu", "cuda", "cuda:1".

    threads: of the CPU, also those that pack weights for a GPU; 0 is one per core available.
    first_core, pin_threads: where the threads run.
    max_ctas: thread blocks that a forward may use on a GPU; 0 is one per multiprocessor.

    A device serves one call at a time; threads that share one take its `lock` around their calls.
    """

    def __init__(self, name: str = "cpu", *, threads: int = 0, first_core: int = 0,
                 pin_threads: bool = True, max_ctas: int = 0):
        options = _abi.DeviceOptions(threads=threads, first_core=first_core,
                                     no_pinning=not pin_threads, max_ctas=max_ctas)
        pointer = c_void_p()
        check(lib.megamoe_device_open(name.encode(), byref(options), byref(pointer)))
        super().__init__(pointer.value, lib.megamoe_device_close)
        self.name = self.info()["name"]
        self.lock = threading.Lock()

    @property
    def type(self) -> str:
        """"cpu" or "cuda"."""
        return self.name.partition(":")[0]

    def info(self) -> dict[str, Any]:
        """What the device is: name, model, tier, threads, cores, memory_bytes, ..."""
        info = _abi.DeviceInfo()
        check(lib.megamoe_device_describe(self.pointer, byref(info)))
        return members(info)

    def measure(self) -> dict[str, float]:
        """What the device can do at best, measured now, in about a second: read_gbs; of a CPU
        dot_gflops and int8_gops, of a GPU copy_gbs and mma_tflops."""
        ceilings = _abi.DeviceCeilings()
        check(lib.megamoe_device_measure(self.pointer, byref(ceilings)))
        return members(ceilings)

    def __repr__(self) -> str:
        return f"Device({self.name!r})"


def cuda_built() -> bool:
    """Whether the library has CUDA kernels: it was built where nvcc was."""
    with Device(threads=1, pin_threads=False) as device:
        return device.info()["cuda_built"]


def cuda_available() -> bool:
    """Whether the device "cuda" can be opened: kernels in the library, a driver, a Hopper GPU.
    `Device("cuda")` says what is missing."""
    try:
        Device("cuda").close()
    except (UnsupportedError, DeviceError):
        return False
    return True


def device_count(kind: str = "cuda") -> int:
    """Devices of a kind that have a name; UnsupportedError says why there are none."""
    count = c_int32()
    check(lib.megamoe_device_count(kind.encode(), byref(count)))
    return count.value


class Checkpoint(Handle):
    """A checkpoint: a directory with safetensors files and config.json, or one .safetensors file.

    Every header is checked, and tensors are read when they are needed. `family` is the naming
    scheme that was recognised.
    """

    def __init__(self, path: str | os.PathLike):
        pointer = c_void_p()
        check(lib.megamoe_checkpoint_open(os.fsencode(path), byref(pointer)))
        super().__init__(pointer.value, lib.megamoe_checkpoint_close)
        info = _abi.CheckpointInfo()
        check(lib.megamoe_checkpoint_describe(self.pointer, byref(info)))
        self.path = os.fspath(path)
        self.family: str = info.family.decode()
        self.model_type: str = info.model_type.decode()
        self.nbytes: int = info.bytes
        self.layers: list[int] = [lib.megamoe_checkpoint_layer(self.pointer, i)
                                  for i in range(info.layers)]

    def weights(self, layer: int):
        """The weights of a layer, by the model's index of it."""
        from ._weights import Weights
        pointer = c_void_p()
        check(lib.megamoe_checkpoint_weights(self.pointer, layer, byref(pointer)))
        return Weights(pointer.value)

    def quantize(self, layer: int, format: str, *, threads: int = 0,
                 progress: Progress | None = None):
        """The weights of a layer that is stored in FP8 or BF16, rounded to "mxfp4" or "nvfp4" as
        `megamoe.quantize` does, by `threads` threads (0: one per core)."""
        from ._weights import Weights
        options = _abi.QuantizeOptions(format=choice(_abi.FORMATS, format, "format"),
                                       threads=threads, progress=progress_of(progress))
        pointer = c_void_p()
        check(lib.megamoe_checkpoint_quantize(self.pointer, layer, byref(options), byref(pointer)))
        return Weights(pointer.value)

    def stored(self, layer: int) -> dict[str, Any]:
        """How a layer's experts are stored: family, format, wide (True: FP8 or BF16, which
        `quantize` reads), has_bias, hidden, intermediate, experts, topk, block_rows,
        block_columns (values that share a scale) and activation."""
        from ._weights import Activation
        stored = _abi.StoredLayer()
        check(lib.megamoe_checkpoint_stored(self.pointer, layer, byref(stored)))
        found = stored.activation
        return {**members(stored),
                "activation": Activation(found.alpha or 1.0, found.offset, found.limit)}

    def convert(self, path: str | os.PathLike, family: str, format: str | None = None, *,
                progress: Progress | None = None) -> None:
        """Writes the expert layers, their routers and config.json as another family stores them,
        without loss, into the new directory `path`.

        family: "deepseek-v4", "modelopt-nvfp4", "compressed-tensors" or "gpt-oss"; format:
        "mxfp4" or "nvfp4", by default the stored one if the family has it.
        """
        options = _abi.ConvertOptions(
            family=family.encode(), format=choice(_abi.FORMATS, format, "format") if format else 0,
            progress=progress_of(progress))
        check(lib.megamoe_checkpoint_convert(self.pointer, byref(options), os.fsencode(path)))

    def router(self, layer: int):
        """The router of a layer; NotFoundError if the checkpoint has none."""
        from ._weights import Router
        pointer = c_void_p()
        check(lib.megamoe_checkpoint_router(self.pointer, layer, byref(pointer)))
        return Router(pointer.value)

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, family={self.family!r}, layers={len(self.layers)})"


def first_layer(checkpoint: Checkpoint) -> int:
    if not checkpoint.layers:
        raise NotFoundError(f"{checkpoint.path}: no MoE layer")
    return checkpoint.layers[0]
