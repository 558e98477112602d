# SPDX-License-Identifier: Apache-2.0
"""megamoe.torch on every device of this machine: bits of the reference, compile, graphs, streams."""
import copy
import threading
import unittest
import unittest.mock

import megamoe
import megamoe.torch
import numpy as np
import torch
from common import FORMATS, Case, devices
from megamoe.torch import MegaMoELayer, quantize

DEVICES = devices()
CUDA = [device for device in DEVICES if device != "cpu"]


class TorchCase(Case):
    def tensors(self, weights, tokens, device):
        x, ids, scale = self.batch(weights, tokens)
        return (torch.from_numpy(x).view(torch.bfloat16).to(device),
                torch.from_numpy(ids).to(device), torch.from_numpy(scale).to(device))

    def layer(self, device, format="mxfp4", max_tokens=64, **options):
        with self.weights(format, hidden=256, intermediate=128) as weights:
            self.geometry = weights
            return MegaMoELayer(weights, device, max_tokens=max_tokens, **options)

    def assertEqualTensors(self, a, b):
        self.assertTrue(torch.equal(a.cpu().view(torch.int16), b.cpu().view(torch.int16)))


class Module(TorchCase):
    def test_reference(self):
        for device in DEVICES:
            for format in FORMATS:
                with self.subTest(device=device, format=format), \
                        self.weights(format, hidden=256, intermediate=128) as weights:
                    batch = self.tensors(weights, 50, device)
                    y = MegaMoELayer(weights, device, max_tokens=64)(*batch)
                    host = [part.cpu() for part in batch]
                    expected = weights.reference(host[0], host[1], host[2],
                                                 device=device.partition(":")[0])
                    self.assertSameBits(y.cpu().view(torch.uint16).numpy(), expected)

    def test_parts_shapes_and_dtypes(self):
        for device in DEVICES:
            with self.subTest(device):
                layer = self.layer(device)
                x, ids, scale = self.tensors(self.geometry, 150, device)
                y = layer(x, ids, scale)  # three parts
                for row in (0, 63, 64, 149):
                    one = slice(row, row + 1)
                    self.assertEqualTensors(layer(x[one], ids[one], scale[one]), y[one])
                shaped = layer(x.view(3, 50, -1), ids.view(3, 50, -1), scale.view(3, 50, -1))
                self.assertEqualTensors(shaped.view(150, -1), y)
                self.assertEqualTensors(layer(x, ids.int(), scale), y)
                wide = torch.cat([x, x], dim=1)[:, :x.shape[1]]
                self.assertEqualTensors(layer(wide, ids, scale), y)
                self.assertEqualTensors(layer(x.t().contiguous().t(), ids, scale), y)
                self.assertEqual(layer(x[:0], ids[:0], scale[:0]).shape, (0, 256))
                out = torch.empty_like(x)
                torch.ops.megamoe.experts_out(x, ids, scale, out, layer.handle)
                self.assertEqualTensors(out, y)

    def test_dlpack(self):
        """The bindings without torch take the same tensors."""
        for device in DEVICES:
            with self.subTest(device), self.weights("mxfp4") as weights, \
                    megamoe.Layer(weights, device) as layer:
                batch = self.tensors(weights, 8, device)
                out = torch.empty_like(batch[0])
                self.assertIs(layer(*batch, out), out)
                expected = MegaMoELayer(weights, device)(*batch)
                self.assertEqualTensors(out, expected)

    def test_sources(self):
        path = self.synth("--model", "deepseek-v4-flash", "--scale", "0.05", "--layers", "4")
        for device in DEVICES:
            with self.subTest(device):
                layer = MegaMoELayer.from_checkpoint(path, 3, device)
                with megamoe.Weights.open(path, 3) as weights:
                    weights.prepare(self.path("layer.mmoe"), device=device.partition(":")[0])
                    batch = self.tensors(weights, 7, device)
                y = layer(*batch)
                again = MegaMoELayer.from_file(self.path("layer.mmoe"), device)
                self.assertEqualTensors(again(*batch), y)
                self.assertEqual(again.nbytes, layer.nbytes)

    def test_int8_and_placing(self):
        with self.weights("mxfp4", hidden=256, intermediate=128) as weights:
            batch = self.tensors(weights, 30, "cpu")
            layers = [MegaMoELayer(weights, activations=kind) for kind in ("e4m3", "int8")]
            self.assertIsNot(layers[0].workspace, layers[1].workspace)
            for layer, kind in zip(layers, ("e4m3", "int8")):
                expected = weights.reference(*batch, activations=kind)
                self.assertSameBits(layer(*batch).view(torch.uint16).numpy(), expected)
                layer.place([*range(8), 5])
                self.assertSameBits(layer(*batch).view(torch.uint16).numpy(), expected)
                self.assertEqual(layer.layer.loads().sum(), 30 * weights.topk)
            with self.assertRaises(megamoe.UnsupportedError):
                layers[0].set_plan(token_tile=16)

    def test_from_tensors(self):
        for device in DEVICES:
            parts = [self.matrices(4, rows, columns, "nvfp4")
                     for rows, columns in ((64, 128), (64, 128), (128, 64))]
            with self.subTest(device), megamoe.Weights.from_tensors(
                    *parts, format="nvfp4", topk=2) as weights:
                batch = self.tensors(weights, 5, device)
                moved = [megamoe.Projection(torch.from_numpy(part.codes).to(device),
                                            torch.from_numpy(part.scales).to(device)
                                            .view(torch.float8_e4m3fn),
                                            torch.from_numpy(part.global_scale).to(device))
                         for part in parts]
                self.assertEqualTensors(
                    MegaMoELayer.from_tensors(*moved, format="nvfp4", topk=2,
                                              device=device)(*batch),
                    MegaMoELayer(weights, device)(*batch))

    def test_ranks(self):
        """Two ranks, as threads with a device of their own; one has fewer tokens, then none."""
        with self.weights("nvfp4", hidden=256, intermediate=128) as weights:
            whole = MegaMoELayer(weights, max_tokens=64)
            batch = self.tensors(weights, 40, "cpu")
            splits = [(0, 30), (30, 40)], [(0, 40), (40, 40)]
            got, refused = {}, []
            done = threading.Barrier(2)

            def rank(comm):
                layer = MegaMoELayer(weights, megamoe.Device(threads=1, pin_threads=False),
                                     max_tokens=40, comm=comm)
                for number, split in enumerate(splits):
                    part = slice(*split[comm.rank])
                    got[number, comm.rank] = layer(*(tensor[part] for tensor in batch))
                try:
                    layer(*self.tensors(weights, 41, "cpu"))
                except megamoe.CapacityError:
                    refused.append(comm.rank)
                done.wait(100)  # no workspace may go while another rank is inside a forward

            threads = [threading.Thread(target=rank, args=(comm,))
                       for comm in megamoe.Comm.threads(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(100)
            for number in range(len(splits)):
                self.assertEqualTensors(torch.cat([got[number, 0], got[number, 1]]),
                                        whole(*batch))
            self.assertEqual(sorted(refused), [0, 1])

    def test_copies_and_refusals(self):
        layer = self.layer("cpu")
        x, ids, scale = self.tensors(self.geometry, 4, "cpu")
        self.assertIs(copy.deepcopy(torch.nn.Sequential(layer))[0], layer)
        self.assertIn("experts=8", repr(layer))
        self.assertEqual(list(layer.state_dict()), [])
        for arguments, text in (((x.float(), ids, scale), "x: torch.float32"),
                                ((x, ids.short(), scale), "topk_ids: torch.int16"),
                                ((x, ids, scale.double()), "topk_weights: torch.float64"),
                                ((x[:, :64], ids, scale), r"x: torch.bfloat16 \[4, 64\]"),
                                ((x, ids[:3], scale), r"topk_ids: torch.int64 \[3, 3\]")):
            with self.subTest(text), self.assertRaisesRegex(ValueError, text):
                layer(*arguments)
        with self.assertRaisesRegex(TypeError, "cannot be pickled"):
            copy.copy(layer)
        with self.assertRaisesRegex(RuntimeError, "no autograd formula"):
            layer(x.requires_grad_(), ids, scale).sum().backward()
        handle = layer.handle
        del layer
        with self.assertRaisesRegex(megamoe.StateError, "was deleted"):
            torch.ops.megamoe.experts(x.detach(), ids, scale, handle)

    def test_errors_found_while_computing(self):
        for device in DEVICES:
            with self.subTest(device):
                layer = self.layer(device)
                x, ids, scale = self.tensors(self.geometry, 4, device)
                y = layer(x, ids, scale)
                with self.assertRaisesRegex(IndexError, "expert id 11"):
                    layer(x, torch.full_like(ids, 11), scale)
                    layer.check()
                self.assertEqualTensors(layer(x, ids, scale), y)


class Quantize(Case):
    def test_same_bits_as_numpy(self):
        """Normal values, 2^-140 to 2^100, ties, zeros; in parts, and from slices."""
        ties = np.array([.25, -.75, 1.25, 1.75, -2.5, 3.5, 5, 6, 0, -0.0], np.float32)
        shape = (2, 3, 5, 64)
        normal = self.rng.standard_normal(shape, dtype=np.float32)
        wide = normal * np.float32(2) ** self.rng.integers(-140, 100, shape).astype(np.float32)
        for device in DEVICES:
            for format in FORMATS:
                for name, weight in (("normal", normal), ("wide", wide), ("zeros", 0 * normal),
                                     ("ties", self.rng.choice(ties, shape))):
                    with self.subTest(device=device, format=format, weights=name), \
                            unittest.mock.patch("megamoe._torch_quantize._PART", 700):
                        found = quantize(torch.from_numpy(weight).to(device), format)
                        for part, expected in zip(found, megamoe.quantize(weight, format)):
                            self.assertEqual(part.device.type, torch.device(device).type)
                            self.assertSameBits(part.cpu().numpy(), expected)
                half = torch.from_numpy(normal).to(device, torch.bfloat16)[:, :, 1::2]
                for part, expected in zip(quantize(half, format),
                                          megamoe.quantize(half.float().cpu().numpy(), format)):
                    self.assertSameBits(part.cpu().numpy(), expected)

    def test_refused(self):
        for weight, format, text in ((torch.zeros(2, 30), "mxfp4", "multiple of 32"),
                                     (torch.zeros(2, 32), "fp8", "expected one of mxfp4, nvfp4"),
                                     (torch.full((1, 32), torch.nan), "nvfp4", "NaN")):
            with self.assertRaisesRegex(megamoe.InvalidArgumentError, text):
                quantize(weight, format)


class Compile(TorchCase):
    def test_opcheck(self):
        for device in DEVICES:
            with self.subTest(device):
                layer = self.layer(device)
                batch = self.tensors(self.geometry, 20, device)
                torch.library.opcheck(torch.ops.megamoe.experts, (*batch, layer.handle))
                torch.library.opcheck(torch.ops.megamoe.experts_out,
                                      (*batch, torch.empty_like(batch[0]), layer.handle))

    def test_compile(self):
        for device in DEVICES:
            for mode in ("default", "reduce-overhead"):  # on a GPU the latter captures graphs
                with self.subTest(device=device, mode=mode):
                    torch._dynamo.reset()
                    first, second = self.layer(device), self.layer(device)

                    def model(x, ids, scale):
                        return second(torch.relu(first(x, ids, scale)) + x, ids, scale) * 2

                    compiled = torch.compile(model, fullgraph=True, mode=mode)
                    for tokens in (6, 6, 6, 20):
                        batch = self.tensors(self.geometry, tokens, device)
                        self.assertEqualTensors(compiled(*batch).clone(), model(*batch))


@unittest.skipUnless(CUDA, "no GPU that the library runs on")
class Cuda(TorchCase):
    def test_graph(self):
        layer = self.layer(CUDA[0])
        x, ids, scale = self.tensors(self.geometry, 16, CUDA[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # the first call of all: construction has prewarmed
            y = layer(x, ids, scale)
        for _ in range(3):
            other = self.tensors(self.geometry, 16, CUDA[0])
            for into, value in zip((x, ids, scale), other):
                into.copy_(value)
            graph.replay()
            self.assertEqualTensors(y, layer(*other))

    def test_plans(self):
        layer = self.layer(CUDA[0])
        batch = self.tensors(self.geometry, 50, CUDA[0])
        expected = layer(*batch)
        for tile in 16, 32:
            layer.set_plan(token_tile=tile, lag=1)
            self.assertEqualTensors(layer(*batch), expected)
        with self.assertRaisesRegex(ValueError, "7"):
            layer.set_plan(token_tile=7)
            layer(*batch)
        layer.set_plan()
        self.assertEqualTensors(layer(*batch), expected)

    def test_own_codes(self):
        """Codes that the caller writes, and the tokens that are quantized to just these."""
        layer = self.layer(CUDA[0])
        x, ids, weights = self.tensors(self.geometry, 20, CUDA[0])
        codes = torch.randint(0, 0x7F, x.shape, device=CUDA[0]).to(torch.uint8)
        codes |= torch.randint(0, 2, x.shape, device=CUDA[0]).to(torch.uint8) << 7
        codes[:, 0] = 0x7E  # 448, of which the scale is made
        x = (codes.view(torch.float8_e4m3fn).float() * 2**-6).bfloat16()
        expected = layer(x, ids, weights)
        layer(*self.tensors(self.geometry, 20, CUDA[0]))
        views = {name: torch.as_tensor(view, device=CUDA[0])
                 for name, view in layer.workspace.views().items()}
        views["codes"][:20] = codes
        views["scales"][:20] = 2**-6
        views["topk_ids"][:20] = ids
        views["topk_weights"][:20] = weights
        out = torch.empty_like(x)
        layer.workspace.commit(20, stream=torch.cuda.current_stream().cuda_stream)
        layer.workspace.forward(layer.layer, out)
        self.assertEqualTensors(out, expected)

    def test_streams(self):
        layer = self.layer(CUDA[0])
        batches = [self.tensors(self.geometry, 64, CUDA[0]) for _ in range(8)]
        expected = [layer(*batch) for batch in batches]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in batches]
        got = []
        for stream, batch in zip(streams, batches):
            with torch.cuda.stream(stream):
                got.append(layer(*batch))
        torch.cuda.synchronize()
        for a, b in zip(got, expected):
            self.assertEqualTensors(a, b)
        layer.check()


if __name__ == "__main__":
    np.set_printoptions(linewidth=120)
    unittest.main()
