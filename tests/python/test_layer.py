# SPDX-License-Identifier: Apache-2.0
"""Layers over numpy arrays and DLPack tensors: same bits as the reference, and clear refusals."""
import threading
import unittest

import megamoe
import numpy as np
from common import FORMATS, Case


class DLPackOnly:
    """A tensor of which nothing is known but that it speaks DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **arguments):
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Forward(Case):
    def test_reference(self):
        for format in FORMATS:
            for bias in (False, True):
                with self.subTest(format=format, bias=bias):
                    activation = megamoe.Activation(1.702, 1.0, 7.0) if bias else \
                        megamoe.Activation()
                    with self.weights(format, bias=bias, activation=activation) as weights:
                        batch = self.batch(weights, 37)
                        with megamoe.Layer(weights) as layer:
                            y = layer(*batch)
                        self.assertEqual(y.dtype, np.uint16)
                        self.assertSameBits(y, weights.reference(*batch))

    def test_options(self):
        with self.weights("nvfp4") as weights:
            batch = self.batch(weights, 9)
            for options in ({"nvfp4": "folded"}, {"accumulate": "promote"},
                            {"weight_after_fc2": True}):
                with self.subTest(options), megamoe.Layer(weights, **options) as layer:
                    self.assertSameBits(layer(*batch), weights.reference(*batch, **options))

    def test_int8(self):
        """Activations of int8: bits of their own reference, one row alone and in a batch."""
        with self.weights("mxfp4") as weights:
            x, ids, scale = batch = self.batch(weights, 21)
            with megamoe.Layer(weights, activations="int8") as layer:
                y = layer(*batch)
                self.assertSameBits(y, weights.reference(*batch, activations="int8"))
                self.assertSameBits(layer(x[4:5], ids[4:5], scale[4:5]), y[4:5])
                self.assertEqual(layer.workspace(tokens=1).activations, "int8")
            with self.assertRaisesRegex(ValueError, "activations='fp8'; expected one of e4m3, int8"):
                megamoe.Layer(weights, activations="fp8")
            with megamoe.Layer(weights) as layer, layer.workspace(4, activations="int8") as other:
                self.assertEqual(other.views()["codes"].dtype, np.int8)
        with self.weights("nvfp4") as weights, \
                megamoe.Layer(weights, nvfp4="folded", activations="int8") as layer, \
                self.assertRaises(megamoe.UnsupportedError):
            layer(*batch)

    def test_own_codes(self):
        """A batch that the caller writes itself into the views: the bits of one that is staged."""
        with self.weights("mxfp4") as weights, megamoe.Layer(weights) as layer:
            for options, types in (({}, ("uint8", "float32", (9, 1))),
                                   ({"input_scale": "block"}, ("uint8", "uint8", (9, 2))),
                                   ({"activations": "int8"}, ("int8", "float32", (9, 2)))):
                with self.subTest(options), layer.workspace(tokens=9, **options) as one, \
                        layer.workspace(tokens=9, **options) as other:
                    batch = self.batch(weights, 9)
                    one.stage(*batch)
                    found, into = one.views(), other.views()
                    self.assertEqual((found["codes"].dtype, found["scales"].dtype,
                                      found["scales"].shape), types)
                    self.assertEqual(found["codes"].shape, (9, 160))
                    self.assertEqual(found["topk_ids"].tolist(), batch[1].tolist())
                    outs = [np.empty((7, 160), np.uint16) for _ in range(2)]
                    one.commit(7)
                    for name, values in found.items():
                        into[name][:7] = values[:7]
                    other.commit(7)
                    for workspace, out in zip((one, other), outs):
                        workspace.forward(layer, out)
                    self.assertSameBits(*outs)
                    self.assertNotEqual(outs[0].sum(), 0)
                    with self.assertRaises(megamoe.CapacityError):
                        other.commit(10)
            with layer.workspace(tokens=1) as workspace, \
                    self.assertRaises(megamoe.UnsupportedError):
                workspace.set_plan(token_tile=16)

    def test_kinds_of_input(self):
        with self.weights("mxfp4") as weights, megamoe.Layer(weights) as layer:
            x, ids, scale = self.batch(weights, 12)
            y = layer(x, ids, scale)
            self.assertSameBits(layer(x, ids.astype(np.int32), scale), y)
            self.assertSameBits(layer(DLPackOnly(x), DLPackOnly(ids), DLPackOnly(scale)), y)
            wide = np.zeros((12, 2 * weights.hidden), np.uint16)
            wide[:, :weights.hidden] = x
            self.assertSameBits(layer(wide[:, :weights.hidden], ids, scale), y)
            out = np.zeros((15, weights.hidden), np.uint16)
            self.assertIs(layer(x, ids, scale, out), out)
            self.assertSameBits(out[:12], y)
            self.assertEqual(out[12:].sum(), 0)
            rounded = megamoe.to_bfloat16(scale)
            self.assertSameBits(layer(x, ids, rounded),
                                layer(x, ids, megamoe.from_bfloat16(rounded)))
            self.assertEqual(layer(x[:0], ids[:0], scale[:0]).shape, (0, weights.hidden))

    def test_masked_slots_and_batches(self):
        with self.weights("mxfp4") as weights, megamoe.Layer(weights) as layer:
            x, ids, scale = self.batch(weights, 100)
            ids[3] = -1
            y = layer(x, ids, scale)
            self.assertEqual(y[3].sum(), 0)
            for row in (0, 3, 50, 99):
                self.assertSameBits(layer(x[row:row + 1], ids[row:row + 1], scale[row:row + 1]),
                                    y[row:row + 1])

    def test_fused_tensors(self):
        """gate and up as slices of one tensor, side by side or in turn, need no copy."""
        with self.weights("mxfp4") as weights:
            gate, up = (self.matrices(8, 96, 160, "mxfp4") for _ in range(2))
            down = self.matrices(8, 160, 96, "mxfp4")
            batch = self.batch(weights, 5)
        outputs = []
        for join, first, second in (
                (lambda a, b: (a, b), 0, 1),
                (lambda a, b: np.concatenate([a, b], axis=1), np.s_[:, :96], np.s_[:, 96:]),
                (lambda a, b: np.stack([a, b], axis=2).reshape(8, 192, -1), np.s_[:, 0::2],
                 np.s_[:, 1::2])):
            codes, scales = join(gate.codes, up.codes), join(gate.scales, up.scales)
            with megamoe.Weights.from_tensors(
                    megamoe.Projection(codes[first], scales[first]),
                    megamoe.Projection(codes[second], scales[second]), down,
                    format="mxfp4") as weights, megamoe.Layer(weights) as layer:
                outputs.append(layer(*batch))
        for other in outputs[1:]:
            self.assertSameBits(other, outputs[0])

    def test_ranks(self):
        with self.weights("nvfp4") as weights:
            batch = self.batch(weights, 24)
            with megamoe.Layer(weights) as layer:
                alone = layer(*batch)
            half = [tuple(part[:12] for part in batch), tuple(part[12:] for part in batch)]

            done = threading.Barrier(2)

            def rank(comm, mine, outs, device):
                layer = megamoe.Layer(weights, device, comm=comm)
                workspace = layer.workspace(tokens=12)
                out = np.empty((12, weights.hidden), np.uint16)
                workspace.stage(*mine)
                workspace.forward(layer, out)
                outs[comm.rank] = (out, workspace.receive_counts(4))
                done.wait(60)  # no workspace may go while another rank is inside a forward

            outs = {}
            threads = [threading.Thread(target=rank, args=(
                comm, half[comm.rank], outs, megamoe.Device(threads=1, pin_threads=False)))
                for comm in megamoe.Comm.threads(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            self.assertSameBits(np.concatenate([outs[0][0], outs[1][0]]), alone)
            self.assertEqual(outs[0][1].sum() + outs[1][1].sum(), 24 * 3)

            device = megamoe.Device(threads=2)
            layers = [megamoe.Layer(weights, device, comm=comm) for comm in megamoe.Comm.folded(2)]
            spaces = [layer.workspace(tokens=12) for layer in layers]
            folded = [np.empty((12, weights.hidden), np.uint16) for _ in layers]
            for space, mine in zip(spaces, half):
                space.stage(*mine)
            megamoe.forward_group(layers, spaces, folded)
            self.assertSameBits(np.concatenate(folded), alone)


class Placing(Case):
    def test_balance(self):
        loads = [1, 50, 3, 9]
        found = megamoe.balance_experts(loads, ranks=2, physical_experts=6)
        self.assertEqual(found.tolist(), megamoe.balance_experts(
            np.array(loads), ranks=2, physical_experts=6).tolist())
        self.assertEqual(set(found), {0, 1, 2, 3})
        self.assertEqual([1 in rank for rank in np.split(found, 2)], [True, True])
        for loads, physical in (([1, 2, 3], 2), ([1, -2], 2), ([[1], [2]], 2)):
            with self.subTest(loads), self.assertRaises(ValueError):
                megamoe.balance_experts(loads, ranks=1, physical_experts=physical)

    def test_place(self):
        """Two ranks count loads and move their experts; the bits of one rank before and after."""
        with self.weights("mxfp4") as weights:
            batch = self.batch(weights, 20)
            with megamoe.Layer(weights) as layer:
                alone = layer(*batch)
                self.assertEqual(layer.receive_counts().tolist(), layer.loads().tolist())
                self.assertEqual(layer.loads().tolist(),
                                 np.bincount(batch[1].ravel(), minlength=8).tolist())
                layer.reset_counts()
                layer.place(list(range(8)) + [3, 3])
                self.assertSameBits(layer(*batch), alone)
                self.assertEqual(layer.receive_counts().size, 10)

            outs, maps, told, done = {}, {}, {}, threading.Barrier(2)

            def rank(comm, device):
                half = [part[10 * comm.rank:10 * comm.rank + 10] for part in batch]
                layer = megamoe.Layer(weights, device, comm=comm,
                                      physical_to_logical=[*range(8), 0, 1])
                workspace = layer.workspace(tokens=10)
                for number in range(2):
                    out = np.empty((10, 160), np.uint16)
                    workspace.stage(*half)
                    workspace.forward(layer, out)
                    outs[number, comm.rank] = out
                    if number == 0:
                        loads = layer.loads()
                        maps[comm.rank] = megamoe.balance_experts(loads, ranks=2,
                                                                  physical_experts=10)
                        layer.place(maps[comm.rank])
                told[comm.rank] = comm.allgather(bytes([comm.rank] * 3))
                done.wait(60)  # no workspace may go while another rank is inside a forward

            threads = [threading.Thread(target=rank, args=(
                comm, megamoe.Device(threads=1, pin_threads=False)))
                for comm in megamoe.Comm.threads(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            self.assertEqual(maps[0].tolist(), maps[1].tolist())
            self.assertEqual(told, {rank: [b"\0\0\0", b"\1\1\1"] for rank in range(2)})
            for number in range(2):
                self.assertSameBits(np.concatenate([outs[number, 0], outs[number, 1]]), alone)


class Files(Case):
    def test_checkpoint_and_prepared(self):
        path = self.synth("--model", "deepseek-v4-flash", "--scale", "0.05", "--layers", "4")
        with megamoe.Checkpoint(path) as checkpoint:
            self.assertEqual(checkpoint.family, "deepseek-v4")
            self.assertEqual(list(checkpoint), [0, 1, 2, 3])
            weights, router = checkpoint.weights(3), checkpoint.router(3)
        self.assertEqual((weights.format, weights.layer), ("mxfp4", 3))
        self.assertEqual(weights.activation.limit, 10)
        x = self.batch(weights, 11)[0]
        ids, scale = router.route(x)
        self.assertEqual((ids.shape, ids.dtype), ((11, weights.topk), np.int32))
        told = []
        weights.prepare(self.path("layer.mmoe"), router=router,
                        progress=lambda done, total: told.append((done, total)))
        self.assertEqual(told[-1][0], told[-1][1])
        self.assertEqual(told, sorted(told))
        with megamoe.Weights.open(self.path("layer.mmoe")) as prepared:
            prepared.verify()
            self.assertEqual(prepared.prepared_for, "cpu")
            again = prepared.router.route(x)
            self.assertSameBits(again[0], ids)
            self.assertSameBits(again[1], scale)
            self.assertSameBits(prepared.unpack(1, "down"), weights.unpack(1, "down"))
        for mapped in False, True:
            with megamoe.Layer.open(self.path("layer.mmoe"), map_prepared=mapped) as a, \
                    megamoe.Layer(weights) as b:
                self.assertSameBits(a(x, ids, scale), b(x, ids, scale))

    def test_convert_and_stored(self):
        path = self.synth("--model", "deepseek-v4-flash", "--scale", "0.05", "--layers", "4")
        with megamoe.Checkpoint(path) as checkpoint, \
                checkpoint.weights(checkpoint.layers[0]) as weights:
            stored = checkpoint.stored(0)
            self.assertEqual((stored["format"], stored["wide"], stored["experts"]),
                             (weights.format, False, weights.experts))
            self.assertEqual(stored["activation"], weights.activation)
            checkpoint.convert(self.path("other"), "compressed-tensors", "mxfp4")
            with megamoe.Checkpoint(self.path("other")) as again, again.weights(0) as moved:
                self.assertEqual((again.family, moved.format), ("compressed-tensors", "mxfp4"))
                self.assertSameBits(moved.unpack(2, "down"), weights.unpack(2, "down"))
            with self.assertRaises(megamoe.MegaMoEError):
                checkpoint.convert(self.path("third"), "nothing")

    def test_hash_layer(self):
        path = self.synth("--model", "deepseek-v4-flash", "--scale", "0.05", "--layers", "1")
        with megamoe.Checkpoint(path) as checkpoint, checkpoint.router(0) as router:
            self.assertGreater(router.hash_vocab, 0)
            x = megamoe.to_bfloat16(self.rng.standard_normal((2, router.hidden)))
            self.assertEqual(router.route(x, np.array([0, 1]))[0].shape, (2, router.topk))
            with self.assertRaises(megamoe.ExpertIdError):
                router.route(x, np.array([0, router.hash_vocab]))

    def test_own_router(self):
        weight = self.rng.standard_normal((8, 64), dtype=np.float32)
        x = self.rng.standard_normal((5, 64), dtype=np.float32)
        with megamoe.Router.from_tensors(weight, rule="softmax", topk=2, normalize=True) as router:
            ids, scale = router.route(megamoe.to_bfloat16(x))
        logits = megamoe.from_bfloat16(megamoe.to_bfloat16(x)) @ weight.T
        self.assertSameBits(ids, np.argsort(-logits, axis=1)[:, :2])
        np.testing.assert_allclose(scale.sum(axis=1), 1, rtol=1e-6)


class Refusals(Case):
    def test_messages(self):
        with self.weights("mxfp4") as weights, megamoe.Layer(weights) as layer:
            x, ids, scale = self.batch(weights, 4)
            for arguments, text in (
                    ((x.astype(np.float32), ids, scale), "x: dtype F32; expected BF16"),
                    ((x[:, :-8], ids, scale), r"x: shape \[4, 152\]; expected \[rows, 160\]"),
                    ((x, ids.astype(np.int16), scale), "int16"),
                    ((x[:3], ids, scale), "expected 4 rows"),
                    ((x, ids, scale.astype(np.float64)), "float64"),
                    ((x[:, ::-1], ids, scale), "side by side"),
                    ((list(x), ids, scale), "x: list; expected a numpy array"),
                    ((x, ids, scale, np.empty((2, 160), np.uint16)), "expected at least 4 rows")):
                with self.subTest(text), self.assertRaisesRegex(ValueError, text):
                    layer(*arguments)
            out = np.empty((4, 160), np.uint16)
            out.flags.writeable = False
            with self.assertRaisesRegex(ValueError, "read-only"):
                layer(x, ids, scale, out)
            y = layer(x, ids, scale)
            with self.assertRaises(IndexError) as caught:
                layer(x, ids + 8, scale)
            self.assertIsInstance(caught.exception, megamoe.ExpertIdError)
            self.assertEqual(caught.exception.status_name, "MEGAMOE_EID")
            self.assertSameBits(layer(x, ids, scale), y)

    def test_capacity_and_status(self):
        with self.weights("mxfp4") as weights, megamoe.Layer(weights) as layer, \
                layer.workspace(tokens=4) as workspace:
            layer.prewarm(workspace)
            self.assertEqual(sum(workspace.parts().values()), workspace.nbytes)
            with self.assertRaises(megamoe.CapacityError):
                workspace.stage(*self.batch(weights, 5))
            x, ids, scale = self.batch(weights, 4)
            ids[2, 1] = 99
            workspace.stage(x, ids, scale)
            workspace.forward(layer, np.empty((4, 160), np.uint16))
            found = workspace.status()
            self.assertEqual((found["token"], found["slot"], found["value"]), (2, 1, 99))
            self.assertEqual(workspace.status()["status"], 0)

    def test_lifetimes(self):
        weights = self.weights("mxfp4")
        device = megamoe.Device(threads=1)
        layer = megamoe.Layer(weights, device)
        with self.assertRaisesRegex(megamoe.StateError, "in use by 1 Layer"):
            device.close()
        layer.close()
        layer.close()
        device.close()
        weights.close()
        with self.assertRaisesRegex(megamoe.StateError, "Weights is closed"):
            weights.unpack(0, "gate")

    def test_devices(self):
        self.assertLessEqual(megamoe.cuda_available(), megamoe.cuda_built())
        with megamoe.Device() as device:
            self.assertGreater(device.measure()["read_gbs"], 0)

    def test_files_and_devices(self):
        with self.assertRaises(LookupError):
            megamoe.Checkpoint(self.path("nothing"))
        with open(self.path("bad.mmoe"), "wb") as file:
            file.write(b"\0" * 8192)
        with self.assertRaisesRegex(megamoe.FormatError, "bad.mmoe"):
            megamoe.Weights.open(self.path("bad.mmoe"))
        with self.assertRaises(megamoe.InvalidArgumentError):
            megamoe.Device("tpu")
        with self.assertRaisesRegex(ValueError, "nvfp4='half'; expected one of exact, folded"):
            megamoe.Layer(self.weights("nvfp4"), nvfp4="half")

    def test_tensors(self):
        gate, down = self.matrices(2, 64, 32, "nvfp4"), self.matrices(2, 32, 64, "nvfp4")
        for up, text in ((gate._replace(codes=gate.codes[:1]), r"up.codes"),
                         (gate._replace(scales=gate.scales.astype(np.int32)), "up.scales"),
                         (gate._replace(global_scale=None), "NVFP4 has one for each expert"),
                         (gate._replace(bias=np.zeros((2, 64), np.float32)), "up.bias")):
            with self.subTest(text), self.assertRaisesRegex(ValueError, text):
                megamoe.Weights.from_tensors(gate, up, down, format="nvfp4")
        bad = gate._replace(scales=np.full_like(gate.scales, 0x7F))
        with self.assertRaises(megamoe.FormatError):
            megamoe.Weights.from_tensors(bad, gate, down, format="nvfp4")

    def test_bfloat16(self):
        values = np.array([1, -2.5, 3.0000001, np.inf, np.nan, 1 + 2**-8, 1 + 3 * 2**-8],
                          np.float32)
        back = megamoe.from_bfloat16(megamoe.to_bfloat16(values))
        np.testing.assert_array_equal(
            back, np.array([1, -2.5, 3, np.inf, np.nan, 1, 1 + 2**-6], np.float32))


if __name__ == "__main__":
    unittest.main()
