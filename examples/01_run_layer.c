/* SPDX-License-Identifier: Apache-2.0 */
/* Runs four tokens through the expert layer of a prepared file: 01_run_layer FILE */
#include <megamoe/megamoe.h>
#include <stdio.h>
#include <stdlib.h>

#define TRY(call)                                                                                  \
    do {                                                                                           \
        if ((call) != MEGAMOE_OK)                                                                  \
            return fprintf(stderr, "%s\n", megamoe_last_error()), EXIT_FAILURE;                    \
    } while (0)

enum { TOKENS = 4, MAX_HIDDEN = 16384, MAX_TOPK = 64 };
static uint16_t x_data[TOKENS * MAX_HIDDEN], y_data[TOKENS * MAX_HIDDEN]; /* BF16 */
static int32_t ids_data[TOKENS * MAX_TOPK], token_ids[TOKENS] = {11, 22, 33, 44};
static float weights_data[TOKENS * MAX_TOPK];

int main(int argc, char **argv) {
    if (argc != 2)
        return EXIT_FAILURE;
    megamoe_weights *weights;
    TRY(megamoe_weights_open(argv[1], &weights));
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    TRY(megamoe_weights_describe(weights, &desc));
    if (desc.hidden > MAX_HIDDEN || desc.topk > MAX_TOPK)
        return EXIT_FAILURE;

    megamoe_comm *comm;
    megamoe_device *device;
    megamoe_layer *layer;
    megamoe_workspace *workspace;
    const megamoe_shape shape = {.struct_size = sizeof shape,
                                 .hidden = desc.hidden,
                                 .intermediate = desc.intermediate,
                                 .experts = desc.experts,
                                 .topk = desc.topk};
    const megamoe_capacity capacity = {.struct_size = sizeof capacity, .tokens = TOKENS};
    TRY(megamoe_comm_self(&comm));
    TRY(megamoe_device_open("cpu", NULL, &device));
    TRY(megamoe_layer_create(comm, device, weights, NULL, &layer));
    TRY(megamoe_workspace_create(comm, device, &shape, &capacity, &workspace));
    TRY(megamoe_prewarm(layer, workspace));

    for (int i = 0; i < TOKENS * desc.hidden; i++)
        x_data[i] = (uint16_t)(i % 5 % 2 ? 0x3f80 : 0xbf00); /* 1 and -0.5 */
    const megamoe_view x = {x_data, MEGAMOE_DTYPE_BF16, TOKENS, 0};
    const megamoe_view y = {y_data, MEGAMOE_DTYPE_BF16, TOKENS, 0};
    const megamoe_view ids = {ids_data, MEGAMOE_DTYPE_I32, TOKENS, 0};
    const megamoe_view topk_weights = {weights_data, MEGAMOE_DTYPE_F32, TOKENS, 0};
    const megamoe_view tokens = {token_ids, MEGAMOE_DTYPE_I32, 1, 0};
    const megamoe_router *router = megamoe_weights_router(weights);
    TRY(megamoe_router_route(router, device, &x, &tokens, TOKENS, &ids, &topk_weights));
    TRY(megamoe_stage(workspace, &x, &ids, &topk_weights, TOKENS, NULL));
    TRY(megamoe_forward(layer, workspace, &y, NULL));
    TRY(megamoe_workspace_status(workspace, NULL));
    printf("token 0 went to expert %d first; its row begins with BF16 %04x %04x %04x\n",
           ids_data[0], y_data[0], y_data[1], y_data[2]);

    megamoe_workspace_close(workspace);
    megamoe_layer_close(layer);
    megamoe_device_close(device);
    megamoe_comm_close(comm);
    megamoe_weights_close(weights);
    return EXIT_SUCCESS;
}
