# SPDX-License-Identifier: Apache-2.0
"""Random-weight models of two families: megamoe against the eager path with the same 4-bit weights.

Each experts module alone, on the input that it saw, against float32; and the logits, with the tokens
sent to the same experts, since a random model's routers flip at a rounding. The gates are those of
docs/numerics.md for activations that are not quantized. Then each token of a batch alone through
each module: the same bits.
"""
import sys

import evidence
import megamoe.transformers
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

GATES = {"exact": 6e-2, "folded": 8e-2}
FORMATS = (("mxfp4", "exact"), ("nvfp4", "exact"), ("nvfp4", "folded"))


def build(family: str, tiny: bool, device: str) -> torch.nn.Module:
    layers = 2 if tiny else 6
    sizes = {"vocab_size": 512, "hidden_size": 128 if tiny else 2048, "num_hidden_layers": layers,
             "num_attention_heads": 4 if tiny else 32, "num_key_value_heads": 2 if tiny else 4,
             "head_dim": 32 if tiny else 64, "pad_token_id": 0, "eos_token_id": 1,
             "num_experts_per_tok": 2 if tiny else 4}
    experts, intermediate = (8, 64) if tiny else (32, 768)
    config = Qwen3MoeConfig(**sizes, num_experts=experts, moe_intermediate_size=intermediate) \
        if family == "Qwen3-MoE" else \
        GptOssConfig(**sizes, num_local_experts=experts, intermediate_size=intermediate,
                     layer_types=["full_attention"] * layers)
    torch.manual_seed(1)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:  # so that the experts weigh as much as attention
                parameter.normal_(std=.1 if "bias" in name else parameter.shape[-1] ** -.5)
    return model


def run(model, ids, implementation, routes=None):
    """Logits, and (x, topk_ids, topk_weights, y) of each module, on the routes of an earlier run."""
    seen, hooks = [], []
    for place, (_, module) in enumerate(megamoe.transformers.experts_modules(model)):
        if routes:
            hooks.append(module.register_forward_pre_hook(
                lambda _, args, place=place: (args[0], *routes[place][1:3])))
        hooks.append(module.register_forward_hook(lambda _, args, y: seen.append((*args, y))))
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        logits = model(ids).logits.float()
    for hook in hooks:
        hook.remove()
    return logits, seen


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def measure(family: str, format: str, nvfp4: str, tiny: bool, device: str) -> dict:
    model = build(family, tiny, device)
    count = megamoe.transformers.quantize_experts(model, format, nvfp4=nvfp4, originals="replace")
    ids = torch.randint(2, 512, (2 if tiny else 8, 24 if tiny else 128), device=device,
                        generator=torch.Generator(device).manual_seed(1))
    expected, routes = run(model, ids, "eager")
    logits, seen = run(model, ids, "megamoe", routes)
    worst, differing, rows = 0.0, 0, 0
    for (_, module), (x, index, scale, y) in zip(
            megamoe.transformers.experts_modules(model), seen, strict=True):
        with torch.no_grad():
            for row in range(0, len(x), 1 + len(x) // 64):
                one = slice(row, row + 1)
                differing += not torch.equal(module(x[one], index[one], scale[one]), y[one])
                rows += 1
            model.set_experts_implementation("eager")
            exact = module.float()(x.float(), index, scale.float())
            model.set_experts_implementation("megamoe")
            module.to(torch.bfloat16)
        worst = max(worst, distance(y, exact))
    found = distance(logits, expected)
    gate = GATES[nvfp4]
    return {"family": family, "format": format if format == "mxfp4" else f"{format} {nvfp4}",
            "layers": count, "worst layer": f"{worst:.4f}", "gate": gate,
            "logits": f"{found:.4f}", "gate of logits": f"{gate * count ** .5:.4f}",
            "rows that a batch changes": f"{differing} of {rows}",
            "passed": worst < gate and found < gate * count ** .5 and not differing}


def main() -> None:
    args = evidence.arguments(__doc__.splitlines()[0]).parse_args()
    device = evidence.device_of(args)
    rows = [measure(family, format, nvfp4, args.tiny, device)
            for family in ("Qwen3-MoE", "gpt-oss") for format, nvfp4 in FORMATS]
    evidence.table("Relative distance from the eager path with the same weights", rows)
    evidence.save(args.json, {"machine": evidence.machine(device), "rows": rows})
    sys.exit(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    main()
