/* SPDX-License-Identifier: Apache-2.0 */
#include "comm/environment.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"

enum { TORCH_PORT = 29500, PORT_OFFSET = 1000, PORT_MOST = 65535, RANKS_MOST = 1024 };

/* Launchers, the first of which all `rank`, `size` and `needed` are set counts. */
static const struct launcher {
    const char *rank, *size;
    const char *needed; /* what tells this launcher from others; or NULL */
    const char *job;    /* or NULL */
} launchers[] = {
    {"RANK", "WORLD_SIZE", NULL, "TORCHELASTIC_RUN_ID"}, /* torchrun, megamoe launch, by hand */
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_JOB_ID"}, /* not in batch scripts */
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", NULL, "PMIX_NAMESPACE"},
    {"PMI_RANK", "PMI_SIZE", NULL, NULL},
};

/* NULL for an empty variable too. */
static const char *value_of(const char *name) {
    const char *text = name ? getenv(name) : NULL;
    return text && *text ? text : NULL;
}

static megamoe_status read_number(const char *name, int64_t least, int64_t most, int32_t *number) {
    const char *text = value_of(name);
    char *end = NULL;
    const long long value = text ? strtoll(text, &end, 10) : -1;
    if (!text || *end || value < least || value > most)
        return mm_fail(MEGAMOE_EINVAL, "environment variable %s is '%s'; expected %lld..%lld", name,
                       text ? text : "", (long long)least, (long long)most);
    *number = (int32_t)value;
    return MEGAMOE_OK;
}

static megamoe_status read_port(int32_t *port) {
    if (value_of("MEGAMOE_PORT"))
        return read_number("MEGAMOE_PORT", 1, PORT_MOST, port);
    int32_t masters = TORCH_PORT;
    if (value_of("MASTER_PORT"))
        MM_TRY(read_number("MASTER_PORT", 1, PORT_MOST, &masters));
    *port = masters + PORT_OFFSET <= PORT_MOST ? masters + PORT_OFFSET : masters - PORT_OFFSET;
    return MEGAMOE_OK;
}

megamoe_status mm_environment_read(megamoe_comm_tcp_options *options) {
    const struct launcher *found = NULL;
    for (size_t i = 0; !found && i < sizeof launchers / sizeof *launchers; i++) {
        const struct launcher *l = &launchers[i];
        if (value_of(l->rank) && value_of(l->size) && (!l->needed || value_of(l->needed)))
            found = l;
    }
    if (!found)
        return mm_fail(MEGAMOE_ENOTFOUND,
                       "no launcher has set RANK and WORLD_SIZE, nor those of Slurm or MPI");
    MM_TRY(read_number(found->size, 1, RANKS_MOST, &options->size));
    MM_TRY(read_number(found->rank, 0, options->size - 1, &options->rank));
    MM_TRY(read_port(&options->port));
    options->address = value_of("MASTER_ADDR");
    options->job = value_of("MEGAMOE_JOB");
    if (!options->job)
        options->job = value_of(found->job);
    return MEGAMOE_OK;
}
