/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Takes MXFP4 weights from memory of one's own, as an engine does that has loaded them already,
 * writes them as a prepared file and reads values back: 03_own_weights FILE
 */
#include <megamoe/megamoe.h>
#include <stdio.h>
#include <stdlib.h>

#define TRY(call)                                                                                  \
    do {                                                                                           \
        if ((call) != MEGAMOE_OK)                                                                  \
            return fprintf(stderr, "%s\n", megamoe_last_error()), EXIT_FAILURE;                    \
    } while (0)

enum { HIDDEN = 64, INTERMEDIATE = 32, EXPERTS = 4, BLOCK = 32 };
enum { CODE_BYTES = HIDDEN * INTERMEDIATE / 2, SCALES = HIDDEN * INTERMEDIATE / BLOCK };

static uint8_t codes[EXPERTS][3][CODE_BYTES];
static uint8_t scales[EXPERTS][3][SCALES];
static double values[HIDDEN * INTERMEDIATE];

int main(int argc, char **argv) {
    if (argc != 2)
        return EXIT_FAILURE;
    const megamoe_layer_desc desc = {.struct_size = sizeof desc,
                                     .layer = 7,
                                     .hidden = HIDDEN,
                                     .intermediate = INTERMEDIATE,
                                     .experts = EXPERTS,
                                     .topk = 2,
                                     .format = MEGAMOE_FORMAT_MXFP4};
    megamoe_matrix matrices[EXPERTS * 3];
    for (int e = 0; e < EXPERTS; e++) {
        for (int p = MEGAMOE_GATE; p <= MEGAMOE_DOWN; p++) {
            const size_t columns = p == MEGAMOE_DOWN ? INTERMEDIATE : HIDDEN;
            for (int i = 0; i < CODE_BYTES; i++)
                codes[e][p][i] = (uint8_t)(i * 31 + e * 7 + p);
            for (int i = 0; i < SCALES; i++)
                scales[e][p][i] = (uint8_t)(120 + i % 3); /* 2^-7, 2^-6, 2^-5 */
            matrices[e * 3 + p] = (megamoe_matrix){.codes = codes[e][p],
                                                   .codes_stride = columns / 2,
                                                   .scales = scales[e][p],
                                                   .scales_stride = columns / BLOCK};
        }
    }

    megamoe_weights *weights, *prepared;
    TRY(megamoe_weights_from_tensors(&desc, matrices, &weights));
    TRY(megamoe_weights_prepare(weights, NULL, NULL, argv[1]));
    megamoe_weights_close(weights);

    const megamoe_progress silent = {0};
    TRY(megamoe_weights_open(argv[1], &prepared));
    TRY(megamoe_weights_verify(prepared, silent));
    TRY(megamoe_weights_unpack(prepared, 0, MEGAMOE_GATE, values));
    megamoe_weights_close(prepared);
    /* Byte 1 is 31 = 0x1f: codes 0xf and 0x1, that is -6 and 0.5, times 2^-7. */
    printf("expert 0, gate, row 0, k = 2 and 3: %g and %g\n", values[2], values[3]);
    return values[2] == -6 / 128.0 && values[3] == 0.5 / 128 ? EXIT_SUCCESS : EXIT_FAILURE;
}
