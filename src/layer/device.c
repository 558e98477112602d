/* SPDX-License-Identifier: Apache-2.0 */
#include "megamoe/device.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "cpu/device.h"
#include "cuda/cubins.h"
#include "cuda/device.h"

enum { ON_CPU = -1, MAX_GPUS = 1000 };

/* The number of a GPU, or ON_CPU. */
static megamoe_status read_name(const char *name, int32_t *gpu) {
    *gpu = ON_CPU;
    if (!name)
        return mm_fail(MEGAMOE_EINVAL, "device name is NULL: expected \"cpu\", \"cuda\" or "
                                       "\"cuda:N\"");
    if (strcmp(name, "cpu") == 0)
        return MEGAMOE_OK;
    if (strcmp(name, "cuda") == 0) {
        *gpu = 0;
        return MEGAMOE_OK;
    }
    const char *digits = strncmp(name, "cuda:", 5) == 0 ? name + 5 : "";
    int32_t number = 0;
    const char *c = digits;
    for (; *c >= '0' && *c <= '9' && number < MAX_GPUS; c++)
        number = 10 * number + (*c - '0');
    if (c == digits || *c || number >= MAX_GPUS)
        return mm_fail(MEGAMOE_EINVAL, "device '%s': expected cpu, cuda or cuda:N", name);
    *gpu = number;
    return MEGAMOE_OK;
}

megamoe_status megamoe_device_open(const char *name, const megamoe_device_options *options,
                                   megamoe_device **device) {
    if (!device)
        return mm_fail(MEGAMOE_EINVAL, "device is NULL");
    *device = NULL;
    int32_t gpu;
    MM_TRY(read_name(name, &gpu));
    megamoe_device_options o;
    MM_TRY(mm_take_struct(&o, sizeof o, options, "megamoe_device_options"));
    if (gpu == ON_CPU && o.max_ctas != 0)
        return mm_fail(MEGAMOE_EINVAL, "max_ctas is %" PRId32 ": the CPU has no thread blocks",
                       o.max_ctas);
    /* The GPU first: where there is none, threads need not start. */
    mm_cuda_device *cuda = NULL;
    if (gpu != ON_CPU)
        MM_TRY(mm_cuda_open(gpu, o.max_ctas, &cuda));
    const megamoe_status status = mm_cpu_open(&o, device);
    if (status != MEGAMOE_OK) {
        mm_cuda_close(cuda);
        return status;
    }
    (*device)->cuda = cuda;
    return MEGAMOE_OK;
}

void megamoe_device_close(megamoe_device *device) {
    if (!device)
        return;
    mm_cuda_close(device->cuda);
    mm_cpu_close(device);
}

megamoe_status megamoe_device_count(const char *kind, int32_t *count) {
    if (!kind || !count)
        return mm_fail(MEGAMOE_EINVAL, "%s is NULL", kind ? "count" : "kind");
    *count = 0;
    if (strcmp(kind, "cuda") == 0)
        return mm_cuda_count(count);
    if (strcmp(kind, "cpu") != 0)
        return mm_fail(MEGAMOE_EINVAL, "kind of device '%s': expected cpu or cuda", kind);
    *count = 1;
    return MEGAMOE_OK;
}

static void describe_gpu(const mm_cuda_device *d, megamoe_device_info *info) {
    snprintf(info->name, sizeof info->name, "cuda:%" PRId32, d->ordinal);
    snprintf(info->model, sizeof info->model, "%s", d->model);
    snprintf(info->tier, sizeof info->tier, "sm_%" PRId32 "%" PRId32 "a", d->major, d->minor);
    info->multiprocessors = d->multiprocessors;
    info->max_ctas = d->max_ctas;
    info->capability_major = d->major;
    info->capability_minor = d->minor;
    info->driver_version = d->driver_version;
    info->memory_bytes = d->memory_bytes;
}

megamoe_status megamoe_device_describe(const megamoe_device *device, megamoe_device_info *info) {
    if (!device || !info)
        return mm_fail(MEGAMOE_EINVAL, "%s is NULL", device ? "info" : "device");
    megamoe_device_info found = {.struct_size = sizeof found, .cuda_built = mm_cubin_count > 0};
    mm_cpu_describe(device, &found);
    if (device->cuda)
        describe_gpu(device->cuda, &found);
    return mm_give_struct(info, &found, sizeof found, "megamoe_device_info");
}

megamoe_status megamoe_device_measure(megamoe_device *device, megamoe_device_ceilings *ceilings) {
    if (!device || !ceilings)
        return mm_fail(MEGAMOE_EINVAL, "%s is NULL", device ? "ceilings" : "device");
    megamoe_device_ceilings found = {.struct_size = sizeof found};
    if (device->cuda)
        MM_TRY(mm_cuda_measure(device->cuda, &found));
    else
        MM_TRY(mm_cpu_measure(device, &found));
    return mm_give_struct(ceilings, &found, sizeof found, "megamoe_device_ceilings");
}

megamoe_status megamoe_device_measure_link(megamoe_device *a, megamoe_device *b,
                                           megamoe_link_speed *speed) {
    if (!a || !b || !speed)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_device_measure_link: %s is NULL",
                       !speed ? "speed" : "a device");
    if (!a->cuda || !b->cuda || a->cuda->ordinal == b->cuda->ordinal)
        return mm_fail(MEGAMOE_EINVAL, "a link is measured between two GPUs");
    megamoe_link_speed found = {.struct_size = sizeof found};
    MM_TRY(mm_cuda_measure_link(a->cuda, b->cuda, &found));
    return mm_give_struct(speed, &found, sizeof found, "megamoe_link_speed");
}
