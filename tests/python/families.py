# SPDX-License-Identifier: Apache-2.0
"""The experts classes of the installed transformers, each alone and small."""
import importlib
import inspect
import re
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig

EXPERTS, HIDDEN, INTERMEDIATE, TOPK = 8, 128, 64, 2
# What configs call these sizes.
_SIZES = {**dict.fromkeys(("hidden_size",), HIDDEN),
          **dict.fromkeys(("moe_intermediate_size", "intermediate_size", "expert_ffn_hidden_size"),
                          INTERMEDIATE),
          **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
          "num_experts_per_tok": TOPK}


def dispatched():
    """(family, class) of all experts that transformers dispatches by name."""
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        names = re.findall(r"@use_experts_implementation[^\n]*\nclass (\w+)", path.read_text())
        if names:
            family = path.parent.name
            module = importlib.import_module(f"transformers.models.{family}.{path.stem}")
            for name in names:
                yield family, getattr(module, name)


def build(family, kind, dtype=torch.bfloat16):
    """Experts with random weights inside a module that has a config, or None where no config of the
    family fits."""
    module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    configs = [value for value in vars(module).values() if inspect.isclass(value)
               and issubclass(value, PreTrainedConfig) and value.__module__ == module.__name__]
    for of in sorted(configs, key=lambda one: "Text" not in one.__name__):
        try:
            config = of()
            for name, value in _SIZES.items():
                if hasattr(config, name):
                    setattr(config, name, value)
            config._experts_implementation = "eager"
            experts = kind(config)
        except Exception:  # configs and their checks fail in many ways
            continue
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in experts.named_parameters():
                parameter.normal_(std=.1 if "bias" in name else max(parameter.shape) ** -.5)
        model = torch.nn.Module()
        model.experts = experts.to(dtype).eval()
        return model
    return None
