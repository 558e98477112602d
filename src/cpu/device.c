/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "cpu/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "cpu/kernels.h"

megamoe_status mm_cpu_open(const megamoe_device_options *options, megamoe_device **device) {
    *device = NULL;
    mm_tier tier;
    MM_TRY(mm_tier_detect(&tier));
    megamoe_device *d = mm_alloc(sizeof *d);
    if (!d)
        return mm_fail(MEGAMOE_ENOMEM, "a device: out of memory");
    const megamoe_status status =
        mm_pool_open(options->threads, options->first_core, !options->no_pinning, &d->pool);
    if (status != MEGAMOE_OK) {
        mm_cpu_close(d);
        return status;
    }
    const int32_t threads = mm_pool_threads(d->pool);
    d->kernels = mm_kernels_of(tier);
    d->pinned = !options->no_pinning && (int64_t)options->first_core + threads <= mm_pool_cores();
    *device = d;
    return MEGAMOE_OK;
}

void mm_cpu_close(megamoe_device *device) {
    if (!device)
        return;
    mm_pool_close(device->pool);
    free(device);
}

/* The first "model name" that the kernel tells, where it tells one. */
static void find_model(char *model, size_t bytes) {
    snprintf(model, bytes, "unknown");
    FILE *file = fopen("/proc/cpuinfo", "re");
    if (!file)
        return;
    char line[256];
    while (fgets(line, sizeof line, file)) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon)
            continue;
        const char *name = colon + 1 + strspn(colon + 1, " \t");
        snprintf(model, bytes, "%.*s", (int)strcspn(name, "\n"), name);
        break;
    }
    fclose(file);
}

void mm_cpu_describe(const megamoe_device *device, megamoe_device_info *info) {
    snprintf(info->name, sizeof info->name, "cpu");
    find_model(info->model, sizeof info->model);
    snprintf(info->tier, sizeof info->tier, "%s", device->kernels->tier);
    info->threads = mm_pool_threads(device->pool);
    info->cores = mm_pool_cores();
    info->pinned = device->pinned;
}
