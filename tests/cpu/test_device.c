/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "megamoe/device.h"
#include "t.h"

T_CASE(refuses_malformed_names) {
    static const struct {
        const char *name;
        megamoe_status status;
        const char *part;
    } cases[] = {
        {"cudax", MEGAMOE_EINVAL, "expected cpu, cuda or cuda:N"},
        {"cuda:", MEGAMOE_EINVAL, "'cuda:'"},
        {"cuda:x", MEGAMOE_EINVAL, "'cuda:x'"},
        {"cuda:1x", MEGAMOE_EINVAL, "'cuda:1x'"},
        {"cuda:-1", MEGAMOE_EINVAL, "'cuda:-1'"},
        {"cuda:99999999999", MEGAMOE_EINVAL, "'cuda:99999999999'"},
        {"CPU", MEGAMOE_EINVAL, "'CPU'"},
        {"", MEGAMOE_EINVAL, "expected cpu"},
        {NULL, MEGAMOE_EINVAL, "NULL"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        megamoe_device *device = (megamoe_device *)&device;
        T_STATUS(megamoe_device_open(cases[i].name, NULL, &device), cases[i].status);
        T_CONTAINS(megamoe_last_error(), cases[i].part);
        T_CHECK(device == NULL);
    }
    T_STATUS(megamoe_device_open("cpu", NULL, NULL), MEGAMOE_EINVAL);
}

T_CASE(refuses_bad_options) {
    megamoe_device *device;
    const megamoe_device_options negative = {.struct_size = sizeof negative, .threads = -1};
    T_STATUS(megamoe_device_open("cpu", &negative, &device), MEGAMOE_EINVAL);
    const megamoe_device_options no_size = {.threads = 1};
    T_STATUS(megamoe_device_open("cpu", &no_size, &device), MEGAMOE_EINVAL);
    const megamoe_device_options ctas = {.struct_size = sizeof ctas, .max_ctas = 8};
    T_STATUS(megamoe_device_open("cpu", &ctas, &device), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "max_ctas is 8");
    megamoe_device_close(NULL);
}

T_CASE(counts) {
    int32_t count = -1;
    T_OK(megamoe_device_count("cpu", &count));
    T_EQ_INT(count, 1);
    T_STATUS(megamoe_device_count("gpu", &count), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "'gpu'");
    T_EQ_INT(count, 0);
    T_STATUS(megamoe_device_count(NULL, &count), MEGAMOE_EINVAL);
    T_STATUS(megamoe_device_count("cpu", NULL), MEGAMOE_EINVAL);
}

T_CASE(describes) {
    for (int32_t threads = 1; threads <= 3; threads++) {
        const megamoe_device_options options = {.struct_size = sizeof options, .threads = threads};
        megamoe_device *device;
        T_OK(megamoe_device_open("cpu", &options, &device));
        megamoe_device_info info = MEGAMOE_INIT(megamoe_device_info);
        T_OK(megamoe_device_describe(device, &info));
        T_EQ_STR(info.name, "cpu");
        T_CHECK(info.model[0] != '\0');
        T_CHECK(!strchr(info.model, '\n'));
        T_EQ_INT(info.threads, threads);
        T_CHECK(info.cores >= 1);
        T_EQ_INT(info.pinned, threads <= info.cores);
        T_EQ_INT(info.multiprocessors, 0);
        T_STATUS(megamoe_device_describe(device, NULL), MEGAMOE_EINVAL);
        T_STATUS(megamoe_device_describe(NULL, &info), MEGAMOE_EINVAL);
        megamoe_device_close(device);
    }
}

T_CASE(describes_the_capped_tier) {
    setenv("MEGAMOE_CPU", "scalar", 1);
    megamoe_device *device;
    T_OK(megamoe_device_open("cpu", NULL, &device));
    unsetenv("MEGAMOE_CPU");
    megamoe_device_info info = MEGAMOE_INIT(megamoe_device_info);
    T_OK(megamoe_device_describe(device, &info));
    T_EQ_STR(info.tier, "scalar");
    megamoe_device_close(device);
}

T_CASE(unpinned_when_asked) {
    const megamoe_device_options options = {.struct_size = sizeof options, .no_pinning = true};
    megamoe_device *device;
    T_OK(megamoe_device_open("cpu", &options, &device));
    megamoe_device_info info = MEGAMOE_INIT(megamoe_device_info);
    T_OK(megamoe_device_describe(device, &info));
    T_EQ_INT(info.pinned, 0);
    T_EQ_INT(info.threads, info.cores);
    megamoe_device_close(device);
}

T_CASE(measures) {
    megamoe_device *device;
    T_OK(megamoe_device_open("cpu", NULL, &device));
    megamoe_device_ceilings ceilings = MEGAMOE_INIT(megamoe_device_ceilings);
    T_OK(megamoe_device_measure(device, &ceilings));
    T_CHECK_MSG(ceilings.read_gbs > 0.1 && ceilings.read_gbs < 1e5, "%g GB/s", ceilings.read_gbs);
    T_CHECK_MSG(ceilings.dot_gflops > 0.1 && ceilings.dot_gflops < 1e6, "%g GFLOP/s",
                ceilings.dot_gflops);
    T_CHECK_MSG(ceilings.int8_gops > 0.1 && ceilings.int8_gops < 1e6, "%g GOP/s",
                ceilings.int8_gops);
    T_STATUS(megamoe_device_measure(NULL, &ceilings), MEGAMOE_EINVAL);
    megamoe_device_close(device);
}
