# SPDX-License-Identifier: Apache-2.0
"""A layer from your own weights, with numpy alone: quantize, prepare a file, run, compare.

    python3 01_numpy_layer.py [layer.mmoe]
"""
import os
import sys
import tempfile

import megamoe
import numpy as np

EXPERTS, HIDDEN, INTERMEDIATE, TOPK, TOKENS = 16, 256, 128, 4, 10


def main() -> None:
    rng = np.random.default_rng(1)

    def matrices(rows: int, columns: int) -> megamoe.Projection:
        weight = rng.standard_normal((EXPERTS, rows, columns), np.float32) / columns**.5
        return megamoe.Projection(*megamoe.quantize(weight, "nvfp4"))

    # 1. Weights. A checkpoint's own 4-bit tensors go the same way, or megamoe.Weights.open(folder).
    weights = megamoe.Weights.from_tensors(
        gate=matrices(INTERMEDIATE, HIDDEN), up=matrices(INTERMEDIATE, HIDDEN),
        down=matrices(HIDDEN, INTERMEDIATE), format="nvfp4", topk=TOPK)
    print(weights)

    # 2. Packed once, read ever after.
    with tempfile.TemporaryDirectory() as folder:
        path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(folder, "layer.mmoe")
        weights.prepare(path)
        print(f"{path}: {os.path.getsize(path)} bytes")

        # 3. A batch: BF16 rows, and for each token the experts of its choice with their weights.
        x = megamoe.to_bfloat16(rng.standard_normal((TOKENS, HIDDEN)))
        topk_ids = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :TOPK]
        topk_weights = rng.random((TOKENS, TOPK), np.float32)
        with megamoe.Layer.open(path) as layer:
            y = layer(x, topk_ids, topk_weights)
        print("first row:", megamoe.from_bfloat16(y)[0, :6])

    # 4. The scalar reference gives the same bits.
    expected = weights.reference(x, topk_ids, topk_weights)
    differing = int((y != expected).any(axis=1).sum())
    print(f"rows that differ from the reference: {differing} of {TOKENS}")
    sys.exit(differing != 0)


if __name__ == "__main__":
    main()
