/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe info: the library, a device and its ceilings, and the GPUs of this machine. */
#include <inttypes.h>
#include <megamoe/megamoe.h>
#include <stdio.h>
#include <string.h>

#include "commands.h"
#include "options.h"
#include "report.h"

enum { MAX_LINKS = 16 };

/* From the device to another GPU. */
typedef struct link {
    int32_t gpu;
    megamoe_link_speed speed;
    char why[256]; /* there is none; "" if there is */
} link;

typedef struct information {
    megamoe_device_info device;
    megamoe_device_ceilings ceilings;
    bool measured;
    link links[MAX_LINKS];
    int n_links;
} information;

static bool is_gpu(const megamoe_device_info *device) {
    return device->multiprocessors > 0;
}

static json_t *ceilings_json(const information *info) {
    const megamoe_device_ceilings *c = &info->ceilings;
    if (is_gpu(&info->device))
        return json_pack("{s:f, s:f, s:f}", "read_gbs", c->read_gbs, "copy_gbs", c->copy_gbs,
                         "mma_tflops", c->mma_tflops);
    return json_pack("{s:f, s:f, s:f}", "read_gbs", c->read_gbs, "dot_gflops", c->dot_gflops,
                     "int8_gops", c->int8_gops);
}

static json_t *link_json(const link *l) {
    if (l->why[0] != '\0')
        return json_pack("{s:i, s:s}", "gpu", l->gpu, "error", l->why);
    json_t *points = json_array();
    for (int i = 0; i < MEGAMOE_LINK_POINTS; i++)
        json_array_append_new(points, json_pack("{s:i, s:f, s:f, s:f, s:f}", "multiprocessors",
                                                l->speed.push[i].multiprocessors, "bulk_gbs",
                                                l->speed.push[i].bulk_gbs, "store_gbs",
                                                l->speed.push[i].store_gbs, "bulk_both_gbs",
                                                l->speed.push[i].bulk_both_gbs, "store_both_gbs",
                                                l->speed.push[i].store_both_gbs));
    return json_pack("{s:i, s:f, s:f, s:o}", "gpu", l->gpu, "round_trip_us", l->speed.round_trip_us,
                     "barrier_us", l->speed.barrier_us, "push", points);
}

static json_t *links_json(const information *info) {
    json_t *links = json_array();
    for (int i = 0; i < info->n_links; i++)
        json_array_append_new(links, link_json(&info->links[i]));
    return links;
}

static void print_link(const link *l) {
    char name[32];
    snprintf(name, sizeof name, "to cuda:%" PRId32, l->gpu);
    if (l->why[0] != '\0') {
        report_line(name, "%s", l->why);
        return;
    }
    report_line(name, "flag there and back %.2f us, barrier %.2f us", l->speed.round_trip_us,
                l->speed.barrier_us);
    report_line("", "%5s %10s %10s %10s %10s  GB/s of each direction", "SMs", "bulk", "stores",
                "bulk both", "stores both");
    for (int i = 0; i < MEGAMOE_LINK_POINTS; i++)
        report_line("", "%5" PRId32 " %10.1f %10.1f %10.1f %11.1f",
                    l->speed.push[i].multiprocessors, l->speed.push[i].bulk_gbs,
                    l->speed.push[i].store_gbs, l->speed.push[i].bulk_both_gbs,
                    l->speed.push[i].store_both_gbs);
}

static json_t *gpu_json(const megamoe_device_info *gpu) {
    return json_pack("{s:s, s:s, s:s, s:i, s:i, s:I, s:i}", "device", gpu->name, "model",
                     gpu->model, "tier", gpu->tier, "multiprocessors", gpu->multiprocessors,
                     "max_ctas", gpu->max_ctas, "memory_bytes", (json_int_t)gpu->memory_bytes,
                     "driver_version", gpu->driver_version);
}

static void print_gpu(const megamoe_device_info *gpu) {
    char memory[REPORT_SIZE_BYTES];
    report_line(gpu->name,
                "%s, %s, %" PRId32 " multiprocessors, %s, driver of CUDA %" PRId32 ".%" PRId32,
                gpu->model, gpu->tier, gpu->multiprocessors, report_size(gpu->memory_bytes, memory),
                gpu->driver_version / 1000, gpu->driver_version % 1000 / 10);
}

/* Opens the GPU to ask it; the reason if it cannot be used is in megamoe_last_error(). */
static megamoe_status ask_gpu(int32_t number, megamoe_device_info *gpu) {
    char name[32];
    snprintf(name, sizeof name, "cuda:%" PRId32, number);
    megamoe_device_options options = MEGAMOE_INIT(megamoe_device_options);
    options.threads = 1;
    megamoe_device *device = NULL;
    megamoe_status status = megamoe_device_open(name, &options, &device);
    if (status == MEGAMOE_OK)
        status = megamoe_device_describe(device, gpu);
    megamoe_device_close(device);
    return status;
}

/* An array of the GPUs of this machine, usable or not; NULL with the reason if there are none. */
static json_t *gpus_json(void) {
    int32_t count;
    if (megamoe_device_count("cuda", &count) != MEGAMOE_OK)
        return NULL;
    json_t *gpus = json_array();
    for (int32_t i = 0; i < count; i++) {
        megamoe_device_info gpu = MEGAMOE_INIT(megamoe_device_info);
        const bool usable = ask_gpu(i, &gpu) == MEGAMOE_OK;
        json_array_append_new(gpus, usable ? gpu_json(&gpu)
                                           : json_pack("{s:s}", "error", megamoe_last_error()));
    }
    return gpus;
}

static int print_json(const information *info) {
    const megamoe_device_info *device = &info->device;
    json_t *object = json_pack(
        "{s:s, s:s, s:s, s:s, s:i, s:i, s:b, s:b}", "version", megamoe_version(), "device",
        device->name, "model", device->model, "tier", device->tier, "cores", device->cores,
        "threads", device->threads, "pinned", device->pinned, "cuda_built", device->cuda_built);
    if (is_gpu(device))
        json_object_update_new(object, gpu_json(device));
    if (info->measured)
        json_object_update_new(object, ceilings_json(info));
    if (info->n_links > 0)
        json_object_set_new(object, "links", links_json(info));
    json_t *gpus = gpus_json();
    if (gpus != NULL)
        json_object_set_new(object, "gpus", gpus);
    else
        json_object_set_new(object, "no_gpus", json_string(megamoe_last_error()));
    return report_json(object);
}

static void print_gpus(void) {
    int32_t count;
    if (megamoe_device_count("cuda", &count) != MEGAMOE_OK) {
        report_line("cuda", "%s", megamoe_last_error());
        return;
    }
    report_line("cuda", "%" PRId32 " GPU%s", count, count == 1 ? "" : "s");
    for (int32_t i = 0; i < count; i++) {
        megamoe_device_info gpu = MEGAMOE_INIT(megamoe_device_info);
        if (ask_gpu(i, &gpu) == MEGAMOE_OK)
            print_gpu(&gpu);
        else
            report_line("", "%s", megamoe_last_error());
    }
}

static int print_text(const information *info) {
    const megamoe_device_info *device = &info->device;
    const megamoe_device_ceilings *c = &info->ceilings;
    report_line("megamoe", "%s", megamoe_version());
    report_line("device", "%s: %s", device->name, device->model);
    report_line("tier", "%s", device->tier);
    report_line("threads", "%" PRId32 " on %" PRId32 " cores, %s", device->threads, device->cores,
                device->pinned ? "pinned" : "not pinned");
    print_gpus();
    if (!info->measured)
        return EXIT_DONE;
    report_line("read", "%.1f GB/s from memory", c->read_gbs);
    if (is_gpu(device)) {
        report_line("copy", "%.1f GB/s read and written", c->copy_gbs);
        report_line("mma", "%.0f TFLOP/s of E4M3 on tensor cores", c->mma_tflops);
        for (int i = 0; i < info->n_links; i++)
            print_link(&info->links[i]);
    } else {
        report_line("dot", "%.0f GFLOP/s in the tier's dot products", c->dot_gflops);
        report_line("int8", "%.0f GOP/s in those of int8 activations", c->int8_gops);
    }
    return EXIT_DONE;
}

/* Links to all other GPUs that can be used. */
static void measure_links(megamoe_device *device, information *info) {
    int32_t count = 0;
    if (megamoe_device_count("cuda", &count) != MEGAMOE_OK)
        return;
    for (int32_t i = 0; i < count && info->n_links < MAX_LINKS; i++) {
        char name[32];
        snprintf(name, sizeof name, "cuda:%" PRId32, i);
        megamoe_device *other = NULL;
        if (strcmp(name, info->device.name) == 0 ||
            megamoe_device_open(name, NULL, &other) != MEGAMOE_OK)
            continue;
        link *l = &info->links[info->n_links++];
        l->gpu = i;
        l->speed.struct_size = sizeof l->speed;
        if (megamoe_device_measure_link(device, other, &l->speed) != MEGAMOE_OK)
            snprintf(l->why, sizeof l->why, "%s", megamoe_last_error());
        megamoe_device_close(other);
    }
}

static megamoe_status gather(const char *name, int32_t threads, information *info) {
    info->device = (megamoe_device_info)MEGAMOE_INIT(megamoe_device_info);
    info->ceilings = (megamoe_device_ceilings)MEGAMOE_INIT(megamoe_device_ceilings);
    megamoe_device_options options = MEGAMOE_INIT(megamoe_device_options);
    options.threads = threads;
    megamoe_device *device = NULL;
    megamoe_status status = megamoe_device_open(name, &options, &device);
    if (status == MEGAMOE_OK)
        status = megamoe_device_describe(device, &info->device);
    if (status == MEGAMOE_OK && info->measured)
        status = megamoe_device_measure(device, &info->ceilings);
    if (status == MEGAMOE_OK && info->measured && is_gpu(&info->device))
        measure_links(device, info);
    megamoe_device_close(device);
    return status;
}

int cmd_info(int argc, char **argv) {
    int64_t threads = 0;
    const char *name = "cpu";
    bool measure = false, json = false;
    const option_spec options[] = {
        {"device", OPTION_TEXT, &name, "cpu|cuda|cuda:N", "(cpu)", 0, 0},
        {"threads", OPTION_INTEGER, &threads, "T", "(one per core)", 1, 1024},
        {"measure", OPTION_FLAG, &measure, NULL, "measure the ceilings and a GPU's links to others",
         0, 0},
        OPTION_JSON(&json)};
    const command_syntax syntax = {"info",
                                   "",
                                   "Shows the library, a device and what it can do at best, and "
                                   "the machine's GPUs.",
                                   "megamoe info --measure --threads 1",
                                   options,
                                   sizeof options / sizeof *options,
                                   0,
                                   0};
    const char *arguments[OPTION_MAX_ARGUMENTS];
    int code;
    if (!options_parse(&syntax, argc, argv, arguments, &code))
        return code;
    information info = {.measured = measure};
    const megamoe_status status = gather(name, (int32_t)threads, &info);
    if (status != MEGAMOE_OK)
        return report_failure(status);
    return (json ? print_json : print_text)(&info);
}
