/* SPDX-License-Identifier: Apache-2.0 */
/* Few tokens of small shapes, for compute-sanitizer, under which all else takes too long. */
#include <stdlib.h>

#include "gpu.h"

/* `ctas` 0: as many thread blocks as there are. */
static void check(const gpu *g, int32_t ranks, int kind, megamoe_accumulate accumulate,
                  int32_t ctas) {
    t_random r = t_random_start(10 + (uint64_t)kind);
    const model_recipe recipe = {kind ? MEGAMOE_FORMAT_NVFP4 : MEGAMOE_FORMAT_MXFP4,
                                 160,
                                 96,
                                 3,
                                 MEGAMOE_DTYPE_BF16,
                                 {1.702f, 1, 7}};
    model m = model_open(&recipe, &r);
    batch b = batch_random(&m, 5, 2, ROUTING_RANDOM, &r);
    b.ids[3] = -1;
    setup s = {.weights = m.weights,
               .device = "cuda:0",
               .ranks = ranks,
               .folded = true,
               .topk = 2,
               .tokens = 5,
               .pool_rows = 10,
               .input_scale = ranks == 1 ? MEGAMOE_SCALE_TOKEN : MEGAMOE_SCALE_BLOCK,
               .options = {.accumulate = accumulate,
                           .nvfp4 = kind == 2 ? MEGAMOE_NVFP4_FOLDED : MEGAMOE_NVFP4_EXACT}};
    uint16_t *want = gpu_rows(&b), *y = gpu_rows(&b);
    gpu_reference(&s, &b, want);
    fleet f = gpu_fleet_open(&s, ctas);
    gpu_batch buffers = gpu_batch_open(5, 160, 2);
    for (int i = 0; i < 3; i++) { /* both parities */
        gpu_forward(&f, &buffers, &b, y, g->stream);
        gpu_same(y, want, &b, "%d ranks, kind %d", ranks, kind);
    }
    gpu_batch_close(&buffers);
    fleet_close(&f);
    free(want);
    free(y);
    batch_free(&b);
    model_close(&m);
}

T_CASE(sanitize_small_forwards) {
    gpu g = gpu_start();
    for (int kind = 0; kind < 3; kind++)
        for (int promote = 0; promote < 2; promote++)
            check(&g, 1 + (kind + promote) % 2, kind, (megamoe_accumulate)promote, 0);
    gpu_end(&g);
}

T_CASE(sanitize_forwards_of_one_block) {
    gpu g = gpu_start();
    for (int kind = 0; kind < 3; kind++)
        check(&g, 1, kind, MEGAMOE_ACCUMULATE_MMA, 1);
    gpu_end(&g);
}
