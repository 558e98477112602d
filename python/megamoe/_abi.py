# SPDX-License-Identifier: Apache-2.0
"""The C interface: constants, structs and prototypes of the headers in include/megamoe/.

tests/python/test_abi.py compares every struct here with the headers, member by member.
"""
from __future__ import annotations

import ctypes
import os
from ctypes import (CFUNCTYPE, POINTER, Structure, c_bool, c_char, c_char_p, c_double, c_float,
                    c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p)

OK, EINVAL, ENOMEM, EIO, EFORMAT, ENOTFOUND, EUNSUPPORTED, EINEXACT = 0, -1, -2, -3, -4, -5, -6, -7
ECAPACITY, EID, ESTATE, ETIMEDOUT, EPEER, EDEVICE, ECHECK = -8, -9, -10, -11, -12, -13, -14

DTYPE_BF16, DTYPE_F32, DTYPE_E4M3, DTYPE_E8M0, DTYPE_I32, DTYPE_I64, DTYPE_I8 = 1, 2, 3, 4, 5, 6, 7

FORMATS = {"mxfp4": 1, "nvfp4": 2}
GATE, UP, DOWN = 0, 1, 2
NVFP4_MODES = {"exact": 0, "folded": 1}
ACCUMULATE = {"mma": 0, "promote": 1}
ACTIVATIONS = {"e4m3": 0, "int8": 1}
INPUT_SCALES = {"token": 0, "block": 1, "block_f32": 2}
SUMS = {"fp32": 0, "wgmma": 1}
ROUTER_RULES = {"softmax": 1, "sigmoid": 2, "sqrt-softplus": 3, "softmax-selected": 4}


class Sized(Structure):
    """A struct that begins with struct_size, which is filled in here."""

    def __init__(self, **members):
        super().__init__(**members)
        self.struct_size = ctypes.sizeof(self)


class View(Structure):
    _fields_ = [("data", c_void_p), ("dtype", c_int), ("rows", c_int64), ("stride", c_int64)]


PROGRESS_FN = CFUNCTYPE(None, c_void_p, c_uint64, c_uint64)


class Progress(Structure):
    _fields_ = [("fn", PROGRESS_FN), ("user", c_void_p)]


class DeviceOptions(Sized):
    _fields_ = [("struct_size", c_size_t), ("threads", c_int32), ("first_core", c_int32),
                ("no_pinning", c_bool), ("max_ctas", c_int32)]


class DeviceInfo(Sized):
    _fields_ = [("struct_size", c_size_t), ("name", c_char * 64), ("model", c_char * 64),
                ("tier", c_char * 16), ("threads", c_int32), ("cores", c_int32),
                ("pinned", c_bool), ("cuda_built", c_bool), ("multiprocessors", c_int32),
                ("max_ctas", c_int32), ("capability_major", c_int32),
                ("capability_minor", c_int32), ("driver_version", c_int32),
                ("memory_bytes", c_uint64)]


class DeviceCeilings(Sized):
    _fields_ = [("struct_size", c_size_t), ("read_gbs", c_double), ("dot_gflops", c_double),
                ("copy_gbs", c_double), ("mma_tflops", c_double), ("int8_gops", c_double)]


ALLGATHER_FN = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_size_t, c_int32)
USER_FN = CFUNCTYPE(None, c_void_p)


class CommOptions(Sized):
    _fields_ = [("struct_size", c_size_t), ("creation_deadline_ms", c_int32)]


class TcpOptions(Sized):
    _fields_ = [("struct_size", c_size_t), ("rank", c_int32), ("size", c_int32),
                ("address", c_char_p), ("port", c_int32), ("job", c_char_p),
                ("creation_deadline_ms", c_int32)]


class Bootstrap(Sized):
    _fields_ = [("struct_size", c_size_t), ("rank", c_int32), ("size", c_int32),
                ("creation_deadline_ms", c_int32), ("user", c_void_p),
                ("allgather", ALLGATHER_FN), ("abort", USER_FN), ("close", USER_FN)]


ALLTOALLV_FN = CFUNCTYPE(c_int, c_void_p, c_void_p, POINTER(c_size_t), POINTER(c_size_t), c_void_p,
                         POINTER(c_size_t), POINTER(c_size_t), c_int32)


class Transport(Sized):
    _fields_ = [("struct_size", c_size_t), ("rank", c_int32), ("size", c_int32),
                ("creation_deadline_ms", c_int32), ("user", c_void_p),
                ("allgather", ALLGATHER_FN), ("alltoallv", ALLTOALLV_FN), ("abort", USER_FN),
                ("close", USER_FN)]


class Activation(Structure):
    _fields_ = [("alpha", c_float), ("offset", c_float), ("limit", c_float)]


class LayerDesc(Sized):
    _fields_ = [("struct_size", c_size_t), ("layer", c_int32), ("hidden", c_int32),
                ("intermediate", c_int32), ("experts", c_int32), ("topk", c_int32),
                ("format", c_int), ("activation", Activation), ("has_bias", c_bool)]


class StoredLayer(Sized):
    _fields_ = [("struct_size", c_size_t), ("family", c_char * 32), ("format", c_char * 16),
                ("wide", c_bool), ("has_bias", c_bool), ("hidden", c_int32),
                ("intermediate", c_int32), ("experts", c_int32), ("topk", c_int32),
                ("block_rows", c_int32), ("block_columns", c_int32), ("activation", Activation)]


class Matrix(Structure):
    _fields_ = [("codes", c_void_p), ("codes_stride", c_size_t), ("scales", c_void_p),
                ("scales_stride", c_size_t), ("global_scale", c_float), ("bias", c_void_p),
                ("bias_dtype", c_int), ("bias_stride", c_size_t)]


class PrepareOptions(Sized):
    _fields_ = [("struct_size", c_size_t), ("device", c_char_p), ("nvfp4", c_int),
                ("threads", c_int32), ("progress", Progress), ("round_outside_window", c_bool)]


class CheckpointInfo(Sized):
    _fields_ = [("struct_size", c_size_t), ("family", c_char * 32), ("model_type", c_char * 64),
                ("files", c_uint64), ("tensors", c_uint64), ("bytes", c_uint64),
                ("layers", c_int32)]


class QuantizeOptions(Sized):
    _fields_ = [("struct_size", c_size_t), ("format", c_int), ("threads", c_int32),
                ("progress", Progress)]


class ConvertOptions(Sized):
    _fields_ = [("struct_size", c_size_t), ("family", c_char_p), ("format", c_int),
                ("progress", Progress)]


class RouterDesc(Sized):
    _fields_ = [("struct_size", c_size_t), ("rule", c_int), ("hidden", c_int32),
                ("experts", c_int32), ("topk", c_int32), ("groups", c_int32),
                ("groups_kept", c_int32), ("normalize", c_bool), ("normalize_epsilon", c_float),
                ("scaling", c_float), ("gate_temperature", c_float), ("hash_vocab", c_int64)]


class LayerOptions(Sized):
    _fields_ = [("struct_size", c_size_t), ("accumulate", c_int), ("weight_after_fc2", c_bool),
                ("nvfp4", c_int), ("map_prepared", c_bool),
                ("physical_to_logical", POINTER(c_int32)), ("physical_experts", c_int32),
                ("round_outside_window", c_bool), ("progress", Progress)]


class Shape(Sized):
    _fields_ = [("struct_size", c_size_t), ("hidden", c_int32), ("intermediate", c_int32),
                ("experts", c_int32), ("topk", c_int32), ("input_scale", c_int),
                ("physical_experts", c_int32), ("activations", c_int)]


class Capacity(Sized):
    _fields_ = [("struct_size", c_size_t), ("tokens", c_int64), ("pool_rows", c_int64),
                ("deadline_ms", c_int32), ("trace", c_int64)]


class WorkspaceViews(Sized):
    _fields_ = [("struct_size", c_size_t), ("codes", View), ("scales", View), ("topk_ids", View),
                ("topk_weights", View)]


class Plan(Sized):
    _fields_ = [("struct_size", c_size_t), ("token_tile", c_int32), ("lag", c_int32)]


class Placement(Sized):
    _fields_ = [("struct_size", c_size_t), ("physical_to_logical", POINTER(c_int32)),
                ("physical_experts", c_int32), ("weights", c_void_p)]


class ForwardCall(Structure):
    _fields_ = [("layer", c_void_p), ("workspace", c_void_p), ("y", POINTER(View)),
                ("stream", c_void_p)]


class WorkspaceDetail(Sized):
    _fields_ = [("struct_size", c_size_t), ("status", c_int), ("phase", c_int), ("rank", c_int32),
                ("epoch", c_uint64), ("token", c_int64), ("slot", c_int32), ("value", c_int64),
                ("message", c_char * 256)]


class WorkspaceTimes(Sized):
    _fields_ = [("struct_size", c_size_t), ("begin_us", c_double), ("dispatch_us", c_double),
                ("fc1_us", c_double), ("fc2_us", c_double), ("combine_us", c_double),
                ("idle_us", c_double), ("total_us", c_double)]


class ReferenceOptions(Sized):
    _fields_ = [("struct_size", c_size_t), ("sum", c_int), ("accumulate", c_int),
                ("nvfp4", c_int), ("weight_after_fc2", c_bool), ("input_scale", c_int),
                ("threads", c_int32), ("progress", Progress), ("activations", c_int)]


# The C names of the structs above, for the test that compares them.
STRUCTS = {
    "megamoe_view": View, "megamoe_progress": Progress,
    "megamoe_device_options": DeviceOptions, "megamoe_device_info": DeviceInfo,
    "megamoe_device_ceilings": DeviceCeilings, "megamoe_comm_options": CommOptions,
    "megamoe_comm_tcp_options": TcpOptions, "megamoe_bootstrap": Bootstrap,
    "megamoe_transport": Transport,
    "megamoe_activation": Activation, "megamoe_layer_desc": LayerDesc,
    "megamoe_matrix": Matrix, "megamoe_prepare_options": PrepareOptions,
    "megamoe_checkpoint_info": CheckpointInfo, "megamoe_quantize_options": QuantizeOptions,
    "megamoe_stored_layer": StoredLayer, "megamoe_convert_options": ConvertOptions,
    "megamoe_router_desc": RouterDesc, "megamoe_workspace_views": WorkspaceViews,
    "megamoe_plan": Plan, "megamoe_placement": Placement,
    "megamoe_layer_options": LayerOptions, "megamoe_shape": Shape, "megamoe_capacity": Capacity,
    "megamoe_forward_call": ForwardCall, "megamoe_workspace_detail": WorkspaceDetail,
    "megamoe_workspace_times": WorkspaceTimes, "megamoe_reference_options": ReferenceOptions,
}

_handle = POINTER(c_void_p)
_view = POINTER(View)
_status = c_int

# name: (result, arguments); c_void_p stands for the opaque objects and for streams.
PROTOTYPES = {
    "megamoe_version": (c_char_p, []),
    "megamoe_status_name": (c_char_p, [c_int]),
    "megamoe_status_text": (c_char_p, [c_int]),
    "megamoe_last_error": (c_char_p, []),
    "megamoe_device_open": (_status, [c_char_p, POINTER(DeviceOptions), _handle]),
    "megamoe_device_close": (None, [c_void_p]),
    "megamoe_device_count": (_status, [c_char_p, POINTER(c_int32)]),
    "megamoe_device_describe": (_status, [c_void_p, POINTER(DeviceInfo)]),
    "megamoe_device_measure": (_status, [c_void_p, POINTER(DeviceCeilings)]),
    "megamoe_comm_self": (_status, [_handle]),
    "megamoe_comm_threads": (_status, [c_int32, _handle]),
    "megamoe_comm_folded": (_status, [c_int32, _handle]),
    "megamoe_comm_from_env": (_status, [POINTER(CommOptions), _handle]),
    "megamoe_comm_tcp": (_status, [POINTER(TcpOptions), _handle]),
    "megamoe_comm_custom": (_status, [POINTER(Bootstrap), _handle]),
    "megamoe_comm_transport": (_status, [POINTER(Transport), _handle]),
    "megamoe_comm_close": (None, [c_void_p]),
    "megamoe_comm_rank": (c_int32, [c_void_p]),
    "megamoe_comm_size": (c_int32, [c_void_p]),
    "megamoe_comm_allgather": (_status, [c_void_p, c_void_p, c_void_p, c_size_t]),
    "megamoe_comm_abort": (None, [c_void_p]),
    "megamoe_weights_from_tensors": (_status, [POINTER(LayerDesc), POINTER(Matrix), _handle]),
    "megamoe_weights_open": (_status, [c_char_p, _handle]),
    "megamoe_weights_close": (None, [c_void_p]),
    "megamoe_weights_describe": (_status, [c_void_p, POINTER(LayerDesc)]),
    "megamoe_weights_device": (c_char_p, [c_void_p]),
    "megamoe_weights_nvfp4": (c_int, [c_void_p]),
    "megamoe_weights_unpack": (_status, [c_void_p, c_int32, c_int, c_void_p]),
    "megamoe_weights_router": (c_void_p, [c_void_p]),
    "megamoe_weights_prepare": (_status, [c_void_p, c_void_p, POINTER(PrepareOptions), c_char_p]),
    "megamoe_weights_verify": (_status, [c_void_p, Progress]),
    "megamoe_checkpoint_open": (_status, [c_char_p, _handle]),
    "megamoe_checkpoint_close": (None, [c_void_p]),
    "megamoe_checkpoint_describe": (_status, [c_void_p, POINTER(CheckpointInfo)]),
    "megamoe_checkpoint_layer": (c_int32, [c_void_p, c_int32]),
    "megamoe_checkpoint_weights": (_status, [c_void_p, c_int32, _handle]),
    "megamoe_checkpoint_quantize": (_status, [c_void_p, c_int32, POINTER(QuantizeOptions),
                                              _handle]),
    "megamoe_checkpoint_stored": (_status, [c_void_p, c_int32, POINTER(StoredLayer)]),
    "megamoe_checkpoint_convert": (_status, [c_void_p, POINTER(ConvertOptions), c_char_p]),
    "megamoe_checkpoint_router": (_status, [c_void_p, c_int32, _handle]),
    "megamoe_router_create": (_status, [POINTER(RouterDesc), _view, _view, _view, _view, _handle]),
    "megamoe_router_close": (None, [c_void_p]),
    "megamoe_router_describe": (_status, [c_void_p, POINTER(RouterDesc)]),
    "megamoe_router_route": (_status, [c_void_p, c_void_p, _view, _view, c_int64, _view, _view]),
    "megamoe_layer_create": (_status, [c_void_p, c_void_p, c_void_p, POINTER(LayerOptions),
                                       _handle]),
    "megamoe_layer_close": (None, [c_void_p]),
    "megamoe_layer_bytes": (c_uint64, [c_void_p]),
    "megamoe_layer_receive_counts": (_status, [c_void_p, POINTER(c_int64), c_int32]),
    "megamoe_layer_reset_counts": (_status, [c_void_p]),
    "megamoe_layer_loads": (_status, [c_void_p, c_void_p, POINTER(c_int64), c_int32]),
    "megamoe_layer_place": (_status, [c_void_p, c_void_p, POINTER(Placement)]),
    "megamoe_placement_balance": (_status, [POINTER(c_int64), c_int32, c_int32, c_int32,
                                            POINTER(c_int32)]),
    "megamoe_workspace_create": (_status, [c_void_p, c_void_p, POINTER(Shape), POINTER(Capacity),
                                           _handle]),
    "megamoe_workspace_close": (None, [c_void_p]),
    "megamoe_workspace_bytes": (c_uint64, [c_void_p]),
    "megamoe_workspace_part": (c_bool, [c_void_p, c_int32, POINTER(c_char_p), POINTER(c_uint64)]),
    "megamoe_prewarm": (_status, [c_void_p, c_void_p]),
    "megamoe_use_tuned": (_status, [c_void_p, c_void_p, c_void_p, POINTER(c_int32)]),
    "megamoe_stage": (_status, [c_void_p, _view, _view, _view, c_int64, c_void_p]),
    "megamoe_workspace_get_views": (_status, [c_void_p, POINTER(WorkspaceViews)]),
    "megamoe_commit_staged": (_status, [c_void_p, c_int64, c_void_p]),
    "megamoe_workspace_set_plan": (_status, [c_void_p, POINTER(Plan)]),
    "megamoe_forward": (_status, [c_void_p, c_void_p, _view, c_void_p]),
    "megamoe_forward_group": (_status, [POINTER(ForwardCall), c_int32]),
    "megamoe_workspace_status": (_status, [c_void_p, POINTER(WorkspaceDetail)]),
    "megamoe_workspace_receive_counts": (_status, [c_void_p, POINTER(c_int64), c_int32]),
    "megamoe_workspace_get_times": (_status, [c_void_p, POINTER(WorkspaceTimes)]),
    "megamoe_reference_forward": (_status, [c_void_p, POINTER(ReferenceOptions), c_int32, _view,
                                            _view, _view, c_int64, _view]),
}


def load() -> ctypes.CDLL:
    """The library: MEGAMOE_LIBRARY, else the one that this package carries, else the system's."""
    beside = os.path.join(os.path.dirname(__file__), "libmegamoe.so")
    path = os.environ.get("MEGAMOE_LIBRARY") or (
        beside if os.path.exists(beside) else "libmegamoe.so.0")
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"megamoe: cannot load its library: {error}. Install the package from a "
                          "checkout, or set MEGAMOE_LIBRARY to a libmegamoe.so") from error
    for name, (result, arguments) in PROTOTYPES.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise ImportError(f"megamoe: {path} has no {name}: it is older than this "
                              "package") from error
        function.restype, function.argtypes = result, arguments
    return library


lib = load()
