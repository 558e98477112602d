# SPDX-License-Identifier: Apache-2.0
"""megamoe for PyTorch: custom operators and a module.

    layer = megamoe.torch.MegaMoELayer.from_file("layer0.mmoe", device="cuda")
    y = layer(x, topk_ids, topk_weights)

torch.ops.megamoe.experts(x, topk_ids, topk_weights, layer.handle) -> y, and experts_out, which
writes its argument y, work under torch.compile and in CUDA graphs. They compute on torch's current
stream. There is no backward: the weights are 4 bits wide.
"""
from __future__ import annotations

import itertools
import os
import threading
import weakref
from ctypes import byref
from typing import Any, Iterable

import torch
import torch.distributed

from . import _abi
from ._abi import lib
from ._comm import Comm
from ._errors import InvalidArgumentError, StateError, check
from ._layer import Layer, Workspace
from ._objects import Device
from ._torch_quantize import quantize
from ._weights import Activation, Projection, Weights

__all__ = ["DEFAULT_MAX_TOKENS", "MegaMoELayer", "comm_from_group", "experts", "experts_out",
           "get_device", "quantize"]

DEFAULT_MAX_TOKENS = 4096

_DTYPES = {torch.bfloat16: _abi.DTYPE_BF16, torch.float32: _abi.DTYPE_F32,
           torch.int32: _abi.DTYPE_I32, torch.int64: _abi.DTYPE_I64}

_lock = threading.Lock()  # of the tables below
_devices: dict[str, Device] = {}
_alone: weakref.WeakKeyDictionary[Device, Comm] = weakref.WeakKeyDictionary()
_workspaces: weakref.WeakValueDictionary[tuple, "_Shared"] = weakref.WeakValueDictionary()
_layers: weakref.WeakValueDictionary[int, "MegaMoELayer"] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


class _Shared:
    """A workspace that the layers of a shape share, and the stream that used it last."""

    def __init__(self, workspace: Workspace):
        self.workspace = workspace
        self.stream: torch.cuda.Stream | None = None

    def order(self, stream: torch.cuda.Stream) -> None:
        """Lets `stream` wait for the one that used this workspace before. A graph that is being
        captured was begun on an idle device, and where it is replayed is the caller's to order."""
        if torch.cuda.is_current_stream_capturing():
            return
        if self.stream is not None and self.stream != stream:
            stream.wait_stream(self.stream)
        self.stream = stream


def get_device(name: str | torch.device = "cpu", **options: Any) -> Device:
    """The device that this module's layers use under a name, opened now with `options` of
    `megamoe.Device` (such as threads, max_ctas) if it was not before. By default the CPU has
    torch's number of threads, and they are not pinned: torch's own run in the same process."""
    name = _device_name(name)
    with _lock:
        opened = _devices.get(name)
        if opened is None:
            defaults: dict[str, Any] = {"pin_threads": False}
            if name == "cpu":
                defaults["threads"] = torch.get_num_threads()
            opened = _devices[name] = Device(name, **{**defaults, **options})
        elif options:
            raise StateError(f"{name} is open; its options are given before its first use")
    return opened


def comm_from_group(group: torch.distributed.ProcessGroup | None = None, *,
                    messages: bool = False) -> Comm:
    """The ranks of a process group of torch.distributed (by default all), for `MegaMoELayer`'s comm.

    The group only brings together ranks of one host, which then share memory. With `messages` it
    also carries what layers of CPU devices exchange, so ranks may be on several hosts; its backend
    for tensors of the CPU is used, gloo or MPI, and it outlives the communicator.
    """
    dist = torch.distributed
    size, rank = dist.get_world_size(group), dist.get_rank(group)

    def allgather(mine: bytes) -> list[bytes]:
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, mine, group=group)
        return parts

    def alltoallv(send: list[memoryview], receive: list[memoryview]) -> None:
        def tensors(parts: list[memoryview]):
            return [(other, torch.frombuffer(part, dtype=torch.uint8))
                    for other, part in enumerate(parts) if len(part) and other != rank]

        works = [dist.irecv(into, group=group, group_src=other)
                 for other, into in tensors(receive)]
        works += [dist.isend(part, group=group, group_dst=other) for other, part in tensors(send)]
        for work in works:
            if work is not None:
                work.wait()

    if messages:
        return Comm.from_transport(rank, size, allgather, alltoallv)
    return Comm.from_allgather(rank, size, allgather)


def _device_name(name: str | torch.device) -> str:
    where = torch.device(name)
    if where.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"device {where}; expected cpu or cuda")
    if where.type == "cpu":
        return "cpu"
    return f"cuda:{torch.cuda.current_device() if where.index is None else where.index}"


def _comm_alone(of: Device) -> Comm:
    """One rank, for all layers of a device, so that they can share workspaces."""
    with _lock:
        if of not in _alone:
            _alone[of] = Comm()
        return _alone[of]


class MegaMoELayer(torch.nn.Module):
    """The experts of one layer, or this rank's part of them. For inference; it has no parameters.

    weights: of `megamoe`; may be closed afterwards. device: "cpu", "cuda:0", or a `megamoe.Device`
    of the caller's. topk: slots for a token (default: the model's own). max_tokens: larger batches
    are computed in parts, which gives the same bits; a workspace of this size is shared by all
    layers of a shape on a device.
    comm: the ranks that share the experts. All of them then create the same layers in the same
    order and call them together, with up to max_tokens tokens of their own, or none.
    options: those of `megamoe.Layer`, such as nvfp4="folded", activations="int8" (on a CPU) or
    round_outside_window=True.
    """

    def __init__(self, weights: Weights, device: str | torch.device | Device = "cpu", *,
                 topk: int | None = None, max_tokens: int = DEFAULT_MAX_TOKENS,
                 comm: Comm | None = None, **options: Any):
        super().__init__()
        topk = topk or weights.topk
        if not topk:
            raise InvalidArgumentError("topk: the weights do not say how many experts a token has; "
                                       "pass topk=")
        opened = device if isinstance(device, Device) else get_device(device)
        self._device = torch.device(opened.name)
        self._lock = opened.lock
        with self._lock:
            self.layer = Layer(weights, opened, comm=comm or _comm_alone(opened), **options)
            self._shared = self._workspace(topk, max_tokens)
            self.layer.prewarm(self._shared.workspace)
        self.hidden, self.topk, self.max_tokens = weights.hidden, topk, max_tokens
        self.handle = next(_handles)
        _layers[self.handle] = self

    def _workspace(self, topk: int, max_tokens: int) -> _Shared:
        layer = self.layer
        key = (layer.device, layer.comm, layer.hidden, layer.intermediate, layer.experts,
               layer.physical_experts, layer.activations, layer.input_scale, topk, max_tokens)
        shared = _workspaces.get(key)
        if shared is None:
            shared = _workspaces[key] = _Shared(layer.workspace(max_tokens, topk))
        return shared

    @classmethod
    def from_file(cls, path: str | os.PathLike, device: str | torch.device | Device = "cpu",
                  **options: Any) -> "MegaMoELayer":
        """From a prepared file (.mmoe), which was packed for this kind of device."""
        with Weights.open(path) as weights:
            return cls(weights, device, **options)

    @classmethod
    def from_checkpoint(cls, path: str | os.PathLike, layer: int,
                        device: str | torch.device | Device = "cpu",
                        **options: Any) -> "MegaMoELayer":
        """Layer `layer` of a checkpoint: a directory or a .safetensors file."""
        with Weights.open(path, layer) as weights:
            return cls(weights, device, **options)

    @classmethod
    def from_tensors(cls, gate: Projection, up: Projection, down: Projection, *, format: str,
                     topk: int, activation: Activation = Activation(),
                     device: str | torch.device | Device = "cpu",
                     **options: Any) -> "MegaMoELayer":
        """From tensors of 4-bit codes and scales, of any device; see `megamoe.Projection`."""
        host = [Projection(*(_host(part) for part in projection))
                for projection in (gate, up, down)]
        with Weights.from_tensors(*host, format=format, topk=topk,
                                  activation=activation) as weights:
            return cls(weights, device, **options)

    def place(self, physical_to_logical: Iterable[int] | None = None, *,
              weights: Weights | None = None) -> None:
        """Collective, between forwards: moves experts between ranks; see `megamoe.Layer.place`.
        `self.layer` counts loads: `receive_counts`, `loads`, `reset_counts`."""
        with self._lock:
            self.layer.place(physical_to_logical, weights=weights)
            self._shared = self._workspace(self.topk, self.max_tokens)
            self.layer.prewarm(self._shared.workspace)

    def set_plan(self, *, token_tile: int = 0, lag: int = 0) -> None:
        """On a GPU: of all layers that share this one's workspace; see `megamoe.Workspace`."""
        with self._lock:
            self._shared.workspace.set_plan(token_tile=token_tile, lag=lag)

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor,
                topk_weights: torch.Tensor) -> torch.Tensor:
        """x: bfloat16 [..., hidden]; topk_ids: int32 or int64 [..., topk], -1 masks a slot;
        topk_weights: float32 or bfloat16 [..., topk]. Returns bfloat16 [..., hidden].

        What a GPU finds while it computes is raised by a later call, or by `check`.
        """
        rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, topk_ids, topk_weights)]
        return torch.ops.megamoe.experts(*rows, self.handle).view(x.shape)

    def check(self) -> None:
        """Waits for the device and raises the error that it has found, if any."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        with self._lock:
            self._shared.workspace.raise_pending()

    @property
    def workspace(self) -> Workspace:
        """The workspace, of up to max_tokens tokens, that the layers of this shape share."""
        return self._shared.workspace

    @property
    def nbytes(self) -> int:
        """Bytes of packed weights."""
        return self.layer.nbytes

    def extra_repr(self) -> str:
        layer = self.layer
        return (f"{layer.device.name}, {layer.format}, experts={layer.experts}, "
                f"hidden={layer.hidden}, intermediate={layer.intermediate}, topk={self.topk}")

    def __deepcopy__(self, memo: dict) -> "MegaMoELayer":
        return self  # packed weights never change, so copies of a model share them

    def __reduce__(self):
        raise TypeError("a MegaMoELayer cannot be pickled; save its weights with Weights.prepare")

    def _run(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
             y: torch.Tensor) -> None:
        x, topk_ids, topk_weights = _rows(x, 8), _rows(topk_ids), _rows(topk_weights)
        self._check("x", x, self.hidden, (torch.bfloat16,), len(x))
        self._check("topk_ids", topk_ids, self.topk, (torch.int32, torch.int64), len(x))
        self._check("topk_weights", topk_weights, self.topk, (torch.float32, torch.bfloat16),
                    len(x))
        self._check("y", y, self.hidden, (torch.bfloat16,), len(x))
        workspace = self._shared.workspace
        stream = None
        with self._lock:
            if y.is_cuda:
                current = torch.cuda.current_stream(y.device)
                self._shared.order(current)
                stream = current.cuda_stream
            step, starts = self.max_tokens, range(0, len(x), self.max_tokens)
            if self.layer.comm.size > 1:  # ranks make the same forwards: one, without tokens too
                step, starts = len(x), range(1)
            for start in starts:
                part = slice(start, start + step)
                check(lib.megamoe_stage(
                    workspace.pointer, _view(x[part]), _view(topk_ids[part]),
                    _view(topk_weights[part]), len(x[part]), stream))
                check(lib.megamoe_forward(self.layer.pointer, workspace.pointer, _view(y[part]),
                                          stream))
                if not y.is_cuda:
                    workspace.raise_pending()

    def _check(self, what: str, tensor: torch.Tensor, columns: int, dtypes: tuple,
               rows: int) -> None:
        if (tensor.dtype not in dtypes or tensor.shape != (rows, columns)
                or tensor.device != self._device):
            raise InvalidArgumentError(
                f"{what}: {tensor.dtype} {list(tensor.shape)} on {tensor.device}; expected "
                f"{' or '.join(map(str, dtypes))} [{rows}, {columns}] on {self._device}")


def _host(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return value.view(torch.uint8) if value.dtype.itemsize == 1 else value


def _rows(tensor: torch.Tensor, multiple: int = 1) -> torch.Tensor:
    """The tensor, copied if its rows have gaps inside or begin at odd places."""
    fits = tensor.dim() == 2 and tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1]
    return tensor if fits and tensor.stride(0) % multiple == 0 else tensor.contiguous()


def _view(tensor: torch.Tensor):
    return byref(_abi.View(tensor.data_ptr(), _DTYPES[tensor.dtype], tensor.shape[0],
                           tensor.stride(0) if tensor.shape[0] > 1 else 0))


def _layer_of(handle: int) -> MegaMoELayer:
    layer = _layers.get(handle)
    if layer is None:
        raise StateError(f"no layer has the handle {handle}: it was deleted")
    return layer


@torch.library.custom_op("megamoe::experts", mutates_args=(), device_types=("cpu", "cuda"))
def experts(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
            layer: int) -> torch.Tensor:
    """x: bfloat16 [n, hidden]; topk_ids: int32 or int64 [n, k]; topk_weights: float32 or bfloat16
    [n, k]; layer: `MegaMoELayer.handle`. Returns bfloat16 [n, hidden]."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _layer_of(layer)._run(x, topk_ids, topk_weights, y)
    return y


@experts.register_fake
def _(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
      layer: int) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("megamoe::experts_out", mutates_args=("y",), device_types=("cpu", "cuda"))
def experts_out(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
                y: torch.Tensor, layer: int) -> None:
    """As `experts`, written to y: bfloat16 [n, hidden], its rows without gaps inside."""
    if _rows(y) is not y:
        raise InvalidArgumentError(f"y: strides {list(y.stride())}; expected rows without gaps "
                                   "inside")
    _layer_of(layer)._run(x, topk_ids, topk_weights, y)


@experts_out.register_fake
def _(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, y: torch.Tensor,
      layer: int) -> None:
    return None
