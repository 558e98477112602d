/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Without memory: the k-th allocation fails, k = 1, 2, ... until none is left to fail. Each failure
 * is an error that says so; nothing crashes, leaks or stays behind.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "allocation.h"
#include "fixture.h"

/* What is run again and again; it has closed all that it opened when it returns. */
typedef struct task {
    const char *name;
    megamoe_status (*run)(void *argument);
    void *argument;
    const char *out; /* what it writes into a directory of its own, a file or directory, or NULL */
    bool threads;    /* then live blocks do not tell: the system keeps stacks of ended threads */
} task;

static int files_in_directory_of(const char *path) {
    char directory[4096];
    snprintf(directory, sizeof directory, "%.*s", (int)(strrchr(path, '/') - path), path);
    DIR *stream = opendir(directory);
    T_REQUIRE(stream != NULL);
    int n = 0;
    for (const struct dirent *entry; (entry = readdir(stream)) != NULL;)
        n += entry->d_name[0] != '.';
    closedir(stream);
    return n;
}

/* Whether there was such a file, or directory of files. */
static bool remove_out(const char *path) {
    if (unlink(path) == 0)
        return true;
    DIR *stream = opendir(path);
    if (!stream)
        return false;
    for (const struct dirent *entry; (entry = readdir(stream)) != NULL;)
        unlinkat(dirfd(stream), entry->d_name, 0);
    closedir(stream);
    return rmdir(path) == 0;
}

/* A path that stays, in a new directory. */
static void path_in(const char *directory, char path[4096]) {
    T_REQUIRE(mkdir(t_path(directory), 0777) == 0);
    snprintf(path, 4096, "%s/file", t_path(directory));
}

/*
 * Returns whether an allocation failed and all was well. The C library does without some of its
 * own, so there may be success even then.
 */
static bool run_without(const task *t, int64_t k, bool all_after) {
    const char *after = all_after ? " and all after it" : "";
    const int64_t live = allocation_live();
    allocation_fail(k, all_after);
    const megamoe_status status = t->run(t->argument);
    const bool failed = allocation_failed();
    const bool succeeded = status == MEGAMOE_OK;
    bool good = T_CHECK_MSG(succeeded || (failed && status == MEGAMOE_ENOMEM),
                            "%s: allocation %" PRId64 "%s: %s: %s", t->name, k, after,
                            megamoe_status_name(status), megamoe_last_error());
    if (!t->threads)
        good &= T_CHECK_MSG(allocation_live() == live,
                            "%s: allocation %" PRId64 "%s: %" PRId64 " blocks are left", t->name, k,
                            after, allocation_live() - live);
    if (t->out) {
        good &= T_EQ_INT(files_in_directory_of(t->out), succeeded);
        good &= T_EQ_INT(remove_out(t->out), succeeded);
    }
    return good && failed;
}

static void run_out(const task *t) {
    T_STATUS(t->run(t->argument), MEGAMOE_OK); /* what is allocated once stays */
    if (t->out)
        remove_out(t->out);
    for (int all_after = 0; all_after < 2; all_after++) {
        int64_t k = 1;
        while (run_without(t, k, all_after))
            k++;
        T_CHECK_MSG(k > 1, "%s: nothing was allocated", t->name);
    }
}

/* ---- Checkpoints: the inputs of the fuzzer, of every family ---- */

static const char *const parts[] = {"config.json", "hf_quant_config.json",
                                    "model.safetensors.index.json", "model.safetensors"};

/* As tests/fuzz/fuzz_checkpoint.c takes an input apart. */
static void unpack(const char *corpus, const char *name, const char *directory) {
    char path[8192];
    snprintf(path, sizeof path, "%s/checkpoint/%s", corpus, name);
    size_t bytes;
    char *data = t_read_file(path, &bytes);
    const char *at = data;
    for (int i = 0; i < 4; i++) {
        const size_t left = bytes - (size_t)(at - data);
        const char *end = i < 3 ? memchr(at, 0x1E, left) : NULL;
        const size_t part = end ? (size_t)(end - at) : left;
        snprintf(path, sizeof path, "%s/%s", directory, parts[i]);
        unlink(path);
        if (part)
            t_write_file(path, at, part);
        at += part + (end != NULL);
    }
    free(data);
}

static megamoe_status load_layer(const megamoe_checkpoint *checkpoint, int32_t layer) {
    megamoe_router *router;
    megamoe_weights *weights;
    megamoe_status status = megamoe_checkpoint_router(checkpoint, layer, &router);
    if (status == MEGAMOE_OK)
        megamoe_router_close(router);
    else if (status != MEGAMOE_ENOTFOUND) /* not all have one */
        return status;
    status = megamoe_checkpoint_weights(checkpoint, layer, &weights);
    if (status != MEGAMOE_OK)
        return status;
    static megamoe_weights_report report;
    report.struct_size = sizeof report;
    status = megamoe_weights_analyze(weights, 1, (megamoe_progress){0}, &report);
    megamoe_weights_close(weights);
    return status;
}

static megamoe_status load(void *directory) {
    megamoe_checkpoint *checkpoint;
    megamoe_status status = megamoe_checkpoint_open(directory, &checkpoint);
    if (status != MEGAMOE_OK)
        return status;
    megamoe_checkpoint_info info = MEGAMOE_INIT(megamoe_checkpoint_info);
    status = megamoe_checkpoint_describe(checkpoint, &info);
    for (int32_t i = 0; i < info.layers && status == MEGAMOE_OK; i++)
        status = load_layer(checkpoint, megamoe_checkpoint_layer(checkpoint, i));
    megamoe_checkpoint_close(checkpoint);
    return status;
}

T_CASE(loading_a_checkpoint) {
    static const char *const names[] = {"compressed-mxfp4",
                                        "compressed-nvfp4",
                                        "fused",
                                        "gpt-oss",
                                        "gpt-oss-original",
                                        "gpt-oss-packed",
                                        "index",
                                        "mimo",
                                        "v3",
                                        "v4-hash"};
    char directory[4096];
    snprintf(directory, sizeof directory, "%s", t_path("model"));
    T_REQUIRE(mkdir(directory, 0777) == 0);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        unpack(MEGAMOE_CORPUS, names[i], directory);
        run_out(&(task){names[i], load, directory, .out = NULL});
    }
}

T_CASE(loading_gguf) {
    static const char *const names[] = {"deepseek2", "deepseek4", "gpt-oss", "merged"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/gguf/%s", MEGAMOE_CORPUS, names[i]);
        run_out(&(task){names[i], load, path, .out = NULL});
    }
}

/* ---- Other forms of a checkpoint's layers ---- */

typedef struct rounding {
    const char *directory;
    megamoe_format format;
    int32_t threads;
} rounding;

static megamoe_status quantize(void *argument) {
    const rounding *r = argument;
    megamoe_checkpoint *checkpoint;
    megamoe_status status = megamoe_checkpoint_open(r->directory, &checkpoint);
    if (status != MEGAMOE_OK)
        return status;
    const int32_t layer = megamoe_checkpoint_layer(checkpoint, 0);
    megamoe_stored_layer stored = MEGAMOE_INIT(megamoe_stored_layer);
    megamoe_quantize_options options = MEGAMOE_INIT(megamoe_quantize_options);
    options.format = r->format;
    options.threads = r->threads;
    megamoe_weights *weights = NULL;
    status = megamoe_checkpoint_stored(checkpoint, layer, &stored);
    if (status == MEGAMOE_OK)
        status = megamoe_checkpoint_quantize(checkpoint, layer, &options, &weights);
    megamoe_weights_close(weights);
    megamoe_checkpoint_close(checkpoint);
    return status;
}

T_CASE(quantizing) {
    static const char *const names[] = {"bf16", "fp8"};
    char directory[4096];
    snprintf(directory, sizeof directory, "%s", t_path("wide"));
    T_REQUIRE(mkdir(directory, 0777) == 0);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        unpack(MEGAMOE_CORPUS, names[i], directory);
        for (int32_t threads = 1; threads <= 2; threads++)
            for (int nvfp4 = 0; nvfp4 < 2; nvfp4++) {
                rounding r = {directory, nvfp4 ? MEGAMOE_FORMAT_NVFP4 : MEGAMOE_FORMAT_MXFP4,
                              threads};
                run_out(&(task){names[i], quantize, &r, .threads = threads > 1});
            }
    }
}

typedef struct conversion {
    const char *directory, *family, *path;
    megamoe_format format;
} conversion;

static megamoe_status convert(void *argument) {
    const conversion *c = argument;
    megamoe_checkpoint *checkpoint;
    megamoe_status status = megamoe_checkpoint_open(c->directory, &checkpoint);
    if (status != MEGAMOE_OK)
        return status;
    megamoe_convert_options options = MEGAMOE_INIT(megamoe_convert_options);
    options.family = c->family;
    options.format = c->format;
    status = megamoe_checkpoint_convert(checkpoint, &options, c->path);
    megamoe_checkpoint_close(checkpoint);
    return status;
}

T_CASE(converting) {
    static const struct {
        const char *name, *family;
        megamoe_format format;
    } ways[] = {{"v4-hash", "compressed-tensors", MEGAMOE_FORMAT_MXFP4},
                {"mimo", "compressed-tensors", MEGAMOE_FORMAT_NVFP4},
                {"mimo", "modelopt-nvfp4", MEGAMOE_FORMAT_NVFP4},
                {"gpt-oss", "gpt-oss", MEGAMOE_FORMAT_MXFP4},
                {"gpt-oss-original", "deepseek-v4", MEGAMOE_FORMAT_MXFP4},
                {"fused", "modelopt-nvfp4", MEGAMOE_FORMAT_NVFP4}};
    char directory[4096], path[4096];
    snprintf(directory, sizeof directory, "%s", t_path("source"));
    T_REQUIRE(mkdir(directory, 0777) == 0);
    path_in("converted", path);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        unpack(MEGAMOE_CORPUS, ways[i].name, directory);
        conversion c = {directory, ways[i].family, path, ways[i].format};
        run_out(&(task){ways[i].family, convert, &c, .out = path});
    }
}

T_CASE(converting_gguf) {
    static const char *const ways[][2] = {{"gpt-oss", "compressed-tensors"},
                                          {"deepseek2", "modelopt-nvfp4"}};
    char path[4096];
    path_in("converted-gguf", path);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        char source[4096];
        snprintf(source, sizeof source, "%s/gguf/%s", MEGAMOE_CORPUS, ways[i][0]);
        conversion c = {source, ways[i][1], path, 0};
        run_out(&(task){ways[i][0], convert, &c, .out = path});
    }
}

static megamoe_status load_tensor(void *path) {
    megamoe_checkpoint *checkpoint;
    megamoe_tensor tensor;
    megamoe_status status = megamoe_tensors_open(path, &checkpoint);
    if (status != MEGAMOE_OK)
        return status;
    status = megamoe_checkpoint_tensor(checkpoint, "two", &tensor);
    megamoe_checkpoint_close(checkpoint);
    return status;
}

static megamoe_status fill(void *user, size_t index, void *data, uint64_t bytes) {
    (void)user;
    (void)index;
    memset(data, 1, bytes);
    return MEGAMOE_OK;
}

static megamoe_status save_tensors(void *path) {
    static const megamoe_tensor_spec specs[] = {{"one", "BF16", 2, {3, 4}}, {"two", "U8", 1, {9}}};
    return megamoe_tensors_save(path, specs, 2, fill, NULL, (megamoe_progress){0});
}

T_CASE(tensors) {
    char path[4096];
    path_in("tensors", path);
    run_out(&(task){"saving tensors", save_tensors, path, .out = path});
    T_OK(save_tensors(path));
    run_out(&(task){"loading a tensor", load_tensor, path, .out = NULL});
}

/* ---- Preparing, and running with and without a prepared file ---- */

typedef struct preparation {
    const megamoe_weights *weights;
    const megamoe_router *router;
    const char *device, *path;
    int32_t threads;
} preparation;

static megamoe_status prepare(void *argument) {
    const preparation *p = argument;
    megamoe_prepare_options options = MEGAMOE_INIT(megamoe_prepare_options);
    options.device = p->device;
    options.threads = p->threads;
    options.round_outside_window = strcmp(p->device, "cuda") == 0;
    return megamoe_weights_prepare(p->weights, p->router, &options, p->path);
}

static megamoe_router *router_of(const fixture *x) {
    megamoe_router_desc desc = MEGAMOE_INIT(megamoe_router_desc);
    desc.rule = MEGAMOE_ROUTER_SIGMOID;
    desc.hidden = x->m.layer.desc.hidden;
    desc.experts = x->m.layer.desc.experts;
    desc.topk = x->m.layer.desc.topk;
    desc.scaling = 1;
    const size_t n = (size_t)desc.hidden * (size_t)desc.experts;
    float *values = calloc(n, sizeof *values);
    T_REQUIRE(values);
    const megamoe_view weight = {values, MEGAMOE_DTYPE_F32, desc.experts, 0};
    const megamoe_view bias = {values, MEGAMOE_DTYPE_F32, 1, 0};
    megamoe_router *router;
    T_OK(megamoe_router_create(&desc, &weight, &bias, NULL, NULL, &router));
    free(values);
    return router;
}

T_CASE(preparing) {
    fixture *x = open_fixture(71);
    megamoe_router *router = router_of(x);
    char path[4096];
    path_in("prepare", path);
    for (int32_t threads = 1; threads <= 2; threads++)
        for (int cuda = 0; cuda < 2; cuda++) {
            preparation p = {x->m.weights, router, cuda ? "cuda" : "cpu", path, threads};
            run_out(&(task){"preparing", prepare, &p, .out = path, .threads = threads > 1});
        }
    megamoe_router_close(router);
    close_fixture(x);
}

typedef struct forward {
    fixture *x;
    const char *path; /* of a prepared file; NULL: the fixture's weights */
    bool map;
    int32_t threads;
} forward;

static megamoe_status compute(const forward *f, const megamoe_weights *weights, megamoe_comm *comm,
                              megamoe_device *device, megamoe_layer **layer,
                              megamoe_workspace **workspace) {
    const batch *b = &f->x->b;
    const megamoe_layer_desc *desc = &f->x->m.layer.desc;
    megamoe_layer_options options = MEGAMOE_INIT(megamoe_layer_options);
    options.map_prepared = f->map;
    megamoe_shape shape = MEGAMOE_INIT(megamoe_shape);
    shape.hidden = desc->hidden;
    shape.intermediate = desc->intermediate;
    shape.experts = desc->experts;
    shape.topk = b->topk;
    megamoe_capacity capacity = MEGAMOE_INIT(megamoe_capacity);
    capacity.tokens = b->tokens;
    const megamoe_view in = view_x(b), ids = view_ids(b), routes = view_weights(b);
    const megamoe_view out = view_y(f->x->y, b);
    megamoe_status status;
    if ((status = megamoe_layer_create(comm, device, weights, &options, layer)) != MEGAMOE_OK ||
        (status = megamoe_workspace_create(comm, device, &shape, &capacity, workspace)) !=
            MEGAMOE_OK ||
        (status = megamoe_prewarm(*layer, *workspace)) != MEGAMOE_OK ||
        (status = megamoe_stage(*workspace, &in, &ids, &routes, b->tokens, NULL)) != MEGAMOE_OK ||
        (status = megamoe_forward(*layer, *workspace, &out, NULL)) != MEGAMOE_OK)
        return status;
    megamoe_reference_options reference = MEGAMOE_INIT(megamoe_reference_options);
    reference.threads = f->threads;
    return megamoe_reference_forward(weights, &reference, b->topk, &in, &ids, &routes, b->tokens,
                                     &out);
}

static megamoe_status run_forward(void *argument) {
    const forward *f = argument;
    megamoe_weights *opened = NULL;
    megamoe_comm *comm = NULL;
    megamoe_device *device = NULL;
    megamoe_layer *layer = NULL;
    megamoe_workspace *workspace = NULL;
    megamoe_device_options options = MEGAMOE_INIT(megamoe_device_options);
    options.threads = f->threads;
    megamoe_status status = MEGAMOE_OK;
    if (f->path) {
        status = megamoe_weights_open(f->path, &opened);
        if (status == MEGAMOE_OK)
            status = megamoe_weights_verify(opened, (megamoe_progress){0});
    }
    if (status == MEGAMOE_OK)
        status = megamoe_comm_self(&comm);
    if (status == MEGAMOE_OK)
        status = megamoe_device_open("cpu", &options, &device);
    if (status == MEGAMOE_OK)
        status = compute(f, f->path ? opened : f->x->m.weights, comm, device, &layer, &workspace);
    megamoe_workspace_close(workspace);
    megamoe_layer_close(layer);
    megamoe_device_close(device);
    megamoe_comm_close(comm);
    megamoe_weights_close(opened);
    return status;
}

T_CASE(running) {
    fixture *x = open_fixture(72);
    megamoe_router *router = router_of(x);
    char path[4096];
    path_in("run", path);
    preparation p = {x->m.weights, router, "cpu", path, 1};
    T_OK(prepare(&p));
    static const struct {
        const char *name;
        bool prepared, map;
        int32_t threads;
    } ways[] = {{"running", false, false, 1},
                {"running with threads", false, false, 2},
                {"running a prepared file", true, false, 1},
                {"running a prepared file with threads", true, false, 2},
                {"running a mapped prepared file", true, true, 1}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        forward f = {x, ways[i].prepared ? path : NULL, ways[i].map, ways[i].threads};
        run_out(&(task){ways[i].name, run_forward, &f, .threads = f.threads > 1});
    }
    megamoe_router_close(router);
    close_fixture(x);
}

/* ---- Measured plans ---- */

static void ignore_entry(void *user, const megamoe_tuned_key *key, const megamoe_tuned_plan *plans,
                         int32_t n) {
    (void)user;
    (void)key;
    (void)plans;
    (void)n;
}

static bool of_two_ranks(void *user, const megamoe_tuned_key *key) {
    (void)user;
    return key->ranks == 2;
}

static megamoe_status keep_plans(void *argument) {
    const char *path = argument;
    megamoe_tuned_key key = MEGAMOE_INIT(megamoe_tuned_key);
    key.format = MEGAMOE_FORMAT_MXFP4;
    key.capacity = 8;
    snprintf(key.library, sizeof key.library, "1.2.3");
    snprintf(key.routing, sizeof key.routing, "random");
    const megamoe_tuned_plan plans[] = {{1, 8, 1, 2, 1, 2}, {8, 16, 1, 2, 1, 2}};
    megamoe_status status = MEGAMOE_OK;
    for (key.ranks = 1; key.ranks <= 2 && status == MEGAMOE_OK; key.ranks++)
        status = megamoe_tuned_store(path, &key, plans, 2);
    if (status == MEGAMOE_OK)
        status = megamoe_tuned_each(path, ignore_entry, NULL);
    if (status == MEGAMOE_OK)
        status = megamoe_tuned_forget(path, of_two_ranks, NULL, NULL);
    return status;
}

T_CASE(keeping_plans) {
    char path[4096];
    path_in("plans", path);
    run_out(&(task){.name = "keeping plans", .run = keep_plans, .argument = path});
}
