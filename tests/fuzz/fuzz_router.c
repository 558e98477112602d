/* SPDX-License-Identifier: Apache-2.0 */
/* The saved router: it must be refused or route a token to experts that exist. */
#include <stdlib.h>
#include <string.h>

#include "num/bf16.h"
#include "router/router.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void route_one(const megamoe_router *router) {
    megamoe_router_desc desc = MEGAMOE_INIT(megamoe_router_desc);
    if (megamoe_router_describe(router, &desc) != MEGAMOE_OK)
        abort();
    uint16_t *x = calloc((size_t)desc.hidden, sizeof *x);
    int64_t *ids = calloc((size_t)desc.topk, sizeof *ids);
    float *weights = calloc((size_t)desc.topk, sizeof *weights);
    if (x && ids && weights) {
        for (int32_t k = 0; k < desc.hidden; k++)
            x[k] = mm_bf16_from_f32((float)(k % 7 - 3));
        int32_t input_id = 0;
        const megamoe_view x_view = {x, MEGAMOE_DTYPE_BF16, 1, 0};
        const megamoe_view input_view = {&input_id, MEGAMOE_DTYPE_I32, 1, 0};
        const megamoe_view ids_view = {ids, MEGAMOE_DTYPE_I64, 1, 0};
        const megamoe_view weights_view = {weights, MEGAMOE_DTYPE_F32, 1, 0};
        if (megamoe_router_route(router, NULL, &x_view, &input_view, 1, &ids_view, &weights_view) !=
            MEGAMOE_OK)
            abort();
        for (int32_t slot = 0; slot < desc.topk; slot++)
            if (ids[slot] < 0 || ids[slot] >= desc.experts)
                abort();
    }
    free(weights);
    free(ids);
    free(x);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    /* Own memory: aligned, and exactly as long as the input. */
    void *bytes = malloc(size + (size == 0));
    if (!bytes)
        return 0;
    memcpy(bytes, data, size);
    megamoe_router *router;
    if (mm_router_load(bytes, size, "input", &router) == MEGAMOE_OK) {
        if (mm_router_saved_bytes(router) != size)
            abort();
        route_one(router);
        megamoe_router_close(router);
    }
    free(bytes);
    return 0;
}
