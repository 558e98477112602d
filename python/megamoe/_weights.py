# SPDX-License-Identifier: Apache-2.0
"""The 4-bit weights of a layer, and routers."""
from __future__ import annotations

import os
from ctypes import byref, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import _abi
from ._abi import lib
from ._errors import InvalidArgumentError, check
from ._objects import (Checkpoint, Device, Handle, Progress, choice, first_layer, name_of,
                       progress_of)
from ._tensor import Tensor, borrow, rows_view

GROUP = {"mxfp4": 32, "nvfp4": 16}


@dataclass(frozen=True)
class Activation:
    """h = g / (1 + exp(-alpha g)) * (u + offset), g at most limit, u within +-limit (0: no limit).

    The default is SwiGLU; gpt-oss has Activation(1.702, 1.0, 7.0), DeepSeek-V4 limit=10.
    """

    alpha: float = 1.0
    offset: float = 0.0
    limit: float = 0.0


class Projection(NamedTuple):
    """One projection (gate, up or down) of all experts, [out, in] each.

    codes         uint8 [experts, out, in / 2]; the low nibble is the even k
    scales        uint8 [experts, out, in / 32] (MXFP4: E8M0) or [..., in / 16] (NVFP4: E4M3)
    global_scale  NVFP4: float32 [experts], a multiplier
    bias          float32 or BF16 [experts, out], or None

    Tensors of the CPU, of any strides but in their last dimension: fused [gate; up] or interleaved
    checkpoints are given as slices.
    """

    codes: Any
    scales: Any
    global_scale: Any = None
    bias: Any = None


def _plane(value: Any, what: str, shape: tuple, dtypes: tuple) -> Tensor:
    tensor = borrow(value, what)
    if tensor.shape != shape or tensor.dtype not in dtypes:
        raise InvalidArgumentError(f"{what}: {tensor}; expected {' or '.join(dtypes)}"
                                   f"{list(shape)} on the CPU")
    if tensor.device != "cpu":
        raise InvalidArgumentError(f"{what}: on {tensor.device}; expected on the CPU")
    if any(step < 0 for step in tensor.strides):
        raise InvalidArgumentError(f"{what}: strides {list(tensor.strides)} are negative")
    return tensor


class Weights(Handle):
    """The expert weights of one layer, as a checkpoint stores them or prepared for a device.

    hidden, intermediate, experts, topk (the model's; 0 where it is not known), format ("mxfp4" or
    "nvfp4"), activation, has_bias, and `prepared_for`: "cpu", "cuda", or None.
    """

    def __init__(self, _pointer: int | None, *keep: Any):
        super().__init__(_pointer, lib.megamoe_weights_close)
        self._keep = keep
        desc = _abi.LayerDesc()
        check(lib.megamoe_weights_describe(self.pointer, byref(desc)))
        self.layer: int = desc.layer
        self.hidden: int = desc.hidden
        self.intermediate: int = desc.intermediate
        self.experts: int = desc.experts
        self.topk: int = desc.topk
        self.format: str = name_of(_abi.FORMATS, desc.format)
        self.activation = Activation(desc.activation.alpha or 1.0, desc.activation.offset,
                                     desc.activation.limit)
        self.has_bias: bool = desc.has_bias
        device = lib.megamoe_weights_device(self.pointer)
        self.prepared_for: str | None = device.decode() if device else None

    @classmethod
    def open(cls, path: str | os.PathLike, layer: int | None = None) -> "Weights":
        """A prepared file (.mmoe), or layer `layer` of a checkpoint (by default its first)."""
        if os.fspath(path).endswith(".mmoe"):
            pointer = c_void_p()
            check(lib.megamoe_weights_open(os.fsencode(path), byref(pointer)))
            return cls(pointer.value)
        with Checkpoint(path) as checkpoint:
            return checkpoint.weights(first_layer(checkpoint) if layer is None else layer)

    @classmethod
    def from_tensors(cls, gate: Projection, up: Projection, down: Projection, *, format: str,
                     topk: int = 0, activation: Activation = Activation(),
                     layer: int = 0) -> "Weights":
        """Weights from tensors in memory, which are borrowed and kept alive. All scales are checked.

        gate, up: out = intermediate, in = hidden; down: out = hidden, in = intermediate. Either
        all three have a bias or none.
        """
        code = choice(_abi.FORMATS, format, "format")
        shape = borrow(gate.codes, "gate.codes").shape
        if len(shape) != 3:
            raise InvalidArgumentError(f"gate.codes: shape {list(shape)}; expected [experts, "
                                       "intermediate, hidden / 2]")
        experts, intermediate, hidden = shape[0], shape[1], 2 * shape[2]
        biased = gate.bias is not None
        desc = _abi.LayerDesc(layer=layer, hidden=hidden, intermediate=intermediate,
                              experts=experts, topk=topk, format=code, has_bias=biased,
                              activation=_abi.Activation(activation.alpha, activation.offset,
                                                         activation.limit))
        matrices = (_abi.Matrix * (3 * experts))()
        keep = []
        for index, (name, projection, rows, columns) in enumerate((
                ("gate", gate, intermediate, hidden), ("up", up, intermediate, hidden),
                ("down", down, hidden, intermediate))):
            tensors = _planes(name, projection, format, (experts, rows, columns), biased)
            keep.append(tensors)
            codes, scales, globals_, bias = tensors
            for expert in range(experts):
                matrix = matrices[3 * expert + index]
                matrix.codes = codes.data + expert * codes.strides[0]
                matrix.codes_stride = codes.strides[1]
                matrix.scales = scales.data + expert * scales.strides[0]
                matrix.scales_stride = scales.strides[1]
                matrix.global_scale = 1.0 if globals_ is None else globals_[expert]
                if bias is not None:
                    matrix.bias_dtype = (_abi.DTYPE_F32 if bias.dtype == "float32"
                                         else _abi.DTYPE_BF16)
                    size = 4 if bias.dtype == "float32" else 2
                    matrix.bias = bias.data + expert * bias.strides[0] * size
                    matrix.bias_stride = bias.strides[1] * size
        pointer = c_void_p()
        check(lib.megamoe_weights_from_tensors(byref(desc), matrices, byref(pointer)))
        return cls(pointer.value, keep)

    @property
    def nvfp4(self) -> str:
        """How prepared NVFP4 weights were packed: "exact" or "folded"."""
        return name_of(_abi.NVFP4_MODES, lib.megamoe_weights_nvfp4(self.pointer))

    @property
    def router(self) -> "Router | None":
        """The router that came with a prepared file."""
        pointer = lib.megamoe_weights_router(self.pointer)
        return Router(pointer, self) if pointer else None

    def unpack(self, expert: int, projection: str) -> np.ndarray:
        """The exact values of "gate", "up" or "down" of an expert: float64 [out, in]."""
        which = choice({"gate": _abi.GATE, "up": _abi.UP, "down": _abi.DOWN}, projection,
                       "projection")
        shape = (self.intermediate, self.hidden)
        values = np.empty(shape if which != _abi.DOWN else shape[::-1], np.float64)
        check(lib.megamoe_weights_unpack(self.pointer, expert, which, values.ctypes.data))
        return values

    def prepare(self, path: str | os.PathLike, *, device: str = "cpu", nvfp4: str = "exact",
                threads: int = 0, round_outside_window: bool = False,
                router: "Router | None" = None, progress: Progress | None = None) -> None:
        """Packs all experts for "cpu" or "cuda" into the file `path`. No GPU is needed.
        progress(done, total): called meanwhile, in bytes."""
        options = _abi.PrepareOptions(device=device.encode(), threads=threads,
                                      nvfp4=choice(_abi.NVFP4_MODES, nvfp4, "nvfp4"),
                                      round_outside_window=round_outside_window,
                                      progress=progress_of(progress))
        check(lib.megamoe_weights_prepare(self.pointer, router.pointer if router else None,
                                          byref(options), os.fsencode(path)))

    def verify(self, *, progress: Progress | None = None) -> None:
        """Compares every hash of prepared weights with its bytes; CheckError names what differs."""
        check(lib.megamoe_weights_verify(self.pointer, progress_of(progress)))

    def reference(self, x: Any, topk_ids: Any, topk_weights: Any, *, device: str = "cpu",
                  accumulate: str = "mma", nvfp4: str = "exact", weight_after_fc2: bool = False,
                  input_scale: str = "token", activations: str = "e4m3",
                  threads: int = 0) -> np.ndarray:
        """What `Layer` gives, to the bit, computed by the scalar reference. Slow.

        x: BF16 [n, hidden]; topk_ids: int32 or int64 [n, k]; topk_weights: float32 or BF16 [n, k];
        all on the CPU. Returns the bits of BF16 as uint16 [n, hidden]. `device`: whose order of
        sums, "cpu" or "cuda".
        """
        options = _abi.ReferenceOptions(
            sum=choice({"cpu": 0, "cuda": 1}, device, "device"), threads=threads,
            accumulate=choice(_abi.ACCUMULATE, accumulate, "accumulate"),
            nvfp4=choice(_abi.NVFP4_MODES, nvfp4, "nvfp4"), weight_after_fc2=weight_after_fc2,
            input_scale=choice(_abi.INPUT_SCALES, input_scale, "input_scale"),
            activations=choice(_abi.ACTIVATIONS, activations, "activations"))
        batch = Batch(x, topk_ids, topk_weights, self.hidden, "cpu", None)
        y = np.empty((batch.tokens, self.hidden), np.uint16)
        check(lib.megamoe_reference_forward(
            self.pointer, byref(options), batch.topk, *batch.views, batch.tokens,
            byref(rows_view(borrow(y, "y"), "y", self.hidden))))
        return y

    def __repr__(self) -> str:
        return (f"Weights({self.format}, experts={self.experts}, hidden={self.hidden}, "
                f"intermediate={self.intermediate}, prepared_for={self.prepared_for})")


def _planes(name: str, projection: Projection, format: str, shape: tuple, biased: bool):
    """The tensors of a projection of `shape`, checked: codes, scales, global scales, bias."""
    experts, rows, columns = shape
    bytes_ = ("uint8", "int8")
    codes = _plane(projection.codes, f"{name}.codes", (experts, rows, columns // 2), bytes_)
    scales = _plane(projection.scales, f"{name}.scales",
                    (experts, rows, columns // GROUP[format]),
                    bytes_ + ("float8_e8m0fnu" if format == "mxfp4" else "float8_e4m3fn",))
    for tensor, part in ((codes, "codes"), (scales, "scales")):
        if tensor.shape[2] > 1 and tensor.strides[2] != 1:
            raise InvalidArgumentError(f"{name}.{part}: strides {list(tensor.strides)}; expected "
                                       "the last dimension without gaps")
    globals_ = None
    if format == "nvfp4":
        if projection.global_scale is None:
            raise InvalidArgumentError(f"{name}.global_scale: None; NVFP4 has one for each expert")
        globals_ = np.asarray(projection.global_scale, np.float32)
        if globals_.shape != (experts,):
            raise InvalidArgumentError(f"{name}.global_scale: shape {list(globals_.shape)}; "
                                       f"expected [{experts}]")
    if biased != (projection.bias is not None):
        raise InvalidArgumentError(f"{name}.bias: expected {'one' if biased else 'None'}, as "
                                   "gate has")
    bias = _plane(projection.bias, f"{name}.bias", (experts, rows),
                  ("float32", "bfloat16", "uint16")) if biased else None
    return codes, scales, globals_, bias


class Router(Handle):
    """From a token's row to its top-k experts and their weights, on the CPU."""

    def __init__(self, _pointer: int | None, _weights: Weights | None = None):
        borrowed = _weights is not None
        super().__init__(_pointer, (lambda pointer: None) if borrowed else lib.megamoe_router_close,
                         *((_weights,) if borrowed else ()))
        desc = _abi.RouterDesc()
        check(lib.megamoe_router_describe(self.pointer, byref(desc)))
        self.rule: str = name_of(_abi.ROUTER_RULES, desc.rule)
        self.hidden: int = desc.hidden
        self.experts: int = desc.experts
        self.topk: int = desc.topk
        self.hash_vocab: int = desc.hash_vocab

    @classmethod
    def from_tensors(cls, weight: Any, *, rule: str, topk: int, selection_bias: Any = None,
                     linear_bias: Any = None, hash_table: Any = None, groups: int = 0,
                     groups_kept: int = 0, normalize: bool = False,
                     normalize_epsilon: float = 0.0, scaling: float = 1.0,
                     gate_temperature: float = 1.0) -> "Router":
        """A router of its own; everything is copied.

        weight: BF16 or float32 [experts, hidden]; selection_bias, linear_bias: BF16 or float32
        [experts]; hash_table: int32 or int64 [vocab, topk]. rule: "softmax", "sigmoid",
        "sqrt-softplus" or "softmax-selected" (include/megamoe/router.h says what each does).
        """
        matrix = borrow(weight, "weight")
        if len(matrix.shape) != 2:
            raise InvalidArgumentError(f"weight: {matrix}; expected [experts, hidden]")
        experts, hidden = matrix.shape
        table = None if hash_table is None else borrow(hash_table, "hash_table")
        desc = _abi.RouterDesc(rule=choice(_abi.ROUTER_RULES, rule, "rule"), hidden=hidden,
                               experts=experts, topk=topk, groups=groups, groups_kept=groups_kept,
                               normalize=normalize, normalize_epsilon=normalize_epsilon,
                               scaling=scaling, gate_temperature=gate_temperature,
                               hash_vocab=table.shape[0] if table else 0)
        row = [None if bias is None else rows_view(_row(bias, name, experts), name, experts)
               for bias, name in ((selection_bias, "selection_bias"), (linear_bias, "linear_bias"))]
        pointer = c_void_p()
        check(lib.megamoe_router_create(
            byref(desc), byref(rows_view(matrix, "weight", hidden)), row[0], row[1],
            byref(rows_view(table, "hash_table", topk)) if table else None, byref(pointer)))
        return cls(pointer.value)

    def route(self, x: Any, input_ids: Any = None,
              device: Device | None = None) -> tuple[np.ndarray, np.ndarray]:
        """x: BF16 [n, hidden] on the CPU; input_ids: int32 or int64 [n], for hash layers.

        Returns topk_ids int32 [n, topk] and topk_weights float32 [n, topk].
        """
        rows = borrow(x, "x")
        view = rows_view(rows, "x", self.hidden)
        tokens = rows.shape[0]
        words = None
        if input_ids is not None:
            words = rows_view(_row(input_ids, "input_ids", tokens), "input_ids", tokens)
        ids = np.empty((tokens, self.topk), np.int32)
        weights = np.empty((tokens, self.topk), np.float32)
        check(lib.megamoe_router_route(
            self.pointer, device.pointer if device else None, byref(view), words, tokens,
            byref(rows_view(borrow(ids, "topk_ids"), "topk_ids", self.topk)),
            byref(rows_view(borrow(weights, "topk_weights"), "topk_weights", self.topk))))
        return ids, weights

    def __repr__(self) -> str:
        return (f"Router({self.rule}, experts={self.experts}, topk={self.topk}"
                f"{', hash' if self.hash_vocab else ''})")


def _row(value: Any, what: str, columns: int) -> Tensor:
    """A vector as a matrix of one row."""
    tensor = borrow(value, what)
    if tensor.shape != (columns,):
        raise InvalidArgumentError(f"{what}: {tensor}; expected [{columns}]")
    return Tensor(tensor.data, tensor.dtype, (1, columns), (columns, tensor.strides[0]),
                  tensor.device, tensor.owner)


class Batch:
    """The views of a batch on `device`: x [n, hidden], topk_ids [n, k], topk_weights [n, k]."""

    def __init__(self, x: Any, topk_ids: Any, topk_weights: Any, hidden: int, device: str,
                 stream: int | None):
        tensors = [borrow(value, what, stream) for value, what in
                   ((x, "x"), (topk_ids, "topk_ids"), (topk_weights, "topk_weights"))]
        for tensor, what in zip(tensors, ("x", "topk_ids", "topk_weights")):
            on_device(tensor, what, device)
        if len(tensors[1].shape) != 2:
            raise InvalidArgumentError(f"topk_ids: {tensors[1]}; expected [tokens, topk]")
        self.tokens, self.topk = tensors[1].shape
        for tensor, what in ((tensors[0], "x"), (tensors[2], "topk_weights")):
            if tensor.shape[:1] != (self.tokens,):
                raise InvalidArgumentError(f"{what}: {tensor}; expected {self.tokens} rows, as "
                                           "topk_ids has")
        self._tensors = tensors
        self._views = (rows_view(tensors[0], "x", hidden),
                       rows_view(tensors[1], "topk_ids", self.topk),
                       rows_view(tensors[2], "topk_weights", self.topk))

    @property
    def views(self) -> tuple:
        return tuple(byref(view) for view in self._views)


def on_device(tensor: Tensor, what: str, device: str) -> None:
    if tensor.device != device:
        raise InvalidArgumentError(f"{what}: on {tensor.device}; expected on {device}")
