# SPDX-License-Identifier: Apache-2.0
"""megamoe for Hugging Face transformers (5.x): an experts implementation named "megamoe".

    import megamoe.transformers
    megamoe.transformers.quantize_experts(model, "mxfp4")      # or load_experts(model, directory)
    model.set_experts_implementation("megamoe")

Every model whose experts transformers dispatches by name, and whose activation is a SwiGLU that
docs/numerics.md describes (Qwen3-MoE, gpt-oss, DeepSeek-V3 and V4, GLM MoE, Mixtral, ...); for others
the first call says what they have instead. Attention, routers and shared experts stay as they are.
"""
from __future__ import annotations

import os
import re
from typing import Any, Callable, Iterator

import numpy as np
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from . import _abi
from ._errors import InvalidArgumentError, StateError, UnsupportedError
from ._objects import Checkpoint, Device, choice
from ._weights import Activation, Projection, Weights
from .torch import DEFAULT_MAX_TOKENS, MegaMoELayer, quantize

NAME = "megamoe"
ORIGINALS = ("release", "keep", "replace")


def experts_forward(self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                    top_k_weights: torch.Tensor) -> torch.Tensor:
    """The forward of an experts module: hidden_states bfloat16 [tokens, hidden], top_k_index and
    top_k_weights [tokens, k] -> bfloat16 [tokens, hidden]."""
    layer = getattr(self, NAME, None)
    if layer is None:
        raise StateError(
            f"{type(self).__name__} has no 4-bit weights yet: call megamoe.transformers."
            "quantize_experts(model, \"mxfp4\" or \"nvfp4\"), or load_experts(model, directory) for "
            "a checkpoint, before the model runs with the experts implementation \"megamoe\"")
    return layer(hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def experts_modules(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of each group of experts whose forward transformers dispatches by name."""
    marks = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts", "config")
    for name, module in model.named_modules():
        if all(hasattr(module, mark) for mark in marks):
            yield name, module


def quantize_experts(model: torch.nn.Module, format: str, *, originals: str = "release",
                     device: str | torch.device | Device | None = None, topk: int | None = None,
                     max_tokens: int = DEFAULT_MAX_TOKENS,
                     progress: Callable[[str], None] | None = None, **options: Any) -> int:
    """Rounds the experts of a BF16 model to "mxfp4" or "nvfp4" (`megamoe.quantize` says how).

    originals: what becomes of the parameters: "release" empties them, "keep" leaves them, "replace"
    gives them the values of the 4-bit weights, so that other implementations compute with these
    (biases stay as they are).
    device: by default that of the parameters. topk: experts of a token, by default the config's.
    options: of `megamoe.Layer`, such as nvfp4="folded", activations="int8" on a CPU, or comm= of ranks
    that run the same model and share its experts. progress is called with each module's name.
    Returns the number of modules.
    """
    choice(_abi.FORMATS, format, "format")

    def weights_of(name: str, module: Any, activation: Activation) -> Weights:
        return _quantized(module, format, activation, _topk(module, topk))

    return _attach(model, weights_of, originals, device, topk, max_tokens, progress, options)


def load_experts(model: torch.nn.Module, path: str | os.PathLike, format: str | None = None, *,
                 originals: str = "release",
                 device: str | torch.device | Device | None = None, topk: int | None = None,
                 max_tokens: int = DEFAULT_MAX_TOKENS,
                 progress: Callable[[str], None] | None = None, **options: Any) -> int:
    """Takes the 4-bit experts of a checkpoint as they are: layer i from layer i of the model.

    path: a directory that `megamoe.Checkpoint` reads (docs/formats.md). format: "mxfp4" or "nvfp4"
    rounds experts that are stored in FP8 or BF16, by all cores. The other arguments, and what is
    returned, are those of `quantize_experts`.
    """
    with Checkpoint(path) as checkpoint:

        def weights_of(name: str, module: Any, activation: Activation) -> Weights:
            found = re.findall(r"(?:^|\.)layers\.(\d+)\.", name + ".")
            if not found:
                raise UnsupportedError(f"{name}: its name does not say which layer it is")
            layer = int(found[-1])
            weights = (checkpoint.weights(layer) if format is None
                       else checkpoint.quantize(layer, format))
            _compare(name, module, weights, activation)
            return weights

        return _attach(model, weights_of, originals, device, topk, max_tokens, progress, options)


def _attach(model: torch.nn.Module, weights_of: Callable, originals: str,
            device: str | torch.device | Device | None, topk: int | None, max_tokens: int,
            progress: Callable[[str], None] | None, options: dict[str, Any]) -> int:
    if originals not in ORIGINALS:
        raise InvalidArgumentError(f"originals={originals!r}; expected one of "
                                   f"{', '.join(ORIGINALS)}")
    modules = list(experts_modules(model))
    if not modules:
        raise UnsupportedError(
            f"{type(model).__name__} has no experts that transformers dispatches by name: it is no "
            "mixture of experts, or its experts were replaced when it was loaded (by a quantizer: "
            "load it dequantized)")
    activations = [_supported(name, module) for name, module in modules]
    for (name, module), activation in zip(modules, activations):
        if progress:
            progress(name)
        with weights_of(name, module, activation) as weights:
            where = module.down_proj.device if device is None else device
            layer = MegaMoELayer(weights, where, topk=_topk(module, topk), max_tokens=max_tokens,
                                 **options)
            if originals == "replace":
                _write_back(module, weights)
        setattr(module, NAME, layer)
        if originals == "release":
            _release(module)
    return len(modules)


# ---- What a module computes ----

def _supported(name: str, module: Any) -> Activation:
    """The activation of a module; UnsupportedError names what there is no kernel for."""
    what = f"{name} ({type(module).__name__})"
    if not module.has_gate:
        raise UnsupportedError(f"{what}: experts without a gate; only gated ones are run")
    if getattr(module, "has_post_expert_norm", False):
        raise UnsupportedError(f"{what}: a norm after each expert is not run")
    if getattr(module, "_is_expert_parallel", False):
        raise UnsupportedError(f"{what}: its experts are spread by transformers' expert "
                               "parallelism; load the model without it")
    for part in ("gate_up_proj", "down_proj"):
        if not isinstance(getattr(module, part, None), torch.nn.Parameter):
            raise UnsupportedError(f"{what}: no parameter {part}")
        parameter = getattr(module, part)
        if parameter.numel() == 0:
            raise StateError(f"{what}: {part} was released when its experts were taken; load the "
                             "model again")
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            raise UnsupportedError(f"{what}: {part} is {parameter.dtype}; expected bfloat16, "
                                   "float16 or float32")
    return _activation(what, module)


def _activation(what: str, module: Any) -> Activation:
    """Which activation `_apply_gate` is, found by trying it on values."""
    generator = torch.Generator().manual_seed(1)
    gate, up = (8 * torch.randn(2, 64, 32, generator=generator)).unbind()
    fused = (torch.cat([gate, up], dim=-1) if module.is_concatenated
             else torch.stack([gate, up], dim=-1).flatten(-2))
    with torch.no_grad():
        found = module._apply_gate(fused.to(module.down_proj.device)).float().cpu()
    alphas = {1.0, *_numbers(module, "alpha", "swiglu_alpha")}
    limits = {0.0, *_numbers(module, "limit", "swiglu_limit")}
    for alpha in alphas:
        for offset in (0.0, 1.0):
            for limit in limits:
                g = gate.clamp(max=limit) if limit else gate
                u = up.clamp(-limit, limit) if limit else up
                expected = g * torch.sigmoid(alpha * g) * (u + offset)
                if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4,
                                                                    atol=1e-5):
                    return Activation(alpha, offset, limit)
    raise UnsupportedError(
        f"{what}: its activation ({getattr(module, 'act_fn', '_apply_gate')}) is no SwiGLU of the "
        "form g / (1 + exp(-alpha g)) * (u + offset)")


def _numbers(module: Any, *names: str) -> list[float]:
    values = [getattr(holder, name, None) for holder in (module, module.config) for name in names]
    return [float(value) for value in values if isinstance(value, (int, float)) and value > 0]


def _topk(module: Any, topk: int | None) -> int:
    for name in ("num_experts_per_tok", "experts_per_token", "moe_topk", "top_k_experts", "moe_k"):
        topk = topk or getattr(module.config, name, None)
    if not topk:
        raise InvalidArgumentError(f"topk: {type(module.config).__name__} does not say how many "
                                   "experts a token has; pass topk=")
    return topk


def _sizes(module: Any) -> tuple[int, int, int]:
    """experts, hidden and intermediate."""
    experts, hidden, intermediate = module.down_proj.shape
    return (experts, intermediate, hidden) if module.is_transposed else (experts, hidden,
                                                                        intermediate)


def _compare(name: str, module: Any, weights: Weights, activation: Activation) -> None:
    """Refuses a checkpoint of another model than `module` belongs to."""
    of_weights = (weights.experts, weights.hidden, weights.intermediate)
    if of_weights != _sizes(module):
        raise InvalidArgumentError(
            f"{name}: (experts, hidden, intermediate) are {of_weights} in the checkpoint and "
            f"{_sizes(module)} in the model")
    if weights.has_bias != module.has_bias:
        raise InvalidArgumentError(f"{name}: biases are in only one of checkpoint and model")
    same = np.allclose([getattr(weights.activation, part) for part in ("alpha", "offset", "limit")],
                       [getattr(activation, part) for part in ("alpha", "offset", "limit")])
    if not same:
        raise InvalidArgumentError(f"{name}: {weights.activation} in the checkpoint and "
                                   f"{activation} in the model")


# ---- Its parameters ----

def _parts(module: Any) -> dict[str, torch.Tensor]:
    """gate, up and down as [experts, out, in]: views of the parameters."""
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if module.is_concatenated:
        gate, up = gate_up.chunk(2, dim=1)
    else:
        gate, up = gate_up[:, 0::2], gate_up[:, 1::2]
    return {"gate": gate, "up": up, "down": down}


def _biases(module: Any) -> dict[str, np.ndarray | None]:
    if not module.has_bias:
        return {"gate": None, "up": None, "down": None}
    gate_up = module.gate_up_proj_bias.detach().float().cpu()
    gate, up = (gate_up.chunk(2, dim=1) if module.is_concatenated
                else (gate_up[:, 0::2], gate_up[:, 1::2]))
    down = module.down_proj_bias.detach().float().cpu()
    return {name: part.numpy() for name, part in (("gate", gate), ("up", up), ("down", down))}


def _quantized(module: Any, format: str, activation: Activation, topk: int) -> Weights:
    biases = _biases(module)
    projections: dict[str, Any] = {}
    for name, part in _parts(module).items():
        codes, scales, global_scale = (plane.cpu().numpy() for plane in quantize(part, format))
        projections[name] = Projection(codes, scales, global_scale, biases[name])
    return Weights.from_tensors(**projections, format=format, topk=topk, activation=activation)


def _write_back(module: Any, weights: Weights) -> None:
    """Gives the parameters the values of the 4-bit weights, rounded to their dtype."""
    for name, part in _parts(module).items():
        for expert in range(weights.experts):
            part[expert].copy_(torch.from_numpy(weights.unpack(expert, name)))


def _release(module: Any) -> None:
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        parameter = getattr(module, name, None)
        if parameter is not None:
            parameter.data = parameter.data.new_empty(0)
