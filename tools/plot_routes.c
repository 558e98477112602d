/* SPDX-License-Identifier: Apache-2.0 */
/* Recorded routes of a safetensors file, as `run --out` writes them, in the JSON of loads. */
#include <inttypes.h>
#include <megamoe/checkpoint.h>
#include <string.h>

#include "plot.h"
#include "report.h"

static int64_t id_at(const megamoe_tensor *ids, int64_t i) {
    return strcmp(ids->dtype, "I64") == 0 ? ((const int64_t *)ids->data)[i]
                                          : ((const int32_t *)ids->data)[i];
}

/* The largest id tells how many experts there are. */
static json_t *json_of(const megamoe_tensor *ids) {
    json_t *tokens = json_array();
    int64_t experts = 1;
    for (int64_t t = 0; t < ids->shape[0]; t++) {
        json_t *slots = json_array();
        for (int64_t k = 0; k < ids->shape[1]; k++) {
            const int64_t id = id_at(ids, t * ids->shape[1] + k);
            experts = id >= experts ? id + 1 : experts;
            json_array_append_new(slots, json_integer((json_int_t)id));
        }
        json_array_append_new(tokens, slots);
    }
    return json_pack("{s:o, s:I}", "topk_ids", tokens, "experts", (json_int_t)experts);
}

int plot_read_routes(const char *path, json_t **json) {
    megamoe_checkpoint *file = NULL;
    TRY_LIBRARY(megamoe_tensors_open(path, &file));
    megamoe_tensor ids = {.rank = 0};
    const megamoe_status status = megamoe_checkpoint_tensor(file, "topk_ids", &ids);
    int code = status == MEGAMOE_OK ? EXIT_DONE : report_failure(status);
    const bool integers = strcmp(ids.dtype, "I32") == 0 || strcmp(ids.dtype, "I64") == 0;
    if (code == EXIT_DONE && (ids.rank != 2 || !integers))
        code = report_error("%s: topk_ids: %s of %" PRId32 " dimensions; expected I32 or I64 of 2",
                            path, ids.dtype, ids.rank);
    if (code == EXIT_DONE)
        *json = json_of(&ids);
    megamoe_checkpoint_close(file);
    if (code == EXIT_DONE && *json == NULL)
        code = report_error("%s: out of memory", path);
    return code;
}
