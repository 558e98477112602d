/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe info: the library, the device and its ceilings. */
#include <inttypes.h>
#include <megamoe/megamoe.h>

#include "commands.h"
#include "options.h"
#include "report.h"

static int print_json(const megamoe_device_info *device, const megamoe_device_ceilings *ceilings) {
    json_t *object = json_pack(
        "{s:s, s:s, s:s, s:s, s:i, s:i, s:b, s:b}", "version", megamoe_version(), "device",
        device->name, "model", device->model, "tier", device->tier, "cores", device->cores,
        "threads", device->threads, "pinned", device->pinned, "cuda_built", device->cuda_built);
    if (ceilings != NULL)
        json_object_update_new(object, json_pack("{s:f, s:f}", "read_gbs", ceilings->read_gbs,
                                                 "dot_gflops", ceilings->dot_gflops));
    return report_json(object);
}

static int print_text(const megamoe_device_info *device, const megamoe_device_ceilings *ceilings) {
    report_line("megamoe", "%s", megamoe_version());
    report_line("device", "%s: %s", device->name, device->model);
    report_line("tier", "%s", device->tier);
    report_line("threads", "%" PRId32 " on %" PRId32 " cores, %s", device->threads, device->cores,
                device->pinned ? "pinned" : "not pinned");
    report_line("cuda", "%s", device->cuda_built ? "built" : "not built");
    if (ceilings != NULL) {
        report_line("read", "%.1f GB/s from memory", ceilings->read_gbs);
        report_line("dot", "%.0f GFLOP/s in the tier's dot products", ceilings->dot_gflops);
    }
    return EXIT_DONE;
}

int cmd_info(int argc, char **argv) {
    int64_t threads = 0;
    int device_choice = 0;
    bool measure = false, json = false;
    const option_spec options[] = {
        {"device", OPTION_CHOICE, &device_choice, "cpu", "(cpu)", 0, 0},
        {"threads", OPTION_INTEGER, &threads, "T", "(one per core)", 1, 1024},
        {"measure", OPTION_FLAG, &measure, NULL, "measure the ceilings, about a second", 0, 0},
        OPTION_JSON(&json)};
    const command_syntax syntax = {"info",
                                   "",
                                   "Shows the library, the device and what it can do at best.",
                                   "megamoe info --measure --threads 1",
                                   options,
                                   sizeof options / sizeof *options,
                                   0,
                                   0};
    const char *arguments[OPTION_MAX_ARGUMENTS];
    int code;
    if (!options_parse(&syntax, argc, argv, arguments, &code))
        return code;
    megamoe_device_options device_options = MEGAMOE_INIT(megamoe_device_options);
    device_options.threads = (int32_t)threads;
    megamoe_device_info info = MEGAMOE_INIT(megamoe_device_info);
    megamoe_device_ceilings ceilings = MEGAMOE_INIT(megamoe_device_ceilings);
    megamoe_device *device = NULL;
    megamoe_status status = megamoe_device_open("cpu", &device_options, &device);
    if (status == MEGAMOE_OK)
        status = megamoe_device_describe(device, &info);
    if (status == MEGAMOE_OK && measure)
        status = megamoe_device_measure(device, &ceilings);
    if (status != MEGAMOE_OK)
        code = report_failure(status);
    else
        code = (json ? print_json : print_text)(&info, measure ? &ceilings : NULL);
    megamoe_device_close(device);
    return code;
}
