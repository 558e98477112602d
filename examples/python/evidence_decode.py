# SPDX-License-Identifier: Apache-2.0
"""Decoding with megamoe's experts against transformers' own grouped_mm.

A model of Qwen3-30B-A3B's layers, fewer of them, with random weights. Tokens per second of a greedy
decode for each batch size: as it is, and on a GPU as transformers compiles it for a static cache. And
one experts module alone, replayed from a CUDA graph on a GPU.
"""
import sys
import time

import evidence
import megamoe.transformers
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

BASELINE = "grouped_mm"


def build(tiny: bool, layers: int, device: str) -> torch.nn.Module:
    torch.manual_seed(1)
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 8,
             "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 32} if tiny else \
            {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128,
             "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4,
             "head_dim": 128}
    config = Qwen3MoeConfig(**sizes, vocab_size=512 if tiny else 32768, num_hidden_layers=layers,
                            norm_topk_prob=True, pad_token_id=0, eos_token_id=None)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def tokens_per_second(model, batch: int, new: int, device: str, **options) -> float:
    ids = torch.randint(1, 512, (batch, 16), device=device)
    best = 0.0
    for _ in range(3):  # the first compiles, if anything is compiled
        wait(device)
        begin = time.monotonic()
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, **options)
        wait(device)
        best = max(best, batch * new / (time.monotonic() - begin))
    return best


@torch.no_grad()
def microseconds(module, x, index, scale, device: str, repeat: int) -> float:
    """Of one forward of an experts module."""
    for _ in range(3):
        module(x, index, scale)
    call = lambda: module(x, index, scale)
    if device == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call = graph.replay
        call()
    times = []
    for _ in range(5):
        wait(device)
        begin = time.monotonic()
        for _ in range(repeat):
            call()
        wait(device)
        times.append((time.monotonic() - begin) / repeat * 1e6)
    return sorted(times)[2]


def main() -> None:
    parser = evidence.arguments(__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, help="of the model (default 8; tiny 2)")
    parser.add_argument("--compiled", type=int, nargs="*", default=[1], metavar="BATCH",
                        help="on a GPU also compile for these batches (default 1), a minute each")
    parser.add_argument("--format", default="mxfp4", choices=("mxfp4", "nvfp4"))
    args = parser.parse_args()
    device = evidence.device_of(args)
    model = build(args.tiny, args.layers or (2 if args.tiny else 8), device)
    begin = time.monotonic()
    megamoe.transformers.quantize_experts(model, args.format, originals="keep")
    print(f"quantized in {time.monotonic() - begin:.1f} s")

    hidden, failed = model.config.hidden_size, False
    module = next(megamoe.transformers.experts_modules(model))[1]
    alone, whole = [], []
    for tokens in (1, 4) if args.tiny else (1, 8, 32, 128, 512):
        x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
        scale, index = torch.rand(tokens, module.num_experts, device=device).topk(
            model.config.num_experts_per_tok)
        took = {}
        for implementation in (BASELINE, "megamoe"):
            model.set_experts_implementation(implementation)
            took[implementation] = microseconds(module, x, index, scale.to(x.dtype), device,
                                                5 if args.tiny else 50)
        alone.append({"tokens": tokens, **{f"{name}, us": f"{us:.1f}" for name, us in took.items()},
                      "times as fast": f"{took[BASELINE] / took['megamoe']:.2f}"})
    evidence.table(f"One experts module, {args.format}", alone)

    compiled = args.compiled if device == "cuda" else ()
    for batch in (1, 2) if args.tiny else (1, 8, 32, 128):
        for mode, options in (("as it is", {}), ("compiled", {"cache_implementation": "static"})):
            if options and batch not in compiled:
                continue
            line = {"batch": batch, "mode": mode}
            speeds = {}
            for implementation in (BASELINE, "megamoe"):
                model.set_experts_implementation(implementation)
                torch._dynamo.reset()
                try:
                    speeds[implementation] = tokens_per_second(
                        model, batch, 8 if args.tiny else 128, device, **options)
                    line[f"{implementation}, tokens/s"] = f"{speeds[implementation]:.0f}"
                except RuntimeError as error:  # one mode must not cost the others' results
                    failed = True
                    line[f"{implementation}, tokens/s"] = "failed"
                    print(f"{mode}, batch {batch}, {implementation}: {error}", file=sys.stderr)
            if len(speeds) == 2:
                line["times as fast"] = f"{speeds['megamoe'] / speeds[BASELINE]:.2f}"
            whole.append(line)
    evidence.table(f"Greedy decode, {model.config.num_hidden_layers} layers", whole)
    evidence.save(args.json, {"machine": evidence.machine(device), "format": args.format,
                              "module": alone, "decode": whole})
    sys.exit(failed)


if __name__ == "__main__":
    main()
