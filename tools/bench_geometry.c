/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_geometry.h"

#include <stdio.h>
#include <string.h>

#include "report.h"

/* alpha, offset, limit */
#define PLAIN                                                                                      \
    { 0, 0, 0 }
#define CLAMPED                                                                                    \
    { 0, 0, 10 }
#define GPT_OSS                                                                                    \
    { 1.702f, 1, 7 }

static const bench_geometry geometries[] = {
    {"tiny", "a tiny geometry", 512, 256, 32, 4, PLAIN, false},
    {"A", "geometry A", 2048, 768, 128, 8, PLAIN, false},
    {"B", "geometry B", 2880, 2880, 32, 4, PLAIN, false},
    {"C", "geometry C", 4096, 2048, 32, 6, PLAIN, false},
    {"flash", "DeepSeek-V4-Flash, 1/8", 4096, 2048, 32, 6, CLAMPED, false},
    {"pro", "DeepSeek-V4-Pro, 1/8", 7168, 3072, 48, 6, CLAMPED, false},
    {"v4.1-flash", "DeepSeek-V4.1-Flash, 1/8", 5120, 2304, 48, 6, CLAMPED, false},
    {"v3", "DeepSeek-V3, 1/8", 7168, 2048, 32, 8, PLAIN, false},
    {"kimi-k2", "Kimi-K2, 1/8", 7168, 2048, 48, 8, PLAIN, false},
    {"glm-4.5", "GLM-4.5, 1/8", 5120, 1536, 20, 8, PLAIN, false},
    {"glm-5", "GLM-5, 1/8", 6144, 2048, 32, 8, PLAIN, false},
    {"qwen3-235b", "Qwen3-235B, 1/8", 4096, 1536, 16, 8, PLAIN, false},
    {"qwen3-next", "Qwen3-Next-80B, 1/8", 2048, 512, 64, 10, PLAIN, false},
    {"mimo-v2.5-pro", "MiMo-V2.5-Pro, 1/8", 6144, 2048, 48, 8, PLAIN, false},
    {"gpt-oss", "gpt-oss-120b, 1/8", 2880, 2880, 16, 4, GPT_OSS, true},
};

enum { GEOMETRIES = sizeof geometries / sizeof *geometries };

const bench_geometry *bench_geometry_find(const char *name) {
    char names[256] = "";
    size_t used = 0;
    for (int i = 0; i < GEOMETRIES; i++) {
        if (strcmp(geometries[i].name, name) == 0)
            return &geometries[i];
        used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", i > 0 ? ", " : "",
                                 geometries[i].name);
    }
    report_error("--geometry %s: not one of %s", name, names);
    return NULL;
}

megamoe_layer_desc bench_geometry_layer(const bench_geometry *g, megamoe_format format) {
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    desc.hidden = g->hidden;
    desc.intermediate = g->intermediate;
    desc.experts = g->experts;
    desc.topk = g->topk;
    desc.format = format;
    desc.activation = g->activation;
    desc.has_bias = g->has_bias;
    return desc;
}
