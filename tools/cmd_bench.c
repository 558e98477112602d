/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe bench: the speed of a layer beside the ceilings that the device has in the same run. */
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "commands.h"
#include "options.h"

/* Defaults that depend on the device. */
static const double cpu_seconds = 2;
enum { GPU_ROUNDS = 10, GPU_ITERATIONS = 20, GPU_WARM_UPS = 10 };

/* What concerns all arms. */
static int check_request(const bench_request *request, bool on_gpu) {
    if ((request->path != NULL) + (request->model != NULL) + (request->geometry != NULL) > 1)
        return report_error("bench: PATH, --model and --geometry exclude each other");
    if (request->json && request->csv)
        return report_error("bench: --json and --csv exclude each other");
    if (request->rounds > 0 && request->seconds >= 0)
        return report_error("bench: --rounds and --seconds exclude each other");
    if (request->dry_run && (request->csv || request->processes > 0))
        return report_error("bench: --dry-run excludes --csv and --processes");
    if (on_gpu && request->seconds >= 0)
        return report_error("bench: --seconds is for the CPU, not for --device %s",
                            request->base.device);
    if (!on_gpu && request->capacity > 0)
        return report_error("bench: --capacity is for a GPU, not for --device %s",
                            request->base.device);
    return EXIT_DONE;
}

static void set_defaults(bench_request *request, bool on_gpu) {
    if (request->seconds < 0)
        request->seconds = cpu_seconds;
    if (request->rounds == 0 && on_gpu)
        request->rounds = GPU_ROUNDS;
    if (request->iterations == 0)
        request->iterations = on_gpu ? GPU_ITERATIONS : 1;
    if (request->warm_ups < 0)
        request->warm_ups = on_gpu ? GPU_WARM_UPS : 0;
}

static int measure_here(bench *b, json_t **result) {
    TRY(bench_open(b));
    TRY(bench_measure(b));
    *result = bench_json(b);
    return *result != NULL ? EXIT_DONE : report_error("out of memory for the result");
}

/* The result of rank 0, or of processes of their own. */
static int execute(bench *b, bench_request *request, json_t **result) {
    if (bench_wants_processes(b) && !request->dry_run)
        return bench_in_processes(b, result);
    set_defaults(request, b->on_gpu);
    const int code = (request->dry_run ? bench_plan : measure_here)(b, result);
    if (code != EXIT_DONE && b->ranks > 1)
        megamoe_comm_abort(b->comm);
    bench_close(b);
    return code;
}

static int print(const bench_request *request, json_t *result) {
    if (json_object_get(result, "arms") != NULL && !request->dry_run)
        TRY(bench_add_ratios(result));
    if (request->json)
        return report_json(json_incref(result));
    if (request->dry_run)
        return bench_print_plan(result);
    return (request->csv ? bench_print_csv : bench_print_text)(result);
}

static int run(bench *b, bench_request *request) {
    json_t *result = NULL;
    TRY(bench_arms_read(b));
    TRY(check_request(request, b->on_gpu));
    TRY(bench_choose_tokens(b));
    int code = execute(b, request, &result);
    if (code == EXIT_DONE && b->rank == 0)
        code = print(request, result);
    json_decref(result);
    return code;
}

int cmd_bench(int argc, char **argv) {
    bench_request request = bench_request_default();
    option_spec options[BENCH_OPTIONS];
    bench_request_options(&request, options);
    const command_syntax syntax = {"bench",
                                   "[PATH]",
                                   "Measures an expert layer beside the device's ceilings.",
                                   "megamoe bench --device cuda:0 --geometry pro --json",
                                   options,
                                   BENCH_OPTIONS,
                                   0,
                                   1};
    const char *arguments[OPTION_MAX_ARGUMENTS];
    int code;
    if (!options_parse(&syntax, argc, argv, arguments, &code))
        return code;
    request.path = arguments[0];
    bench *b = calloc(1, sizeof *b); /* too large for a stack */
    if (b == NULL)
        return report_error("out of memory");
    b->request = &request;
    b->ranks = 1;
    bench_record(b, argc, argv);
    code = run(b, &request);
    free(b);
    return code;
}
