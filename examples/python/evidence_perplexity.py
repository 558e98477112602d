# SPDX-License-Identifier: Apache-2.0
"""A small MoE language model, trained here, then evaluated with its experts in BF16 and 4 bits.

It learns bytes of the Python standard library's sources, which every machine with Python has, and is
evaluated on files that it has not seen. "weights only" computes with the same 4-bit weights, but
unquantized activations, by transformers' own experts. Standard errors are those of the mean over
sequences; the next columns compare each sequence with itself in BF16. Of the last one: eight
sequences run as a batch, then the rows of each alone go through each experts module; it counts those
that get other bits.
"""
import copy
import hashlib
import math
import os
import sys
import time
from pathlib import Path

import evidence
import megamoe.transformers
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig


CHANGED = "prompts that a batch changes, by layer"


def text(tiny: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to learn and bytes to be tested on, by file."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(Path(os.__file__).parent.rglob("*.py")):
        name = path.as_posix()
        if "site-packages" in name or "dist-packages" in name or (tiny and "/json/" not in name):
            continue
        held_out = hashlib.sha256(path.name.encode()).digest()[0] < 32
        parts[held_out].append(path.read_bytes() + b"\0")
    both = [b"".join(part) for part in parts]
    if tiny:  # a few files: split by place instead
        joined = both[0] + both[1]
        both = [joined[:-8192], joined[-8192:]]
    return tuple(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in both)


def build(tiny: bool, device: str) -> torch.nn.Module:
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=128 if tiny else 512, num_hidden_layers=2 if tiny else 8,
        num_attention_heads=4 if tiny else 8, num_key_value_heads=2 if tiny else 4,
        head_dim=32 if tiny else 64, num_experts=8 if tiny else 32,
        num_experts_per_tok=2 if tiny else 4, moe_intermediate_size=64 if tiny else 256,
        output_router_logits=True, router_aux_loss_coef=.01, norm_topk_prob=True, pad_token_id=None,
        eos_token_id=None, max_position_embeddings=1024)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def train(model: torch.nn.Module, data: torch.Tensor, seconds: float, batch: int, length: int,
          device: str) -> dict:
    """AdamW on float32 copies of the BF16 parameters, one warm-up and a cosine over the time."""
    parameters = list(model.parameters())
    copies = [parameter.detach().float() for parameter in parameters]
    optimizer = torch.optim.AdamW(copies, lr=1e-3, betas=(.9, .95), weight_decay=.1)
    generator = torch.Generator().manual_seed(1)
    data = data.to(device).long()
    model.train()
    begin, step, told, loss = time.monotonic(), 0, 0.0, torch.zeros(())
    while (spent := time.monotonic() - begin) < seconds:
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1, (step + 1) / 100) * (
            .55 + .45 * math.cos(math.pi * spent / seconds))
        starts = torch.randint(0, len(data) - length, (batch, 1), generator=generator).to(device)
        ids = data[starts + torch.arange(length, device=device)]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        for parameter, of in zip(parameters, copies):
            of.grad = parameter.grad.float() if parameter.grad is not None else None
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(copies, 1.0)
        optimizer.step()
        with torch.no_grad():
            for parameter, of in zip(parameters, copies):
                parameter.copy_(of)
        step += 1
        if spent > told:
            print(f"  {spent:5.0f} s, step {step}, loss {loss.item():.3f}", flush=True)
            told += seconds / 10
    model.eval()
    model.config.output_router_logits = False
    return {"steps": step, "bytes": step * batch * length, "loss": round(loss.item(), 4)}


@torch.no_grad()
def losses(model: torch.nn.Module, sequences: torch.Tensor, batch: int) -> torch.Tensor:
    """Mean nats for a byte, of each sequence."""
    found = []
    for ids in sequences.split(batch):
        logits = model(ids[:, :-1]).logits.float()
        found.append(torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(dim=1))
    return torch.cat(found).double().cpu()


@torch.no_grad()
def changed_by_batch(model: torch.nn.Module, ids: torch.Tensor) -> str:
    """How many of a batch's sequences get other bits from a layer than they get from it alone."""
    seen: list[tuple] = []
    modules = [module for _, module in megamoe.transformers.experts_modules(model)]
    hooks = [module.register_forward_hook(
        lambda module, args, y: seen.append((module, *args, y))) for module in modules]
    model(ids)
    for hook in hooks:
        hook.remove()
    differing = sum(
        not torch.equal(module(*(part[rows] for part in inputs)), y[rows])
        for module, *inputs, y in seen
        for rows in (slice(at, at + ids.shape[1]) for at in range(0, ids.numel(), ids.shape[1])))
    return f"{differing} of {len(seen) * len(ids)}"


def row(name: str, found: torch.Tensor, base: torch.Tensor) -> dict:
    error = found.std() / len(found) ** .5
    moved = found - base
    return {"experts": name, "perplexity": f"{found.mean().exp():.5f}",
            "standard error": f"{found.mean().exp() * error:.5f}",
            "nats over BF16": f"{moved.mean():+.6f}",
            "its standard error": f"{moved.std() / len(moved) ** .5:.6f}", CHANGED: ""}


def main() -> None:
    parser = evidence.arguments(__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, help="of training (default 150; tiny 8)")
    args = parser.parse_args()
    device = evidence.device_of(args)
    batch, length = (4, 64) if args.tiny else (32, 512)
    seconds = args.seconds or (8 if args.tiny else 150)

    learn, held_out = text(args.tiny)
    print(f"{len(learn):,} bytes to learn, {len(held_out):,} held out")
    model = build(args.tiny, device)
    # transformers' grouped_mm computes backward only on a GPU.
    own = "grouped_mm"
    model.set_experts_implementation(own)
    trained = train(model, learn, seconds, batch, length, device)
    print(f"trained: {trained}")

    count = min(len(held_out) // length, 32 if args.tiny else 1024)
    sequences = held_out[:count * length].view(count, length).to(device).long()
    base = losses(model, sequences, batch)
    rows = [row("BF16", base, base)]
    for format, nvfp4 in (("mxfp4", "exact"), ("nvfp4", "exact"), ("nvfp4", "folded")):
        name = "MXFP4" if format == "mxfp4" else f"NVFP4 {nvfp4}"
        other = copy.deepcopy(model)
        # A GPU refuses groups far below their row's largest unless it may round them, by at most
        # 2^-15 of that one; training may leave some.
        megamoe.transformers.quantize_experts(other, format, nvfp4=nvfp4, originals="replace",
                                              round_outside_window=device == "cuda")
        if nvfp4 == "exact":
            rows.append(row(f"{name}, weights only", losses(other, sequences, batch), base))
        other.set_experts_implementation("megamoe")
        rows.append({**row(name, losses(other, sequences, batch), base),
                     CHANGED: changed_by_batch(other, sequences[:8])})
    evidence.table(f"Perplexity of a byte over {count} held-out sequences of {length}", rows)
    evidence.save(args.json, {"machine": evidence.machine(device), "training": trained,
                              "parameters": sum(p.numel() for p in model.parameters()),
                              "rows": rows})
    sys.exit(any(not row[CHANGED].startswith("0 ") for row in rows if row[CHANGED]))


if __name__ == "__main__":
    main()
