# SPDX-License-Identifier: Apache-2.0
"""megamoe.transformers: random-weight models of each family against their own eager path."""
import copy
import threading
import unittest
from pathlib import Path

import families
import megamoe
import megamoe.transformers as mt
import safetensors.torch
import torch
from common import FORMATS, Case, devices
from megamoe.torch import MegaMoELayer
from models import EXPERTS, FAMILIES, HIDDEN, INTERMEDIATE, build, token_ids
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

DEVICES = devices()
# docs/numerics.md: end to end against activations that are not quantized.
GATE = {"exact": 6e-2, "folded": 8e-2}


def run(model, ids, implementation, routes=None):
    """Logits, and (x, topk_ids, topk_weights, y) of each experts module. With `routes`, what an
    earlier run saw, tokens go to its experts: a random model's routers flip at a rounding."""
    seen, hooks = [], []
    for place, (_, module) in enumerate(mt.experts_modules(model)):
        if routes:
            hooks.append(module.register_forward_pre_hook(
                lambda _, args, place=place: (args[0], *routes[place][1:3])))
        hooks.append(module.register_forward_hook(lambda _, args, y: seen.append((*args, y))))
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        logits = model(ids.to(model.device)).logits.float()
    for hook in hooks:
        hook.remove()
    return logits, seen


def distance(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


class Models(Case):
    def test_against_eager(self):
        for device in DEVICES:
            for family in FAMILIES:
                for format, nvfp4 in (("mxfp4", "exact"), ("nvfp4", "exact"), ("nvfp4", "folded")):
                    with self.subTest(device=device, family=family, format=format, nvfp4=nvfp4):
                        self.against_eager(build(family).to(device), format, nvfp4)

    def against_eager(self, model, format, nvfp4):
        ids = token_ids()
        found = mt.quantize_experts(model, format, originals="replace", nvfp4=nvfp4)
        self.assertEqual(found, len(list(mt.experts_modules(model))))
        expected, routes = run(model, ids, "eager")
        logits, seen = run(model, ids, "megamoe", routes)
        # What the layers round apart adds up in squares.
        self.assertLess(distance(logits, expected), GATE[nvfp4] * found ** .5)
        # Each module alone, on the same input, in float32.
        for (_, module), (x, index, scale, y) in zip(mt.experts_modules(model), seen, strict=True):
            module.config._experts_implementation = "eager"
            with torch.no_grad():
                exact = module.float()(x.float(), index, scale.float())
            self.assertLess(distance(y, exact), GATE[nvfp4])

    def test_alone_and_in_a_batch(self):
        for device in DEVICES:
            with self.subTest(device):
                model = build("Qwen3Moe").to(device)
                mt.quantize_experts(model, "mxfp4")
                _, seen = run(model, token_ids(batch=5), "megamoe")
                for (_, module), (x, index, scale, y) in zip(mt.experts_modules(model), seen):
                    for row in range(0, len(x), 17):
                        one = slice(row, row + 1)
                        self.assertTrue(torch.equal(module(x[one], index[one], scale[one]),
                                                    y[one]))

    def test_generate(self):
        for device in DEVICES:
            for family in ("Qwen3Moe", "GptOss"):
                with self.subTest(device=device, family=family):
                    model = build(family).to(device)
                    mt.quantize_experts(model, "mxfp4")
                    model.set_experts_implementation("megamoe")
                    out = model.generate(token_ids(1, 8).to(device), max_new_tokens=5,
                                         min_new_tokens=5, do_sample=False)
                    self.assertEqual(out.shape, (1, 13))

    def test_ranks(self):
        """Two ranks, as threads, share the experts; each has prompts of its own."""
        alone = build("Qwen3Moe")
        ids = token_ids(batch=5)
        models = [copy.deepcopy(alone) for _ in range(2)]
        mt.quantize_experts(alone, "nvfp4", activations="int8")
        expected = run(alone, ids, "megamoe")[0]
        parts, got, done = (ids[:2], ids[2:]), {}, threading.Barrier(2)

        def rank(comm):
            layers = mt.quantize_experts(
                models[comm.rank], "nvfp4", activations="int8", comm=comm, max_tokens=100,
                device=megamoe.Device(threads=1, pin_threads=False))
            self.assertEqual(layers, 2)
            got[comm.rank] = run(models[comm.rank], parts[comm.rank], "megamoe")[0]
            done.wait(100)  # no workspace may go while another rank is inside a forward

        threads = [threading.Thread(target=rank, args=(comm,))
                   for comm in megamoe.Comm.threads(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        self.assertLess(distance(torch.cat([got[0], got[1]]), expected), 1e-2)

    def test_compile(self):
        model = build("Qwen3Moe")
        mt.quantize_experts(model, "mxfp4")
        expected, _ = run(model, token_ids(), "megamoe")
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            logits = compiled(token_ids()).logits.float()
        self.assertTrue(torch.equal(logits, expected))


class Families(Case):
    def test_all_of_them(self):
        """What transformers dispatches by name is computed within the gate, or refused with a
        reason."""
        computed, refused = set(), {}
        for family, kind in families.dispatched():
            for device in DEVICES:
                model = families.build(family, kind)
                if model is None:
                    continue
                with self.subTest(family=family, device=device):
                    experts = model.to(device).experts
                    try:
                        mt.quantize_experts(model, "mxfp4", originals="replace", topk=2)
                    except megamoe.UnsupportedError as reason:
                        refused[family] = str(reason)
                        continue
                    x = torch.randn(24, families.HIDDEN, device=device, dtype=torch.bfloat16)
                    scale, index = torch.rand(24, families.EXPERTS, device=device).topk(2)
                    with torch.no_grad():
                        experts.config._experts_implementation = "megamoe"
                        y = experts(x, index, scale.bfloat16())
                        experts.config._experts_implementation = "eager"
                        exact = experts.float()(x.float(), index, scale.bfloat16().float())
                    self.assertLess(distance(y, exact), GATE["exact"])
                    computed.add(family)
        print(f"computed: {' '.join(sorted(computed))}; refused: {' '.join(sorted(refused))}")
        self.assertGreaterEqual(computed, {"qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v4",
                                           "glm4_moe", "glm_moe_dsa"})
        for family, reason in refused.items():
            self.assertRegex(reason, "no SwiGLU|without a gate|norm after each expert", family)


class Checkpoints(Case):
    def gpt_oss(self):
        """A checkpoint of gpt-oss, and a model of the same sizes."""
        path = self.synth("--model", "gpt-oss-20b", "--scale", "0.04", "--layers", "2")
        with megamoe.Checkpoint(path) as checkpoint, checkpoint.weights(0) as weights:
            sizes = {"hidden_size": weights.hidden, "intermediate_size": weights.intermediate,
                     "num_local_experts": weights.experts, "num_experts_per_tok": weights.topk}
        return path, build("GptOss", **sizes)

    def test_as_they_are(self):
        """The same values as transformers unpacks from the files, and the same biases."""
        path, model = self.gpt_oss()
        tensors = {}
        for file in Path(path).glob("*.safetensors"):
            tensors.update(safetensors.torch.load_file(file))
        modules = list(mt.experts_modules(model))
        for name, module in modules:
            for part in ("gate_up_proj", "down_proj"):
                getattr(module, f"{part}_bias").data.copy_(tensors[f"{name}.{part}_bias"])
        for device in DEVICES:
            with self.subTest(device):
                model = model.to(device)
                self.assertEqual(mt.load_experts(model, path, originals="replace"), 2)
                for name, module in modules:
                    for part in ("gate_up_proj", "down_proj"):
                        stored = convert_moe_packed_tensors(tensors[f"{name}.{part}_blocks"],
                                                            tensors[f"{name}.{part}_scales"])
                        self.assertTrue(torch.equal(getattr(module, part).cpu(), stored), name)
                _, routes = run(model, token_ids(), "eager")
                _, seen = run(model, token_ids(), "megamoe", routes)
                self.assertLess(distance(seen[0][3], routes[0][3]), GATE["exact"])

    def test_of_each_family(self):
        """4-bit experts under each family's names: the values that the checkpoint has, and the
        bits of a layer that is made of it."""
        for name, family, format, experts in (
                ("deepseek-v4-flash", "DeepseekV4", "mxfp4", "n_routed_experts"),
                ("deepseek-v3", "DeepseekV3", "nvfp4", "n_routed_experts"),
                ("qwen3-30b-a3b", "Qwen3Moe", "nvfp4", "num_experts")):
            path = self.synth("--model", name, "--scale", "0.04", "--layers", "2")
            with megamoe.Checkpoint(path) as checkpoint:
                numbers, weights = checkpoint.layers, checkpoint.weights(checkpoint.layers[0])
            changes = {"hidden_size": weights.hidden, experts: weights.experts,
                       "moe_intermediate_size": weights.intermediate,
                       "num_experts_per_tok": weights.topk}
            if family == "DeepseekV3":
                changes |= {"num_hidden_layers": numbers[-1] + 1,
                            "first_k_dense_replace": numbers[0], "n_group": 1, "topk_group": 1}
            for device in DEVICES:
                with self.subTest(device=device, family=family):
                    model = build(family, **changes).to(device)
                    self.assertEqual(mt.load_experts(model, path, originals="replace"), 2)
                    module = next(mt.experts_modules(model))[1]
                    self.assertEqual(module.megamoe.layer.format, format)
                    stored = torch.from_numpy(weights.unpack(1, "down")).bfloat16()
                    self.assertTrue(torch.equal(module.down_proj[1].cpu(), stored))
                    x, ids, scale = self.batch(weights, 9)
                    batch = (torch.from_numpy(x).view(torch.bfloat16).to(device),
                             torch.from_numpy(ids).to(device), torch.from_numpy(scale).to(device))
                    model.set_experts_implementation("megamoe")
                    self.assertTrue(torch.equal(module(*batch),
                                                MegaMoELayer(weights, device)(*batch)))

    def test_rounded_on_the_way(self):
        """The library rounds a BF16 checkpoint as megamoe.quantize rounds the model's tensors."""
        for format in FORMATS:
            with self.subTest(format):
                model, path = build("Qwen3Moe"), self.path(format)
                # One tensor for each expert and projection, as such checkpoints are published.
                model.save_pretrained(path)
                self.assertEqual(mt.load_experts(model, path, format, originals="keep"), 2)
                from_file = run(model, token_ids(), "megamoe")[0]
                mt.quantize_experts(model, format)
                self.assertTrue(torch.equal(run(model, token_ids(), "megamoe")[0], from_file))
                with self.assertRaisesRegex(megamoe.UnsupportedError, "quantize"):
                    mt.load_experts(build("Qwen3Moe"), path)

    def test_another_model(self):
        path, model = self.gpt_oss()
        with self.assertRaisesRegex(ValueError, r"\(experts, hidden, intermediate\) are"):
            mt.load_experts(build("GptOss"), path)
        model.config.num_hidden_layers, model.config.layer_types = 3, ["full_attention"] * 3
        with self.assertRaisesRegex(LookupError, "2"):
            mt.load_experts(type(model)(model.config), path)


class Refusals(Case):
    def refuse(self, error, text, model, format="mxfp4", **options):
        with self.assertRaisesRegex(error, text):
            mt.quantize_experts(model, format, **options)

    def test_models(self):
        self.refuse(megamoe.UnsupportedError, "has no experts that transformers dispatches",
                    torch.nn.Linear(4, 4))
        self.refuse(megamoe.UnsupportedError, "mlp.experts .Qwen3MoeExperts.: its activation .* is "
                    "no SwiGLU", build("Qwen3Moe", hidden_act="gelu"))
        self.refuse(NotImplementedError, r"mixer.experts \(NemotronHExperts\): experts without a "
                    "gate", build("NemotronH"))
        model = build("Mixtral")
        self.refuse(ValueError, "format='fp4'; expected one of mxfp4, nvfp4", model, "fp4")
        self.refuse(ValueError, "originals='drop'", model, originals="drop")
        self.refuse(ValueError, "multiple of 32", build("Qwen3Moe", moe_intermediate_size=48))

    def test_order(self):
        model = build("Qwen3Moe")
        model.set_experts_implementation("megamoe")
        with self.assertRaisesRegex(megamoe.StateError, "has no 4-bit weights yet: call megamoe"):
            model(token_ids())
        mt.quantize_experts(model, "nvfp4")
        experts = next(mt.experts_modules(model))[1]
        self.assertEqual((experts.gate_up_proj.numel(), experts.down_proj.numel()), (0, 0))
        layer = experts.megamoe.layer
        self.assertEqual((layer.experts, layer.hidden, layer.intermediate),
                         (EXPERTS, HIDDEN, INTERMEDIATE))
        model.to(torch.bfloat16)
        with torch.no_grad():
            model(token_ids())
        self.refuse(megamoe.StateError, "was released", model)

    def test_dtype(self):
        model = build("Qwen3Moe", torch.float32)
        mt.quantize_experts(model, "mxfp4")
        model.set_experts_implementation("megamoe")
        with self.assertRaisesRegex(ValueError, "x: torch.float32 .* expected torch.bfloat16"):
            model(token_ids())


if __name__ == "__main__":
    unittest.main()
