# SPDX-License-Identifier: Apache-2.0
"""Small layers with random weights, and the devices that this machine has."""
import os
import subprocess
import tempfile
import unittest

import megamoe
import numpy as np

SEED = int(os.environ.get("MEGAMOE_SEED", "1"))
FORMATS = ("mxfp4", "nvfp4")


def devices():
    """"cpu", and "cuda:0" where the library finds a GPU that it can use; or what MEGAMOE_DEVICES
    says, separated by commas."""
    if "MEGAMOE_DEVICES" in os.environ:
        return os.environ["MEGAMOE_DEVICES"].split(",")
    try:
        megamoe.Device("cuda:0").close()
    except megamoe.MegaMoEError:
        return ["cpu"]
    return ["cpu", "cuda:0"]


class Case(unittest.TestCase):
    def setUp(self):
        self.rng = np.random.default_rng(SEED)
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def synth(self, *arguments):
        """A synthetic checkpoint of the tool."""
        out = tempfile.mkdtemp(dir=self.folder.name)
        subprocess.run([os.environ["MEGAMOE_TOOL"], "synth", "--out", out, *arguments], check=True,
                       stdout=subprocess.DEVNULL)
        return out

    def matrices(self, experts, rows, columns, format, bias=False):
        weight = self.rng.standard_normal((experts, rows, columns), dtype=np.float32) * .1
        return megamoe.Projection(*megamoe.quantize(weight, format),
                                  bias=self.rng.standard_normal((experts, rows), dtype=np.float32)
                                  if bias else None)

    def weights(self, format, experts=8, hidden=160, intermediate=96, topk=3, bias=False,
                **options):
        gate, up = (self.matrices(experts, intermediate, hidden, format, bias) for _ in range(2))
        down = self.matrices(experts, hidden, intermediate, format, bias)
        return megamoe.Weights.from_tensors(gate, up, down, format=format, topk=topk, **options)

    def batch(self, weights, tokens, topk=None):
        """x (the bits of BF16), topk_ids and topk_weights of random tokens."""
        topk = topk or weights.topk
        x = megamoe.to_bfloat16(self.rng.standard_normal((tokens, weights.hidden)))
        ids = np.argsort(self.rng.random((tokens, weights.experts)), axis=1)[:, :topk]
        return x, ids, self.rng.random((tokens, topk), dtype=np.float32)

    def assertSameBits(self, a, b):
        self.assertEqual(np.asarray(a).shape, np.asarray(b).shape)
        differing = int((np.asarray(a) != np.asarray(b)).any(axis=-1).sum())
        self.assertEqual(differing, 0, f"{differing} rows differ; seed {SEED}")
