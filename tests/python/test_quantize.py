# SPDX-License-Identifier: Apache-2.0
"""megamoe.quantize against its definition in exact arithmetic."""
import unittest
from fractions import Fraction

import megamoe
import numpy as np
from common import FORMATS, Case

E2M1 = [Fraction(v) for v in (0, .5, 1, 1.5, 2, 3, 4, 6)]
E4M3 = [Fraction(m, 8) * Fraction(2) ** -6 for m in range(8)] + [
    (1 + Fraction(m, 8)) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8)][:119]


def nearest(table, value):
    """Index of the nearest entry, ties to the even index."""
    return min(range(len(table)), key=lambda i: (abs(table[i] - value), i % 2))


class Quantize(Case):
    def check(self, row, format):
        got = megamoe.quantize(row[None], format)
        block = 32 if format == "mxfp4" else 16
        largest = max(abs(Fraction(float(v))) for v in row)
        unit = Fraction(1)
        if format == "nvfp4" and largest:
            unit = Fraction(float(np.float32(float(largest) / 2688)))
        self.assertEqual(Fraction(float(got.global_scale)), unit)
        for group in range(len(row) // block):
            values = [Fraction(float(v)) for v in row[group * block:(group + 1) * block]]
            top = max(map(abs, values))
            byte = int(got.scales[0, group])
            if format == "mxfp4":
                scale = Fraction(2) ** (byte - 127)
                if top:
                    self.assertTrue(3 * scale < top <= 6 * scale)
            else:
                scale = E4M3[byte] * unit
                wanted = max(top / (6 * unit), Fraction(2) ** -9) if top else Fraction(1)
                self.assertEqual(byte, nearest(E4M3, wanted))
            for i, value in enumerate(values):
                code = int(got.codes[0, (group * block + i) // 2]) >> 4 * (i % 2) & 15
                self.assertEqual(code & 7, nearest(E2M1, abs(value) / scale))
                self.assertTrue(value == 0 or (code >= 8) == (value < 0))
        exact = megamoe.dequantize(got, format)
        again = megamoe.quantize(exact, format)
        self.assertSameBits(megamoe.dequantize(again, format), exact)

    def test_random(self):
        for format in FORMATS:
            with self.subTest(format):
                row = self.rng.standard_normal(256, dtype=np.float32)
                self.check(row * np.float32(2) ** self.rng.integers(-20, 20, 256), format)
                self.check(row, format)

    def test_ties_zeros_and_small(self):
        ties = np.array([.25, .75, 1.25, 1.75, 2.5, 3.5, 5, 6] * 4, np.float32)
        near = np.concatenate([np.nextafter(ties, 0), np.nextafter(ties, 9).clip(max=6)])
        for format in FORMATS:
            with self.subTest(format):
                self.check(np.concatenate([ties, -ties, near, np.zeros(32, np.float32)]), format)
                self.check(np.zeros(64, np.float32), format)

    def test_shapes(self):
        for format in FORMATS:
            weight = self.rng.standard_normal((2, 3, 4, 64), dtype=np.float32)
            whole = megamoe.quantize(weight, format)
            self.assertEqual(whole.codes.shape, (2, 3, 4, 32))
            self.assertEqual(whole.global_scale.shape, (2, 3))
            part = megamoe.quantize(weight[1, 2], format)
            self.assertSameBits(whole.codes[1, 2], part.codes)
            self.assertSameBits(whole.scales[1, 2], part.scales)

    def test_refused(self):
        for weight, format, text in ((np.zeros((2, 30)), "mxfp4", "multiple of 32"),
                                     (np.zeros((2, 32)), "fp8", "expected one of mxfp4, nvfp4"),
                                     (np.full((1, 32), np.nan), "nvfp4", "NaN")):
            with self.assertRaisesRegex(megamoe.InvalidArgumentError, text):
                megamoe.quantize(weight, format)


if __name__ == "__main__":
    unittest.main()
