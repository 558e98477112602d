# SPDX-License-Identifier: Apache-2.0
"""The way of tensors to a GPU, on any machine: a driver whose device memory is the host's and whose
kernels do nothing, and tensors of it that speak DLPack."""
import ctypes
import sys
import unittest

import megamoe
import numpy as np
from common import Case
from megamoe import _tensor


class DeviceTensor:
    """Memory of GPU `index`; remembers for which stream it was last handed over."""

    def __init__(self, array, index=0):
        self.array, self.index, self.stream = array, index, None

    def __dlpack_device__(self):
        return _tensor.KDL_CUDA, self.index

    def __dlpack__(self, stream=None):
        self.stream = stream
        capsule = self.array.__dlpack__()
        tensor = ctypes.cast(_tensor._get_pointer(capsule, b"dltensor"),
                             ctypes.POINTER(_tensor._DLTensor)).contents
        tensor.device_type, tensor.device_id = self.__dlpack_device__()
        return capsule


class Cuda(Case):
    def batch_on_device(self, weights, tokens):
        return [DeviceTensor(array) for array in self.batch(weights, tokens)]

    def test_device(self):
        self.assertEqual(megamoe.device_count("cuda"), 1)
        with megamoe.Device("cuda") as device:
            self.assertEqual((device.name, device.type), ("cuda:0", "cuda"))
            self.assertIn("H200", device.info()["model"])
        self.assertTrue(megamoe.cuda_available())

    def test_streams(self):
        with self.weights("mxfp4") as weights, megamoe.Layer(weights, "cuda:0") as layer, \
                layer.workspace(tokens=8) as workspace:
            layer.prewarm(workspace)
            for stream, handed in ((None, 1), (0, 1), (0x1234, 0x1234)):
                batch = self.batch_on_device(weights, 8)
                out = DeviceTensor(np.zeros((8, weights.hidden), np.uint16))
                workspace.stage(*batch, stream=stream)
                workspace.forward(layer, out, stream=stream)
                self.assertEqual([tensor.stream for tensor in (*batch, out)], [handed] * 4)
            self.assertEqual(workspace.status()["status"], 0)
            self.assertEqual(sum(workspace.parts().values()), workspace.nbytes)
            self.assertIn("total_us", workspace.times())

    def test_call(self):
        with self.weights("nvfp4") as weights, megamoe.Layer(weights, "cuda:0") as layer:
            out = DeviceTensor(np.zeros((5, weights.hidden), np.uint16))
            self.assertIs(layer(*self.batch_on_device(weights, 5), out), out)
            with self.assertRaisesRegex(ValueError, "out: None; on a GPU it is the caller's"):
                layer(*self.batch_on_device(weights, 5))
            x, ids, scale = self.batch_on_device(weights, 5)
            with self.assertRaisesRegex(ValueError, "x: on cpu; expected on cuda:0"):
                layer(x.array, ids, scale, out)
            ids.index = 1
            with self.assertRaisesRegex(ValueError, "topk_ids: on cuda:1; expected on cuda:0"):
                layer(x, ids, scale, out)

    def test_views_and_plan(self):
        with self.weights("mxfp4") as weights, megamoe.Layer(weights, "cuda:0") as layer, \
                layer.workspace(tokens=8, input_scale="block") as workspace:
            views = workspace.views()
            codes = views["codes"].__cuda_array_interface__
            self.assertEqual((views["codes"].shape, codes["typestr"], codes["version"]),
                             ((8, weights.hidden), "|u1", 3))
            self.assertEqual(views["scales"].shape, (8, 2))
            self.assertNotEqual(codes["data"][0], views["topk_ids"].__cuda_array_interface__["data"])
            workspace.commit(3, stream=0x1234)
            workspace.set_plan(token_tile=16, lag=2)
            with self.assertRaisesRegex(ValueError, "lag"):
                workspace.set_plan(lag=-1)
            with self.assertRaises(megamoe.UnsupportedError):
                layer.workspace(tokens=8, activations="int8")

    def test_prepared(self):
        with self.weights("mxfp4") as weights:
            weights.prepare(self.path("cuda.mmoe"), device="cuda")
        with megamoe.Weights.open(self.path("cuda.mmoe")) as prepared, \
                megamoe.Layer(prepared, "cuda:0") as layer:
            self.assertEqual(prepared.prepared_for, "cuda")
            self.assertGreater(layer.nbytes, 0)
            with self.assertRaises(megamoe.UnsupportedError):
                megamoe.Layer(prepared)


if __name__ == "__main__":
    try:
        megamoe.device_count("cuda")
    except megamoe.UnsupportedError as reason:
        print("skipped:", reason)
        sys.exit(77)
    unittest.main()
