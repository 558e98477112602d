# SPDX-License-Identifier: Apache-2.0
"""The operation: layers and the workspaces in which they compute."""
from __future__ import annotations

import os
from ctypes import (POINTER, byref, c_char_p, c_int32, c_int64, c_uint64, c_void_p, cast,
                    pointer)
from typing import Any, Iterable, Sequence

import numpy as np

from . import _abi
from ._abi import lib
from ._comm import Comm
from ._errors import InvalidArgumentError, check, error
from ._objects import Device, Handle, Progress, choice, progress_of
from ._tensor import Tensor, borrow, current_stream, memory, rows_view
from ._weights import Batch, Weights, on_device

PHASES = ("none", "count", "dispatch", "experts", "combine")


def _output(value: Any, tokens: int, hidden: int, device: str, stream: int | None):
    tensor = borrow(value, "out", stream)
    on_device(tensor, "out", device)
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        raise InvalidArgumentError("out: a read-only array")
    view = rows_view(tensor, "out", hidden)
    if tensor.shape[0] < tokens:
        raise InvalidArgumentError(f"out: {tensor}; expected at least {tokens} rows")
    return tensor, view


def _int64(array: np.ndarray) -> Any:
    return cast(array.ctypes.data, POINTER(c_int64))


def _map(physical_to_logical: Iterable[int] | None, into: Any) -> np.ndarray:
    """The map as an array, set in the C options `into`; empty for None."""
    physical = np.ascontiguousarray([] if physical_to_logical is None
                                    else list(physical_to_logical), np.int32)
    if physical.size:
        into.physical_to_logical = cast(physical.ctypes.data, POINTER(c_int32))
        into.physical_experts = physical.size
    return physical


class Workspace(Handle):
    """The buffers of one (communicator, device, shape, capacity); one serves all layers of a shape.

    hidden, intermediate, experts, topk: of the layers. `tokens`: the largest batch of this rank.
    input_scale: "token", "block" or "block_f32" (docs/numerics.md, item 1). activations: "e4m3",
    or "int8" on a CPU, faster there, with sums of their own (item 3). pool_rows: routes that a rank
    can receive; 0 is a default. deadline_ms: of waits between ranks; 0 is 30 seconds.

    Collective. Calls on one workspace are ordered by the caller: by one stream, or by events. It is
    closed, and collected, when no rank is inside a forward of it.
    """

    def __init__(self, device: Device, *, hidden: int, intermediate: int, experts: int, topk: int,
                 tokens: int, comm: Comm | None = None, input_scale: str = "token",
                 activations: str = "e4m3", physical_experts: int = 0, pool_rows: int = 0,
                 deadline_ms: int = 0):
        own_comm = comm is None
        comm = comm or Comm()
        shape = _abi.Shape(hidden=hidden, intermediate=intermediate, experts=experts, topk=topk,
                           input_scale=choice(_abi.INPUT_SCALES, input_scale, "input_scale"),
                           activations=choice(_abi.ACTIVATIONS, activations, "activations"),
                           physical_experts=physical_experts)
        capacity = _abi.Capacity(tokens=tokens, pool_rows=pool_rows, deadline_ms=deadline_ms)
        result = c_void_p()
        try:
            check(lib.megamoe_workspace_create(comm.pointer, device.pointer, byref(shape),
                                               byref(capacity), byref(result)))
        except Exception:
            if own_comm:
                comm.close()
            raise
        super().__init__(result.value, lib.megamoe_workspace_close, device, comm)
        self.device, self.comm = device, comm
        self.hidden, self.topk, self.tokens = hidden, topk, tokens
        self.activations, self.input_scale = activations, input_scale
        self._staged = 0

    @property
    def nbytes(self) -> int:
        """Bytes reserved in the memory of the device."""
        return lib.megamoe_workspace_bytes(self.pointer)

    def parts(self) -> dict[str, int]:
        """What these bytes are for."""
        what, size = c_char_p(), c_uint64()
        parts: dict[str, int] = {}
        while lib.megamoe_workspace_part(self.pointer, len(parts), byref(what), byref(size)):
            parts[(what.value or b"").decode()] = size.value
        return parts

    def stage(self, x: Any, topk_ids: Any, topk_weights: Any, *,
              stream: int | None = None) -> None:
        """Takes a batch.

        x: BF16 [n, hidden], rows a multiple of 8 elements apart; topk_ids: int32 or int64 [n, k],
        -1 masks a slot; topk_weights: float32 or BF16 [n, k]. All on this workspace's device.
        stream: a cudaStream_t as a number; by default torch's current one for torch tensors, else
        the default stream. Memory stays the callers' and must live until the stream has passed.
        """
        stream = current_stream(x) if stream is None else stream
        batch = Batch(x, topk_ids, topk_weights, self.hidden, self.device.name, stream)
        if batch.topk != self.topk:
            raise InvalidArgumentError(f"topk_ids: {batch.topk} slots for a token; this workspace "
                                       f"has {self.topk}")
        check(lib.megamoe_stage(self.pointer, *batch.views, batch.tokens, stream))
        self._staged = batch.tokens

    def views(self) -> dict[str, Any]:
        """Where a caller writes a batch by itself, for `commit`: "codes" [tokens, hidden],
        "scales" [tokens, 1 or hidden / 128], "topk_ids" int32 and "topk_weights" float32
        [tokens, topk] (include/megamoe/layer.h, megamoe_workspace_views).

        numpy arrays on a CPU; on a GPU objects with `__cuda_array_interface__`, such as
        torch.as_tensor takes. The codes of E4M3 and scales of E8M0 are uint8. They are memory of
        this workspace and keep it alive.
        """
        views = _abi.WorkspaceViews()
        check(lib.megamoe_workspace_get_views(self.pointer, byref(views)))
        by_token = self.activations == "e4m3" and self.input_scale == "token"
        columns = {"codes": self.hidden, "scales": 1 if by_token else -(-self.hidden // 128),
                   "topk_ids": self.topk, "topk_weights": self.topk}
        return {name: memory(getattr(views, name), count, self.device.type, self)
                for name, count in columns.items()}

    def commit(self, tokens: int, *, stream: int | None = None) -> None:
        """Declares the first `tokens` rows of `views()` to be the batch, instead of `stage`."""
        check(lib.megamoe_commit_staged(self.pointer, tokens, stream))
        self._staged = tokens

    def set_plan(self, *, token_tile: int = 0, lag: int = 0) -> None:
        """How a GPU cuts up later forwards; 0 leaves the choice to the library. No result depends
        on it. token_tile: tokens of a tile, one of the widths compiled; lag: token tiles by which
        FC2 follows FC1."""
        plan = _abi.Plan(token_tile=token_tile, lag=lag)
        check(lib.megamoe_workspace_set_plan(self.pointer, byref(plan)))

    def forward(self, layer: "Layer", out: Any, *, stream: int | None = None) -> None:
        """Computes the staged batch. Collective. out: BF16 [n, hidden], written.

        On the CPU it returns when `out` is written; on a GPU it enqueues one launch.
        """
        stream = current_stream(out) if stream is None else stream
        _, view = _output(out, self._staged, self.hidden, self.device.name, stream)
        check(lib.megamoe_forward(layer.pointer, self.pointer, byref(view), stream))

    def status(self) -> dict[str, Any]:
        """The pending error of this workspace, cleared by this call, with the details it has.

        Does not wait: on a GPU synchronize the stream first. "status" is 0 without an error.
        """
        detail = _abi.WorkspaceDetail()
        status = lib.megamoe_workspace_status(self.pointer, byref(detail))
        return {"status": status, "phase": PHASES[detail.phase], "rank": detail.rank,
                "epoch": detail.epoch, "token": detail.token, "slot": detail.slot,
                "value": detail.value, "message": detail.message.decode(errors="replace")}

    def raise_pending(self) -> None:
        """Raises the pending error, if there is one; see `status`."""
        found = self.status()
        if found["status"] != _abi.OK:
            raise error(found["status"], found["message"])

    def receive_counts(self, experts: int) -> np.ndarray:
        """Routes that this rank's `experts` physical experts received last: int64 [experts]."""
        counts = np.zeros(experts, np.int64)
        check(lib.megamoe_workspace_receive_counts(self.pointer, _int64(counts), experts))
        return counts

    def times(self) -> dict[str, float]:
        """Where the last forward's microseconds went. GPUs only; waits for the device."""
        times = _abi.WorkspaceTimes()
        check(lib.megamoe_workspace_get_times(self.pointer, byref(times)))
        return {name: getattr(times, name) for name, *_ in times._fields_[1:]}

    def __repr__(self) -> str:
        return f"Workspace({self.device.name}, tokens={self.tokens}, topk={self.topk})"


class Layer(Handle):
    """The packed weights of this rank's experts on a device.

    accumulate: "mma" or "promote" (docs/numerics.md, item 3). nvfp4: "exact" or "folded", for
    weights in checkpoint form. weight_after_fc2: multiply the routing weight in after FC2.
    map_prepared: on the CPU use a prepared file in place, mapped and shared between processes,
    instead of reading it; whoever cuts it then ends the process with SIGBUS.
    physical_to_logical: which expert each physical expert holds, for replicas.
    activations, input_scale: of the workspaces that the layer makes; see `Workspace`.
    round_outside_window: on a GPU round what lies outside its window instead of refusing it.

    progress(done, total): called while weights are packed or read, in bytes.

    `weights` may be closed once the layer is there.
    """

    def __init__(self, weights: Weights, device: Device | str = "cpu", *, comm: Comm | None = None,
                 accumulate: str = "mma", nvfp4: str = "exact", weight_after_fc2: bool = False,
                 map_prepared: bool = False, round_outside_window: bool = False,
                 physical_to_logical: Iterable[int] | None = None, activations: str = "e4m3",
                 input_scale: str = "token", progress: Progress | None = None):
        choice(_abi.ACTIVATIONS, activations, "activations")
        choice(_abi.INPUT_SCALES, input_scale, "input_scale")
        own: list[Handle] = []
        if comm is None:
            comm = Comm()
            own.append(comm)
        if not isinstance(device, Device):
            device = Device(device)
            own.append(device)
        options = _abi.LayerOptions(
            accumulate=choice(_abi.ACCUMULATE, accumulate, "accumulate"),
            nvfp4=choice(_abi.NVFP4_MODES, nvfp4, "nvfp4"), weight_after_fc2=weight_after_fc2,
            map_prepared=map_prepared, round_outside_window=round_outside_window,
            progress=progress_of(progress))
        physical = _map(physical_to_logical, options)
        result = c_void_p()
        try:
            check(lib.megamoe_layer_create(comm.pointer, device.pointer, weights.pointer,
                                           byref(options), byref(result)))
        except Exception:
            for handle in own:
                handle.close()
            raise
        super().__init__(result.value, lib.megamoe_layer_close, device, comm)
        self.device: Device = device
        self.comm = comm
        self.hidden, self.intermediate = weights.hidden, weights.intermediate
        self.experts, self.topk, self.format = weights.experts, weights.topk, weights.format
        self.physical_experts = physical.size or weights.experts
        self.activations, self.input_scale = activations, input_scale
        self._own = own
        self._workspaces: dict[int, Workspace] = {}

    @classmethod
    def open(cls, path: str | os.PathLike, device: Device | str = "cpu", *,
             layer: int | None = None, **options) -> "Layer":
        """From a prepared file (.mmoe), or from layer `layer` of a checkpoint (or its first)."""
        with Weights.open(path, layer) as weights:
            return cls(weights, device, **options)

    @property
    def nbytes(self) -> int:
        """Bytes of packed weights that this rank holds."""
        return lib.megamoe_layer_bytes(self.pointer)

    def workspace(self, tokens: int, topk: int | None = None, **options) -> Workspace:
        """A workspace for batches of up to `tokens` tokens; options as those of Workspace."""
        return Workspace(self.device, hidden=self.hidden, intermediate=self.intermediate,
                         experts=self.experts, topk=topk or self.topk, tokens=tokens,
                         **{"comm": self.comm, "physical_experts": self.physical_experts,
                            "activations": self.activations, "input_scale": self.input_scale,
                            **options})

    def prewarm(self, workspace: Workspace) -> None:
        """Makes the first forward cost what later ones do; on a GPU also allows graph capture and
        takes what `megamoe tune` has stored."""
        check(lib.megamoe_prewarm(self.pointer, workspace.pointer))
        check(lib.megamoe_use_tuned(self.pointer, workspace.pointer, None, None))

    def receive_counts(self) -> np.ndarray:
        """Routes that this rank's physical experts have received from this layer since it was
        made, placed or `reset_counts`: int64, in their order."""
        ranks, rank = self.comm.size, self.comm.rank
        counts = np.zeros(self.physical_experts // ranks + (rank < self.physical_experts % ranks),
                          np.int64)
        check(lib.megamoe_layer_receive_counts(self.pointer, _int64(counts), counts.size))
        return counts

    def reset_counts(self) -> None:
        """Sets the counts of `receive_counts` and `loads` to zero."""
        check(lib.megamoe_layer_reset_counts(self.pointer))

    def loads(self) -> np.ndarray:
        """Collective: these counts over all ranks and replicas, by expert: int64 [experts]."""
        loads = np.zeros(self.experts, np.int64)
        check(lib.megamoe_layer_loads(self.comm.pointer, self.pointer, _int64(loads), loads.size))
        return loads

    def place(self, physical_to_logical: Iterable[int] | None = None, *, comm: Comm | None = None,
              weights: Weights | None = None) -> None:
        """Collective, between forwards: moves the packed experts so that physical expert p holds
        physical_to_logical[p] (None: each its own), as `balance_experts` proposes. Bits stay.

        comm: another communicator, of the survivors of a fault. weights: from where experts are
        taken that this rank does not hold. Workspaces stay for the same communicator and number of
        physical experts; others are made anew by the caller. See include/megamoe/placement.h.
        """
        comm = comm or self.comm
        placement = _abi.Placement(weights=weights.pointer if weights else None)
        physical = _map(physical_to_logical, placement)
        check(lib.megamoe_layer_place(comm.pointer, self.pointer, byref(placement)))
        count = physical.size or self.experts
        if comm is not self.comm or count != self.physical_experts:
            self._close_workspaces()
        self.physical_experts = count
        if comm is not self.comm:
            comm._children.add(self)
            self._parents = (*self._parents, comm)
            self.comm = comm

    def __call__(self, x: Any, topk_ids: Any, topk_weights: Any, out: Any = None) -> Any:
        """One batch, in a workspace that the layer makes and keeps. For one rank.

        x: BF16 [n, hidden]; topk_ids: int32 or int64 [n, k]; topk_weights: float32 or BF16 [n, k];
        out: BF16 [n, hidden], written and returned. Without `out`, which only CPU layers can do, the
        result is a new array like a numpy `x`, else the bits of BF16 as uint16.
        """
        if self.comm.size > 1:
            raise InvalidArgumentError("a layer of several ranks is called through a Workspace")
        ids = borrow(topk_ids, "topk_ids")
        if len(ids.shape) != 2:
            raise InvalidArgumentError(f"topk_ids: {ids}; expected [tokens, topk]")
        tokens, topk = ids.shape
        if out is None:
            if self.device.type != "cpu":
                raise InvalidArgumentError("out: None; on a GPU it is the caller's")
            out = np.empty((tokens, self.hidden),
                           x.dtype if isinstance(x, np.ndarray) else np.uint16)
        kept = self._workspaces.get(topk)
        if kept is None or kept.tokens < tokens:
            room = max(tokens, 2 * kept.tokens if kept else 64)
            if kept:
                self._workspaces.pop(topk).close()
            kept = self._workspaces[topk] = self.workspace(room, topk)
            self.prewarm(kept)
        kept.stage(x, topk_ids, topk_weights)
        kept.forward(self, out)
        if self.device.type == "cpu":
            kept.raise_pending()
        return out

    def _close_workspaces(self) -> None:
        for workspace in self._workspaces.values():
            workspace.close()
        self._workspaces.clear()

    def close(self) -> None:
        """Closes it with the workspaces and the device that it has made itself."""
        self._close_workspaces()
        super().close()
        for handle in self._own:
            handle.close()

    def __repr__(self) -> str:
        return (f"Layer({self.device.name}, {self.format}, experts={self.experts}, "
                f"hidden={self.hidden}, intermediate={self.intermediate})")


def forward_group(layers: Sequence[Layer], workspaces: Sequence[Workspace], outs: Sequence[Any], *,
                  stream: int | None = None) -> None:
    """The forwards of all ranks of a folded communicator: entry r is that of rank r."""
    calls = (_abi.ForwardCall * len(layers))()
    keep: list[tuple[Tensor, Any]] = []
    for call, layer, workspace, out in zip(calls, layers, workspaces, outs, strict=True):
        on = current_stream(out) if stream is None else stream
        tensor, view = _output(out, workspace._staged, workspace.hidden, workspace.device.name, on)
        keep.append((tensor, view))
        call.layer, call.workspace = layer.pointer, workspace.pointer
        call.y, call.stream = pointer(view), on
    check(lib.megamoe_forward_group(calls, len(calls)))


def balance_experts(loads: Any, *, ranks: int, physical_experts: int) -> np.ndarray:
    """A map for `Layer.place` that spreads these loads, one for each expert, over the ranks:
    int32 [physical_experts]. The most loaded experts get replicas. The same input gives the same
    map, on every machine."""
    counts = np.ascontiguousarray(loads, np.int64)
    if counts.ndim != 1:
        raise InvalidArgumentError(f"loads: shape {list(counts.shape)}; expected [experts]")
    physical = np.zeros(max(physical_experts, 0), np.int32)
    check(lib.megamoe_placement_balance(_int64(counts), counts.size, ranks, physical.size,
                                        cast(physical.ctypes.data, POINTER(c_int32))))
    return physical
