/* SPDX-License-Identifier: Apache-2.0 */
/* Batch sizes: --tokens LIST or curve, and the capacity that holds them. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

/* Defaults that depend on the device. */
static const char cpu_tokens[] = "1,16,64";
static const char gpu_tokens[] = "1,8,32,64,128,256,512,1024,2048,4096,8192";
enum { GPU_CAPACITY = 8192 };

/* "1,16,64" */
static int parse_tokens(const char *text, bench *b) {
    const char *at = text;
    do {
        char *end;
        errno = 0;
        const long long tokens = strtoll(at, &end, 10);
        if (end == at || (*end != ',' && *end != '\0') || errno != 0 || tokens < 1 ||
            tokens > BENCH_MAX_TOKENS || b->n_tokens == BENCH_MAX_POINTS)
            return report_error("--tokens %s: expected up to %d numbers from 1 to %d, with commas",
                                text, BENCH_MAX_POINTS, BENCH_MAX_TOKENS);
        b->tokens[b->n_tokens++] = tokens;
        at = *end == ',' ? end + 1 : NULL;
    } while (at != NULL);
    return EXIT_DONE;
}

/* 1 to `most` in steps of a square root of two, rounded. */
static void fill_curve(int64_t most, bench *b) {
    int64_t last = 0;
    for (int i = 0; last < most && b->n_tokens < BENCH_MAX_POINTS; i++) {
        const int64_t next = llround(exp2(i / 2.0));
        if (next == last)
            continue;
        last = next < most ? next : most;
        b->tokens[b->n_tokens++] = last;
    }
}

int bench_choose_tokens(bench *b) {
    const bench_request *request = b->request;
    b->capacity = request->capacity > 0 ? request->capacity : GPU_CAPACITY;
    if (b->on_gpu && request->tokens != NULL && strcmp(request->tokens, "curve") == 0) {
        fill_curve(b->capacity, b);
        return EXIT_DONE;
    }
    const char *text = request->tokens;
    if (text == NULL)
        text = b->on_gpu ? gpu_tokens : cpu_tokens;
    TRY(parse_tokens(text, b));
    for (int i = 0; b->on_gpu && i < b->n_tokens; i++) {
        if (request->capacity > 0 && b->tokens[i] > request->capacity)
            return report_error("--capacity %" PRId64 ": --tokens asks for %" PRId64,
                                request->capacity, b->tokens[i]);
        while (b->tokens[i] > b->capacity)
            b->capacity *= 2;
    }
    return EXIT_DONE;
}
