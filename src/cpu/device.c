/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "megamoe/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/device.h"
#include "base/error.h"
#include "base/memory.h"
#include "cpu/kernels.h"

static megamoe_status check_name(const char *name) {
    if (!name)
        return mm_fail(MEGAMOE_EINVAL, "device name is NULL: expected \"cpu\"");
    if (strcmp(name, "cpu") == 0)
        return MEGAMOE_OK;
    if (strcmp(name, "cuda") == 0 || strncmp(name, "cuda:", 5) == 0)
        return mm_fail(MEGAMOE_EUNSUPPORTED, "device '%s': this build has no CUDA backend", name);
    return mm_fail(MEGAMOE_EINVAL, "device '%s': expected cpu", name);
}

megamoe_status megamoe_device_open(const char *name, const megamoe_device_options *options,
                                   megamoe_device **device) {
    if (!device)
        return mm_fail(MEGAMOE_EINVAL, "device is NULL");
    *device = NULL;
    MM_TRY(check_name(name));
    megamoe_device_options o;
    MM_TRY(mm_take_struct(&o, sizeof o, options, "megamoe_device_options"));
    mm_tier tier;
    MM_TRY(mm_tier_detect(&tier));

    megamoe_device *d = mm_alloc(sizeof *d);
    if (!d)
        return mm_fail(MEGAMOE_ENOMEM, "a device: out of memory");
    const megamoe_status status = mm_pool_open(o.threads, o.first_core, !o.no_pinning, &d->pool);
    if (status != MEGAMOE_OK) {
        megamoe_device_close(d);
        return status;
    }
    const int32_t threads = mm_pool_threads(d->pool);
    d->kernels = mm_kernels_of(tier);
    d->pinned = !o.no_pinning && (int64_t)o.first_core + threads <= mm_pool_cores();
    *device = d;
    return MEGAMOE_OK;
}

void megamoe_device_close(megamoe_device *device) {
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

megamoe_status megamoe_device_describe(const megamoe_device *device, megamoe_device_info *info) {
    if (!device || !info)
        return mm_fail(MEGAMOE_EINVAL, "%s is NULL", device ? "info" : "device");
    megamoe_device_info found = {
        .struct_size = sizeof found,
        .name = "cpu",
        .threads = mm_pool_threads(device->pool),
        .cores = mm_pool_cores(),
        .pinned = device->pinned,
    };
    find_model(found.model, sizeof found.model);
    snprintf(found.tier, sizeof found.tier, "%s", device->kernels->tier);
    return mm_give_struct(info, &found, sizeof found, "megamoe_device_info");
}
