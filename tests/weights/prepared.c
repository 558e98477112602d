/* SPDX-License-Identifier: Apache-2.0 */
/* The prepared file: what comes back, and what a damaged or hostile one does. */
#define _GNU_SOURCE
#include "weights/prepared.h"
#include "weights/hold.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "layer.h"
#include "weights/weights.h"

static const layer_shape small_mxfp4 = {MEGAMOE_FORMAT_MXFP4, 64,  96, 3,
                                        MEGAMOE_DTYPE_BF16,   110, 135};
static const layer_shape small_nvfp4 = {MEGAMOE_FORMAT_NVFP4, 48, 80, 3,
                                        MEGAMOE_DTYPE_NONE,   1,  126};

static megamoe_router *router_of(const megamoe_layer_desc *desc) {
    megamoe_router_desc r = MEGAMOE_INIT(megamoe_router_desc);
    r.rule = MEGAMOE_ROUTER_SIGMOID;
    r.hidden = desc->hidden;
    r.experts = desc->experts;
    r.topk = desc->topk;
    r.normalize = true;
    r.scaling = 2.5f;
    const size_t n = (size_t)desc->experts * (size_t)desc->hidden;
    float *values = calloc(n, sizeof *values);
    T_REQUIRE(values);
    t_random random = t_random_start(40);
    for (size_t i = 0; i < n; i++)
        values[i] = (float)t_normal(&random);
    const megamoe_view weight = {values, MEGAMOE_DTYPE_F32, desc->experts, 0};
    const megamoe_view bias = {values, MEGAMOE_DTYPE_F32, 1, 0};
    megamoe_router *router;
    T_OK(megamoe_router_create(&r, &weight, &bias, NULL, NULL, &router));
    free(values);
    return router;
}

static void prepare(const test_layer *layer, const megamoe_router *router, const char *device,
                    megamoe_nvfp4_mode mode, int32_t threads, const char *path) {
    megamoe_weights *weights;
    T_OK(megamoe_weights_from_tensors(&layer->desc, layer->matrices, &weights));
    megamoe_prepare_options options = MEGAMOE_INIT(megamoe_prepare_options);
    options.device = device;
    options.nvfp4 = mode;
    options.threads = threads;
    T_OK(megamoe_weights_prepare(weights, router, &options, path));
    megamoe_weights_close(weights);
}

/* A file with a router, in memory; the caller frees. */
static uint8_t *prepared_bytes(const layer_shape *shape, const char *device,
                               megamoe_nvfp4_mode mode, size_t *bytes) {
    t_random random = t_random_start(41);
    test_layer layer = layer_random(shape, &random);
    megamoe_router *router = router_of(&layer.desc);
    prepare(&layer, router, device, mode, 1, t_path("made"));
    megamoe_router_close(router);
    layer_free(&layer);
    return t_read_file(t_path("made"), bytes);
}

static mm_prepared_header header_of(const uint8_t *data) {
    mm_prepared_header header;
    memcpy(&header, data, sizeof header);
    return header;
}

static megamoe_status open_bytes(const uint8_t *data, size_t bytes, megamoe_weights **weights) {
    t_write_file(t_path("bytes"), data, bytes);
    return megamoe_weights_open(t_path("bytes"), weights);
}

static int entries(const char *path) {
    DIR *directory = opendir(path);
    T_REQUIRE(directory);
    int n = 0;
    while (readdir(directory))
        n++;
    closedir(directory);
    return n;
}

struct progress {
    uint64_t done;
    uint64_t total;
    int calls;
};

static void on_progress(void *user, uint64_t done, uint64_t total) {
    struct progress *progress = user;
    T_CHECK(done > progress->done && done <= total);
    *progress = (struct progress){done, total, progress->calls + 1};
}

static void check_desc(const megamoe_layer_desc *found, const megamoe_layer_desc *wanted) {
    T_EQ_INT(found->layer, wanted->layer);
    T_EQ_INT(found->hidden, wanted->hidden);
    T_EQ_INT(found->intermediate, wanted->intermediate);
    T_EQ_INT(found->experts, wanted->experts);
    T_EQ_INT(found->topk, wanted->topk);
    T_EQ_INT(found->format, wanted->format);
    T_EQ_F64(found->activation.alpha, wanted->activation.alpha);
    T_EQ_F64(found->activation.offset, wanted->activation.offset);
    T_EQ_F64(found->activation.limit, wanted->activation.limit);
    T_EQ_INT(found->has_bias, wanted->has_bias);
}

static void check_round_trip(const layer_shape *shape, const char *device, megamoe_nvfp4_mode mode,
                             bool with_router, t_random *random) {
    test_layer layer = layer_random(shape, random);
    megamoe_router *router = with_router ? router_of(&layer.desc) : NULL;
    const char *path = t_path("round-trip");
    prepare(&layer, router, device, mode, 2, path);
    megamoe_weights *weights;
    T_OK(megamoe_weights_open(path, &weights));
    T_CHECK(megamoe_weights_prepared(weights));
    T_EQ_STR(megamoe_weights_device(weights), device);
    T_CHECK((mm_weights_cuda_layout(weights) != NULL) == (strcmp(device, "cuda") == 0));
    T_EQ_INT(megamoe_weights_nvfp4(weights), mode);
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    T_OK(megamoe_weights_describe(weights, &desc));
    check_desc(&desc, &layer.desc);
    check_unpacked(weights, &layer, mode == MEGAMOE_NVFP4_FOLDED ? folded_value : layer_value);
    for (int32_t i = 0; i < 3 * desc.experts; i++) {
        T_OK(mm_weights_hold(weights, i / 3));
        for (int32_t row = 0; row < layer_rows(&layer, (megamoe_projection)(i % 3)); row++)
            T_EQ_F64(mm_weights_bias(weights, i / 3, (megamoe_projection)(i % 3), row),
                     layer_bias(&layer, i / 3, (megamoe_projection)(i % 3), row));
        mm_weights_drop(weights, i / 3);
    }
    megamoe_matrix matrix;
    T_STATUS(megamoe_weights_matrix(weights, 0, MEGAMOE_GATE, &matrix), MEGAMOE_EUNSUPPORTED);
    T_STATUS(megamoe_weights_prepare(weights, NULL, NULL, t_path("again")), MEGAMOE_EUNSUPPORTED);
    struct progress progress = {0};
    T_OK(megamoe_weights_verify(weights, (megamoe_progress){on_progress, &progress}));
    T_EQ_INT(progress.calls, desc.experts);
    T_EQ_INT((int64_t)progress.done, (int64_t)progress.total);
    T_CHECK((megamoe_weights_router(weights) != NULL) == with_router);
    if (with_router) {
        megamoe_router_desc a = MEGAMOE_INIT(megamoe_router_desc);
        megamoe_router_desc b = MEGAMOE_INIT(megamoe_router_desc);
        T_OK(megamoe_router_describe(router, &a));
        T_OK(megamoe_router_describe(megamoe_weights_router(weights), &b));
        T_EQ_INT(a.rule, b.rule);
        T_EQ_INT(a.hidden, b.hidden);
        T_EQ_INT(a.experts, b.experts);
        T_EQ_INT(a.topk, b.topk);
        T_EQ_F64(a.scaling, b.scaling);
    }
    megamoe_router_close(router);
    megamoe_weights_close(weights);
    layer_free(&layer);
}

T_CASE(round_trip) {
    static const layer_shape shapes[] = {
        {MEGAMOE_FORMAT_MXFP4, 64, 96, 3, MEGAMOE_DTYPE_BF16, 110, 135},
        {MEGAMOE_FORMAT_MXFP4, 128, 160, 1, MEGAMOE_DTYPE_NONE, 110, 135},
        {MEGAMOE_FORMAT_MXFP4, 2880, 32, 2, MEGAMOE_DTYPE_F32, 110, 135},
        {MEGAMOE_FORMAT_NVFP4, 48, 80, 5, MEGAMOE_DTYPE_F32, 1, 126},
        {MEGAMOE_FORMAT_NVFP4, 336, 240, 1, MEGAMOE_DTYPE_NONE, 1, 126},
    };
    t_random random = t_random_start(42);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        check_round_trip(&shapes[i], "cpu", MEGAMOE_NVFP4_EXACT, i % 2 == 0, &random);
        if (shapes[i].format == MEGAMOE_FORMAT_NVFP4)
            check_round_trip(&shapes[i], "cpu", MEGAMOE_NVFP4_FOLDED, i % 2 == 1, &random);
    }
}

/* Scales that lie in the window of the GPU's operands, whatever their codes. */
T_CASE(round_trip_cuda) {
    static const layer_shape shapes[] = {
        {MEGAMOE_FORMAT_MXFP4, 64, 96, 3, MEGAMOE_DTYPE_BF16, 118, 132},
        {MEGAMOE_FORMAT_MXFP4, 288, 160, 1, MEGAMOE_DTYPE_NONE, 118, 132},
        {MEGAMOE_FORMAT_MXFP4, 2880, 32, 2, MEGAMOE_DTYPE_F32, 118, 132},
        {MEGAMOE_FORMAT_NVFP4, 48, 80, 5, MEGAMOE_DTYPE_F32, 40, 126},
        {MEGAMOE_FORMAT_NVFP4, 336, 240, 1, MEGAMOE_DTYPE_NONE, 40, 126},
    };
    t_random random = t_random_start(47);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        layer_shape shape = shapes[i];
        check_round_trip(&shape, "cuda", MEGAMOE_NVFP4_EXACT, i % 2 == 0, &random);
        shape.scale_min = 1;
        if (shape.format == MEGAMOE_FORMAT_NVFP4)
            check_round_trip(&shape, "cuda", MEGAMOE_NVFP4_FOLDED, i % 2 == 1, &random);
    }
}

T_CASE(file_does_not_depend_on_threads) {
    layer_shape shape = small_mxfp4;
    shape.experts = 7;
    t_random random = t_random_start(43);
    test_layer layer = layer_random(&shape, &random);
    size_t bytes[3];
    uint8_t *data[3];
    for (int i = 0; i < 3; i++) {
        prepare(&layer, NULL, "cpu", MEGAMOE_NVFP4_EXACT, 1 + 2 * i, t_path("threads"));
        data[i] = t_read_file(t_path("threads"), &bytes[i]);
        T_EQ_INT((int64_t)bytes[i], (int64_t)bytes[0]);
        T_EQ_MEM(data[i], data[0], bytes[0]);
    }
    for (int i = 0; i < 3; i++)
        free(data[i]);
    layer_free(&layer);
}

/* MXFP4 knows no folding; the option is for layers of either format alike. */
T_CASE(folding_leaves_mxfp4_alone) {
    t_random random = t_random_start(44);
    test_layer layer = layer_random(&small_mxfp4, &random);
    prepare(&layer, NULL, "cpu", MEGAMOE_NVFP4_FOLDED, 1, t_path("mxfp4"));
    megamoe_weights *weights;
    T_OK(megamoe_weights_open(t_path("mxfp4"), &weights));
    check_unpacked(weights, &layer, layer_value);
    megamoe_weights_close(weights);
    layer_free(&layer);
}

static void check_truncations(const char *device) {
    size_t bytes;
    uint8_t *data = prepared_bytes(&small_nvfp4, device, MEGAMOE_NVFP4_FOLDED, &bytes);
    const size_t header_end = header_of(data).fields.extents.blobs_offset;
    for (size_t n = 0; n <= header_end; n += 512) {
        megamoe_weights *weights;
        T_STATUS(open_bytes(data, n, &weights), MEGAMOE_EFORMAT);
        T_CHECK(weights == NULL);
        T_CONTAINS(megamoe_last_error(), t_path("bytes"));
        T_CONTAINS(megamoe_last_error(), n == 0 ? "not a prepared file" : "truncated");
    }
    megamoe_weights *weights;
    T_STATUS(open_bytes(data, bytes - 1, &weights), MEGAMOE_EFORMAT);
    T_CONTAINS(megamoe_last_error(), "truncated");
    uint8_t *longer = calloc(1, bytes + 1);
    T_REQUIRE(longer);
    memcpy(longer, data, bytes);
    T_STATUS(open_bytes(longer, bytes + 1, &weights), MEGAMOE_EFORMAT);
    T_CONTAINS(megamoe_last_error(), "too long");
    free(longer);
    free(data);
}

T_CASE(every_truncation_is_refused) {
    check_truncations("cpu");
    check_truncations("cuda");
}

/* The header hash holds; a layout belongs to its device. */
T_CASE(names_of_devices_and_layouts) {
    static const struct {
        const char *device, *layout, *wrong;
    } names[] = {{"cuda", "frag64-k128", NULL},
                 {"cuda", "tile32-k128", "tile32-k128"},
                 {"cuda", "frag64-k12", "frag64-k12"},
                 {"cpu", "frag64-k128", "frag64-k128"},
                 {"cpu", "tile32-k128", "hidden_k"}, /* of the other layout */
                 {"cud", "frag64-k128", "\"cud\""},
                 {"cuda:0", "frag64-k128", "\"cuda:0\""},
                 {"", "", "device \"\""},
                 {"0123456789abcdef", "frag64-k128", "\"0123456789abcdef\""}};
    size_t bytes;
    uint8_t *data = prepared_bytes(&small_nvfp4, "cuda", MEGAMOE_NVFP4_FOLDED, &bytes);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        mm_prepared_header header = header_of(data);
        memset(header.fields.device, 0, sizeof header.fields.device);
        memset(header.fields.layout, 0, sizeof header.fields.layout);
        memcpy(header.fields.device, names[i].device, strlen(names[i].device));
        memcpy(header.fields.layout, names[i].layout, strlen(names[i].layout));
        mm_prepared_seal(&header);
        memcpy(data, &header, sizeof header);
        megamoe_weights *weights;
        const megamoe_status status = open_bytes(data, bytes, &weights);
        T_CHECK_MSG((status == MEGAMOE_OK) == (names[i].wrong == NULL), "%zu", i);
        if (names[i].wrong)
            T_CONTAINS(megamoe_last_error(), names[i].wrong);
        megamoe_weights_close(weights);
    }
    free(data);
}

T_CASE(every_flipped_byte_is_found) {
    size_t bytes;
    uint8_t *data = prepared_bytes(&small_mxfp4, "cpu", MEGAMOE_NVFP4_EXACT, &bytes);
    const mm_prepared_extents extents = header_of(data).fields.extents;
    const uint64_t hashes_end = extents.hashes_offset + 3 * sizeof(mm_hash);
    const uint64_t router_end = extents.router_offset + extents.router_bytes;
    const char *path = t_path("flipped");
    t_write_file(path, data, bytes);
    FILE *file = fopen(path, "r+b");
    T_REQUIRE(file);
    for (size_t i = 0; i < bytes; i += i < 512 ? 1 : 61) {
        const uint8_t flipped = (uint8_t)(data[i] ^ 1u << i % 8);
        T_CHECK(fseek(file, (long)i, SEEK_SET) == 0 && fputc(flipped, file) != EOF &&
                fflush(file) == 0);
        megamoe_weights *weights;
        megamoe_status status = megamoe_weights_open(path, &weights);
        if (status == MEGAMOE_OK) {
            status = megamoe_weights_verify(weights, (megamoe_progress){0});
            if (i >= extents.blobs_offset) {
                char expert[64];
                snprintf(expert, sizeof expert, "%s: expert %d:", path,
                         (int)((i - extents.blobs_offset) / extents.blob_bytes));
                T_CONTAINS(megamoe_last_error(), expert);
            }
            megamoe_weights_close(weights);
        }
        /* Between the parts lies padding that nothing reads. */
        const bool padding = (i >= hashes_end && i < extents.router_offset) ||
                             (i >= router_end && i < extents.blobs_offset);
        const size_t kind_end = offsetof(mm_prepared_fields, device);
        if (i < kind_end)
            T_CHECK_MSG(status == MEGAMOE_EFORMAT || status == MEGAMOE_EUNSUPPORTED, "byte %zu", i);
        else
            T_CHECK_MSG(status == (padding ? MEGAMOE_OK : MEGAMOE_ECHECK), "byte %zu: %s", i,
                        megamoe_status_name(status));
        T_CHECK(fseek(file, (long)i, SEEK_SET) == 0 && fputc(data[i], file) != EOF);
    }
    fclose(file);
    free(data);
}

/* Reads all that an opened file offers. */
static void read_all(const megamoe_weights *weights) {
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    T_OK(megamoe_weights_describe(weights, &desc));
    double *values = malloc(sizeof *values * (size_t)desc.hidden * (size_t)desc.intermediate);
    float *high = malloc(sizeof *high * (size_t)(desc.hidden + desc.intermediate));
    float *low = malloc(sizeof *low * (size_t)(desc.hidden + desc.intermediate));
    T_REQUIRE(values && high && low);
    for (int32_t i = 0; i < 3 * desc.experts; i++) {
        const megamoe_projection projection = (megamoe_projection)(i % 3);
        int exponent;
        T_OK(megamoe_weights_unpack(weights, i / 3, projection, values));
        T_OK(mm_weights_hold(weights, i / 3));
        for (int32_t row = 0; row < mm_rows(&desc, projection); row++) {
            mm_weights_row(weights, MEGAMOE_NVFP4_EXACT, i / 3, projection, row, high, low,
                           &exponent);
            (void)mm_weights_bias(weights, i / 3, projection, row);
        }
        (void)mm_weights_global(weights, i / 3, projection);
        mm_weights_drop(weights, i / 3);
    }
    free(values);
    free(high);
    free(low);
}

/* The header hash holds in all of these. */
T_CASE(hostile_fields) {
    const struct {
        const char *field;
        size_t offset;
        size_t bytes;
        int64_t value;
        megamoe_status status;
    } cases[] = {
#define FIELD(name, value, status)                                                                 \
    {#name, offsetof(mm_prepared_fields, name), sizeof((mm_prepared_fields *)0)->name, value,      \
     status}
        FIELD(byte_order, 0x04030201, MEGAMOE_EUNSUPPORTED),
        FIELD(version, 0, MEGAMOE_EUNSUPPORTED),
        FIELD(version, 2, MEGAMOE_EUNSUPPORTED),
        FIELD(device, 0x61647563, MEGAMOE_EUNSUPPORTED),
        FIELD(layout, -1, MEGAMOE_EUNSUPPORTED),
        FIELD(hidden, 0, MEGAMOE_EFORMAT),
        FIELD(hidden, -48, MEGAMOE_EFORMAT),
        FIELD(hidden, 47, MEGAMOE_EFORMAT),
        FIELD(hidden, 112, MEGAMOE_EFORMAT),
        FIELD(hidden, 65552, MEGAMOE_EFORMAT),
        FIELD(hidden, 0x7FFFFFF0, MEGAMOE_EFORMAT),
        FIELD(intermediate, 0, MEGAMOE_EFORMAT),
        FIELD(intermediate, 8, MEGAMOE_EFORMAT),
        FIELD(intermediate, 65536, MEGAMOE_EFORMAT),
        FIELD(experts, 0, MEGAMOE_EFORMAT),
        FIELD(experts, -1, MEGAMOE_EFORMAT),
        FIELD(experts, 2, MEGAMOE_EFORMAT),
        FIELD(experts, 4096, MEGAMOE_EFORMAT),
        FIELD(experts, 4097, MEGAMOE_EFORMAT),
        FIELD(experts, 0x7FFFFFFF, MEGAMOE_EFORMAT),
        FIELD(topk, -1, MEGAMOE_EFORMAT),
        FIELD(topk, 4, MEGAMOE_EFORMAT),
        FIELD(topk, 2, MEGAMOE_EFORMAT), /* unlike the router */
        FIELD(format, 0, MEGAMOE_EFORMAT),
        FIELD(format, 1, MEGAMOE_EFORMAT), /* hidden is no multiple of 32 */
        FIELD(format, 3, MEGAMOE_EFORMAT),
        FIELD(format, -1, MEGAMOE_EFORMAT),
        FIELD(nvfp4, 1, MEGAMOE_EFORMAT), /* other sizes */
        FIELD(nvfp4, 2, MEGAMOE_EFORMAT),
        FIELD(has_bias, 2, MEGAMOE_EFORMAT),
        FIELD(alpha, 0x7FC00000, MEGAMOE_EFORMAT),
        FIELD(offset, 0x7F800000, MEGAMOE_EFORMAT),
        FIELD(limit, 0xBF800000, MEGAMOE_EFORMAT),
        FIELD(extents.hidden_k, 0, MEGAMOE_EFORMAT),
        FIELD(extents.intermediate_k, -1, MEGAMOE_EFORMAT),
        FIELD(extents.fc1_tiles, 1 << 20, MEGAMOE_EFORMAT),
        FIELD(extents.fc2_tiles, 1, MEGAMOE_EFORMAT),
        FIELD(extents.hashes_offset, 0, MEGAMOE_EFORMAT),
        FIELD(extents.hashes_offset, INT64_MAX, MEGAMOE_EFORMAT),
        FIELD(extents.router_offset, -4096, MEGAMOE_EFORMAT),
        FIELD(extents.router_bytes, -1, MEGAMOE_EFORMAT),
        FIELD(extents.router_bytes, 1, MEGAMOE_ECHECK),
        FIELD(extents.blobs_offset, 4096, MEGAMOE_EFORMAT),
        FIELD(extents.blobs_offset, INT64_MAX - 4095, MEGAMOE_EFORMAT),
        FIELD(extents.blob_bytes, 0, MEGAMOE_EFORMAT),
        FIELD(extents.blob_bytes, INT64_MIN, MEGAMOE_EFORMAT),
        FIELD(extents.file_bytes, 0, MEGAMOE_EFORMAT),
#undef FIELD
    };
    size_t bytes;
    uint8_t *data = prepared_bytes(&small_nvfp4, "cpu", MEGAMOE_NVFP4_EXACT, &bytes);
    const mm_prepared_header original = header_of(data);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mm_prepared_header header = original;
        const size_t n = cases[i].bytes < 8 ? cases[i].bytes : 8;
        memcpy((uint8_t *)&header + cases[i].offset, &cases[i].value, n);
        mm_prepared_seal(&header);
        memcpy(data, &header, sizeof header);
        megamoe_weights *weights;
        if (!T_STATUS(open_bytes(data, bytes, &weights), cases[i].status))
            T_CHECK_MSG(false, "%s = %lld", cases[i].field, (long long)cases[i].value);
        T_CONTAINS(megamoe_last_error(), t_path("bytes"));
        megamoe_weights_close(weights);
    }
    free(data);
}

/* A router so large that the offsets after it wrap and fit the file again. */
T_CASE(router_size_that_wraps) {
    size_t bytes;
    uint8_t *data = prepared_bytes(&small_nvfp4, "cpu", MEGAMOE_NVFP4_EXACT, &bytes);
    mm_prepared_header header = header_of(data);
    mm_prepared_extents *extents = &header.fields.extents;
    extents->router_bytes = (uint64_t)-4096;
    extents->blobs_offset = extents->router_offset - 4096;
    extents->file_bytes = extents->blobs_offset + 3 * extents->blob_bytes;
    mm_prepared_seal(&header);
    memcpy(data, &header, sizeof header);
    megamoe_weights *weights;
    T_STATUS(open_bytes(data, extents->file_bytes, &weights), MEGAMOE_EFORMAT);
    T_CONTAINS(megamoe_last_error(), "router_bytes");
    free(data);
}

/* Whatever a blob holds, it can be read. */
T_CASE(arbitrary_blobs) {
    static const layer_shape window = {MEGAMOE_FORMAT_NVFP4, 48, 80, 3, 0, 40, 126};
    const struct {
        const layer_shape *shape;
        const char *device;
        megamoe_nvfp4_mode mode;
    } kinds[] = {{&small_mxfp4, "cpu", MEGAMOE_NVFP4_EXACT},
                 {&small_nvfp4, "cpu", MEGAMOE_NVFP4_EXACT},
                 {&small_nvfp4, "cpu", MEGAMOE_NVFP4_FOLDED},
                 {&window, "cuda", MEGAMOE_NVFP4_EXACT},
                 {&small_nvfp4, "cuda", MEGAMOE_NVFP4_FOLDED}};
    t_random random = t_random_start(45);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        size_t bytes;
        uint8_t *data = prepared_bytes(kinds[i].shape, kinds[i].device, kinds[i].mode, &bytes);
        for (size_t at = header_of(data).fields.extents.blobs_offset; at < bytes; at++)
            data[at] = (uint8_t)t_u64(&random);
        megamoe_weights *weights;
        T_OK(open_bytes(data, bytes, &weights));
        read_all(weights);
        T_STATUS(megamoe_weights_verify(weights, (megamoe_progress){0}), MEGAMOE_ECHECK);
        megamoe_weights_close(weights);
        free(data);
    }
}

/* A router that is not the layer's, though every hash holds. */
T_CASE(hostile_router) {
    size_t bytes;
    uint8_t *data = prepared_bytes(&small_nvfp4, "cpu", MEGAMOE_NVFP4_EXACT, &bytes);
    mm_prepared_header header = header_of(data);
    uint8_t *router = data + header.fields.extents.router_offset;
    const size_t n = header.fields.extents.router_bytes;
    for (size_t i = 0; i + 4 <= n && i < 256; i += 4) {
        uint8_t kept[4];
        memcpy(kept, router + i, 4);
        memset(router + i, 0xFF, 4);
        header.fields.router_hash = mm_hash_of(router, n);
        mm_prepared_seal(&header);
        memcpy(data, &header, sizeof header);
        megamoe_weights *weights;
        const megamoe_status status = open_bytes(data, bytes, &weights);
        T_CHECK_MSG(status == MEGAMOE_OK || status == MEGAMOE_EFORMAT ||
                        status == MEGAMOE_EUNSUPPORTED,
                    "router byte %zu: %s", i, megamoe_status_name(status));
        megamoe_weights_close(weights);
        memcpy(router + i, kept, 4);
    }
    free(data);
}

T_CASE(a_file_that_is_cut_while_it_is_open) {
    t_random random = t_random_start(47);
    test_layer layer = layer_random(&small_mxfp4, &random);
    const char *path = t_path("cut");
    prepare(&layer, NULL, "cpu", MEGAMOE_NVFP4_EXACT, 1, path);
    megamoe_weights *weights;
    T_OK(megamoe_weights_open(path, &weights));
    struct stat st;
    T_REQUIRE(stat(path, &st) == 0 && truncate(path, st.st_size - 1) == 0);
    double *values =
        malloc(sizeof *values * (size_t)layer.desc.hidden * (size_t)layer.desc.intermediate);
    T_REQUIRE(values);
    const int32_t last = layer.desc.experts - 1;
    T_OK(megamoe_weights_unpack(weights, last - 1, MEGAMOE_GATE, values));
    T_STATUS(megamoe_weights_unpack(weights, last, MEGAMOE_GATE, values), MEGAMOE_EIO);
    T_CONTAINS(megamoe_last_error(), path);
    T_STATUS(megamoe_weights_verify(weights, (megamoe_progress){0}), MEGAMOE_EIO);
    T_CONTAINS(megamoe_last_error(), "too early");
    free(values);
    megamoe_weights_close(weights);
    layer_free(&layer);
}

T_CASE(prepare_refusals) {
    t_random random = t_random_start(46);
    test_layer layer = layer_random(&small_mxfp4, &random);
    megamoe_weights *weights;
    T_OK(megamoe_weights_from_tensors(&layer.desc, layer.matrices, &weights));
    megamoe_prepare_options options = MEGAMOE_INIT(megamoe_prepare_options);
    const char *directory = t_path("out");
    T_REQUIRE(mkdir(directory, 0777) == 0);
    const char *path = t_path("out/file");
    options.device = "cuda:0";
    T_STATUS(megamoe_weights_prepare(weights, NULL, &options, path), MEGAMOE_EUNSUPPORTED);
    T_CONTAINS(megamoe_last_error(), "cuda");
    options.device = NULL;
    options.nvfp4 = (megamoe_nvfp4_mode)2;
    T_STATUS(megamoe_weights_prepare(weights, NULL, &options, path), MEGAMOE_EINVAL);
    options.nvfp4 = MEGAMOE_NVFP4_EXACT;
    options.threads = -1;
    T_STATUS(megamoe_weights_prepare(weights, NULL, &options, path), MEGAMOE_EINVAL);
    options.threads = 1;
    T_STATUS(megamoe_weights_prepare(weights, NULL, &options, t_path("absent/file")), MEGAMOE_EIO);
    T_STATUS(megamoe_weights_prepare(weights, NULL, &options, NULL), MEGAMOE_EINVAL);
    T_REQUIRE(mkdir(t_path("out/folder"), 0777) == 0);
    T_STATUS(megamoe_weights_prepare(weights, NULL, &options, t_path("out/folder")), MEGAMOE_EIO);
    megamoe_layer_desc other = layer.desc;
    other.hidden = 128;
    megamoe_router *router = router_of(&other);
    T_STATUS(megamoe_weights_prepare(weights, router, &options, path), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "hidden 128");
    megamoe_router_close(router);
    /* Too far apart in two experts: counted, and nothing is left. */
    for (int32_t expert = 0; expert < 3; expert += 2) {
        memset(layer_codes(&layer, expert, MEGAMOE_DOWN, 9), 0x55, 48);
        memset(layer_scales(&layer, expert, MEGAMOE_DOWN, 9), 5, 3);
        layer_scales(&layer, expert, MEGAMOE_DOWN, 9)[1] = 200;
    }
    for (int32_t threads = 1; threads <= 2; threads++) {
        options.threads = threads;
        T_STATUS(megamoe_weights_prepare(weights, NULL, &options, path), MEGAMOE_EINEXACT);
        T_CONTAINS(megamoe_last_error(), "expert 0 down scales: row 9, block 0");
        T_CONTAINS(megamoe_last_error(), "groups outside: 4");
    }
    T_EQ_INT(entries(directory), 3); /* ., .. and folder */
    options.round_outside_window = true;
    T_STATUS(megamoe_weights_prepare(weights, NULL, &options, path), MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "\"cpu\"");
    T_CHECK(megamoe_weights_device(weights) == NULL && megamoe_weights_device(NULL) == NULL);
    T_STATUS(megamoe_weights_verify(weights, (megamoe_progress){0}), MEGAMOE_EUNSUPPORTED);
    megamoe_weights_close(weights);
    layer_free(&layer);
}

/* For the GPU: what it cannot hold is counted, or rounded by name. */
T_CASE(prepare_outside_the_window) {
    const layer_shape shape = {MEGAMOE_FORMAT_MXFP4, 64, 96, 3, MEGAMOE_DTYPE_BF16, 120, 125};
    t_random random = t_random_start(48);
    test_layer layer = layer_random(&shape, &random);
    /* Code 6 under 2^(140 - 127) has the operand 6 * 2^6; the next block lies 13 binades below. */
    for (int32_t expert = 0; expert < 3; expert += 2) {
        uint8_t *codes = layer_codes(&layer, expert, MEGAMOE_DOWN, 9);
        uint8_t *scales = layer_scales(&layer, expert, MEGAMOE_DOWN, 9);
        memset(codes, 0x77, 16);
        memset(codes + 16, 0x55, 32);
        scales[0] = 140;
        scales[1] = 140 - 6 - 13;
        scales[2] = 140 - 6 - 7;
    }
    megamoe_weights *weights;
    T_OK(megamoe_weights_from_tensors(&layer.desc, layer.matrices, &weights));
    megamoe_prepare_options options = MEGAMOE_INIT(megamoe_prepare_options);
    options.device = "cuda";
    options.threads = 2;
    const char *path = t_path("outside");
    T_STATUS(megamoe_weights_prepare(weights, NULL, &options, path), MEGAMOE_EINEXACT);
    T_CONTAINS(megamoe_last_error(), "expert 0 down scales: row 9, block 1");
    T_CONTAINS(megamoe_last_error(), "13 binades below");
    T_CONTAINS(megamoe_last_error(), "round_outside_window");
    T_CONTAINS(megamoe_last_error(), "groups outside: 2");
    options.round_outside_window = true;
    T_OK(megamoe_weights_prepare(weights, NULL, &options, path));
    megamoe_weights *prepared;
    T_OK(megamoe_weights_open(path, &prepared));
    double *values = malloc(sizeof *values * 64 * 96);
    T_REQUIRE(values);
    T_OK(megamoe_weights_unpack(prepared, 2, MEGAMOE_DOWN, values));
    for (int32_t k = 0; k < 96; k++) {
        /* 3 * 2^-13 is 3/16 of the smallest operand, 2^-9. */
        const double wanted = k / 32 == 1 ? 0.0 : layer_value(&layer, 2, MEGAMOE_DOWN, 9, k);
        T_EQ_F64(values[9 * 96 + k], wanted);
    }
    free(values);
    megamoe_weights_close(prepared);
    megamoe_weights_close(weights);
    layer_free(&layer);
}

T_CASE(open_refusals) {
    megamoe_weights *weights;
    T_STATUS(megamoe_weights_open(t_path("absent"), &weights), MEGAMOE_ENOTFOUND);
    T_CHECK(weights == NULL);
    T_STATUS(megamoe_weights_open(t_path(""), &weights), MEGAMOE_EIO);
    T_STATUS(megamoe_weights_open(NULL, &weights), MEGAMOE_EINVAL);
    char text[5000];
    memset(text, '{', sizeof text);
    T_STATUS(open_bytes((const uint8_t *)text, sizeof text, &weights), MEGAMOE_EFORMAT);
    T_CONTAINS(megamoe_last_error(), "not a prepared file");
}
