# SPDX-License-Identifier: Apache-2.0
"""Decoding with megamoe's experts against transformers' own grouped_mm in BF16.

A model of Qwen3-30B-A3B's layers, fewer of them, with random weights, made on the device. A step takes
one token of each sequence through the whole model, with a static cache, and chooses the next ones;
fed are those of a random text, so that all arms see the same tokens. Each arm's step is a CUDA graph,
then also eager, as transformers' generate runs it uncompiled. And one experts module alone, a CUDA
graph, after reading enough other memory to empty L2 of it. Arms take turns; each round compares them with the same load.

What --seconds do not allow is left out and named; the JSON file is written as results come.
"""
import inspect
import statistics
import sys
import time

import evidence
import megamoe.transformers
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, StaticCache

BASELINE = "BF16 grouped_mm"
ARMS = {"MXFP4": ("mxfp4", "exact"), "NVFP4 exact": ("nvfp4", "exact"),
        "NVFP4 folded": ("nvfp4", "folded")}
MAX_TOKENS = 512


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


class Arms:
    """The experts of a model in BF16 and, side by side, in 4 bits."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.modules = [module for _, module in megamoe.transformers.experts_modules(model)]
        self.layers: dict[str, list] = {BASELINE: []}

    def quantize(self, name: str) -> None:
        format, nvfp4 = ARMS[name]
        megamoe.transformers.quantize_experts(self.model, format, originals="keep", nvfp4=nvfp4,
                                              max_tokens=MAX_TOKENS)
        self.layers[name] = [module.megamoe for module in self.modules]

    def choose(self, name: str) -> None:
        self.model.set_experts_implementation("grouped_mm" if name == BASELINE else "megamoe")
        for module, layer in zip(self.modules, self.layers[name]):
            module.megamoe = layer


class Decoder:
    """A batch of sequences that grows by a token with each step, in memory that stays in place."""

    def __init__(self, model: torch.nn.Module, batch: int, steps: int, positions: int):
        device = model.device
        self.model, self.batch = model, batch
        self.cache = StaticCache(config=model.config, max_cache_len=positions)
        self.text = torch.randint(1, model.config.vocab_size, (steps + 1, batch), device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.positions = torch.arange(positions, device=device)
        self.chosen = torch.zeros(batch, dtype=torch.int64, device=device)
        parameters = inspect.signature(model.forward).parameters
        self.keyword = "cache" if "cache" in parameters else "past_key_values"

    def reset(self) -> None:
        self.cache.reset()
        self.place.zero_()

    @torch.no_grad()
    def step(self) -> None:
        ids = self.text.index_select(0, self.place).view(self.batch, 1)
        mask = (self.positions <= self.place).expand(self.batch, 1, 1, -1)
        logits = self.model(ids, attention_mask=mask, use_cache=True,
                            position_ids=self.place.expand(self.batch, 1),
                            **{self.keyword: self.cache}).logits
        self.chosen.copy_(logits[:, -1].argmax(dim=-1))
        self.place += 1


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def captured(call, device: str):
    """What replays `call` from a CUDA graph; on a CPU the call itself."""
    call()
    if device != "cuda":
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def in_turns(names: list[str], rounds: int, seconds_of) -> dict[str, list[float]]:
    """Microseconds of each arm in each round; every round begins with another one."""
    took: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):  # the first round only warms up
        for name in names[number % len(names):] + names[:number % len(names)]:
            us = seconds_of(name) * 1e6
            if number >= 0:
                took[name].append(round(us, 2))
    return took


def compared(took: dict[str, list[float]]) -> dict:
    """Medians, and how many times as fast as the baseline, by the median of the rounds' ratios."""
    return {"us": {name: round(statistics.median(rounds), 2) for name, rounds in took.items()},
            "times as fast": {name: round(statistics.median(
                base / us for base, us in zip(took[BASELINE], rounds)), 3)
                for name, rounds in took.items() if name != BASELINE},
            "rounds, us": took}


def experts_used(arms: Arms, decoder: Decoder) -> float:
    """Different experts of a step, by layer."""
    used: list[int] = []
    hooks = [module.register_forward_pre_hook(lambda _, args: used.append(len(args[1].unique())))
             for module in arms.modules]
    arms.choose(BASELINE)
    decoder.step()
    for hook in hooks:
        hook.remove()
    return round(statistics.mean(used), 1)


def decode(arms: Arms, batch: int, mode: str, tiny: bool, device: str) -> dict:
    steps = 4 if tiny else 32 if mode == "graph" else 8
    decoder = Decoder(arms.model, batch, max(steps, 8), 64 if tiny else 256)
    used = experts_used(arms, decoder)
    calls = {}
    for name in arms.layers:
        arms.choose(name)
        decoder.reset()
        calls[name] = captured(decoder.step, device) if mode == "graph" else decoder.step

    def seconds_of(name: str) -> float:
        arms.choose(name)
        decoder.reset()
        wait(device)
        begin = time.perf_counter()
        for _ in range(steps):
            calls[name]()
        wait(device)
        return (time.perf_counter() - begin) / steps

    found = compared(in_turns(list(calls), 3 if tiny or mode == "eager" else 7, seconds_of))
    return {"batch": batch, "mode": mode, "experts of a layer used": used,
            "tokens per second": {name: round(batch / us * 1e6) for name, us in
                                  found["us"].items()}, **found}


@torch.no_grad()
def alone(arms: Arms, tokens: int, tiny: bool, device: str) -> dict:
    """One experts module."""
    module, config = arms.modules[0], arms.model.config
    x = torch.randn(tokens, config.hidden_size, device=device, dtype=torch.bfloat16)
    scale, index = torch.rand(tokens, module.num_experts, device=device).topk(
        config.num_experts_per_tok)
    scale = (scale / scale.sum(dim=-1, keepdim=True)).to(x.dtype)
    calls = {}
    for name in arms.layers:
        arms.choose(name)
        calls[name] = captured(lambda: module(x, index, scale), device)
    other = torch.zeros(1 << (10 if tiny else 26), device=device)

    def seconds_of(name: str) -> float:
        arms.choose(name)
        if device != "cuda":
            begin = time.perf_counter()
            calls[name]()
            return time.perf_counter() - begin
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        other.sum()
        events[0].record()
        calls[name]()
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / 1e3

    return {"tokens": tokens, "experts used": len(index.unique()),
            **compared(in_turns(list(calls), 3 if tiny else 21, seconds_of))}


def main() -> None:
    parser = evidence.arguments(__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, help="of the model (default 4; tiny 2)")
    parser.add_argument("--batches", type=int, nargs="+", help="(default 1 8 32 64; tiny 1 2)")
    parser.add_argument("--seconds", type=float, help="after these, with imports, nothing new is "
                        "begun (default 55; tiny 600)")
    args = parser.parse_args()
    device = evidence.device_of(args)
    layers = args.layers or (2 if args.tiny else 4)
    limit = args.seconds or (600 if args.tiny else 55)
    batches = args.batches or ([1, 2] if args.tiny else [1, 8, 32, 64])
    results = {"machine": evidence.machine(device), "arguments": sys.argv[1:],
               "left out": [], "seconds": {}, "decode": [], "module": []}
    done = results["seconds"]

    def run(what: str, work, *arguments):
        """Does it if there is time; one failure must not cost the others' results."""
        found = None
        if evidence.seconds() > limit:
            results["left out"].append(f"{what}: no time")
        else:
            begin = evidence.seconds()
            try:
                found = work(*arguments)
            except Exception as error:
                results["left out"].append(f"{what}: {error}")
                print(f"{what}: {error}", file=sys.stderr)
            done[what] = round(evidence.seconds() - begin, 1)
            print(f"{evidence.seconds():6.1f} s  {what}", flush=True)
        evidence.save(args.json, results)
        return found

    done["imports"] = round(evidence.seconds(), 1)
    model = run("model", build, args.tiny, layers, device)
    if model is None:
        sys.exit(1)
    arms = Arms(model)
    results["model"] = {"like": "Qwen3-30B-A3B", "layers": layers, "parameters": sum(
        parameter.numel() for parameter in model.parameters())}
    for name in ARMS:
        run(name, arms.quantize, name)
    work = [("decode", decode, batch, "graph") for batch in batches]
    work += [("module", alone, tokens)
             for tokens in ((1, 4) if args.tiny else tuple(1 << i for i in range(10)))]
    work += [("decode", decode, batch, "eager") for batch in batches]
    for table, measure, *what in work:
        row = run(f"{table} {' '.join(map(str, what))}", measure, arms, *what, args.tiny, device)
        results[table] += [row] if row else []
    evidence.save(args.json, results)

    for title, table in ((f"Decode, {layers} layers", "decode"), ("One experts module", "module")):
        rows = [{**{key: value for key, value in row.items() if not isinstance(value, dict)},
                 **{f"{name}, us": us for name, us in row["us"].items()},
                 **{f"{name}, times": times for name, times in row["times as fast"].items()}}
                for row in results[table]]
        if rows:
            evidence.table(title, rows)
    for line in results["left out"]:
        print("left out:", line)
    sys.exit(bool(results["left out"]))


if __name__ == "__main__":
    main()
