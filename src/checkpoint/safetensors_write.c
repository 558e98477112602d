/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/file.h"
#include "checkpoint/json.h"
#include "checkpoint/safetensors.h"
#include "megamoe/checkpoint.h"

enum { LENGTH_BYTES = 8, HEADER_MULTIPLE = 8 };

typedef struct planned_tensor {
    size_t index; /* in the caller's specs */
    uint32_t bits;
    uint64_t bytes;
} planned_tensor;

static megamoe_status plan_tensor(const char *path, const megamoe_tensor_spec *specs, size_t index,
                                  planned_tensor *planned) {
    const megamoe_tensor_spec *spec = &specs[index];
    if (!spec->name || !spec->dtype || strcmp(spec->name, "__metadata__") == 0)
        return mm_fail(MEGAMOE_EINVAL, "%s: tensor %zu needs a name and a dtype", path, index);
    const mm_dtype *dtype = mm_safetensors_dtype_find(spec->dtype);
    if (!dtype)
        return mm_fail(MEGAMOE_EINVAL, "%s: %s: dtype \"%s\" is none that safetensors defines",
                       path, spec->name, spec->dtype);
    if (spec->rank < 0 || spec->rank > MM_TENSOR_RANK_MAX)
        return mm_fail(MEGAMOE_EINVAL, "%s: %s: rank %d must be 0..%d", path, spec->name,
                       spec->rank, MM_TENSOR_RANK_MAX);
    for (int32_t i = 0; i < spec->rank; i++)
        if (spec->shape[i] < 0)
            return mm_fail(MEGAMOE_EINVAL, "%s: %s: shape[%d] is %" PRId64 ", which is negative",
                           path, spec->name, i, spec->shape[i]);
    *planned = (planned_tensor){.index = index, .bits = dtype->bits};
    if (!mm_safetensors_bytes(dtype, spec->shape, spec->rank, &planned->bytes)) {
        char shape[MM_SHAPE_TEXT];
        return mm_fail(MEGAMOE_EINVAL,
                       "%s: %s: shape %s in %s overflows 2^64 bits or is no whole number of bytes",
                       path, spec->name, mm_shape_text(spec->shape, spec->rank, shape),
                       spec->dtype);
    }
    return MEGAMOE_OK;
}

/* Large elements first, so that with an aligned start of the data every element is aligned. */
static int by_element_size(const void *a, const void *b) {
    const planned_tensor *x = a, *y = b;
    if (x->bits != y->bits)
        return x->bits > y->bits ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

/* Every json_*_new that fails makes the whole entry fail, so one test at the end is enough. */
static json_t *entry_of(const megamoe_tensor_spec *spec, uint64_t begin, uint64_t end) {
    json_t *shape = json_array();
    for (int32_t i = 0; i < spec->rank; i++)
        if (json_array_append_new(shape, json_integer(spec->shape[i])) != 0) {
            json_decref(shape);
            return NULL;
        }
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", spec->dtype, "shape", shape, "data_offsets",
                     (json_int_t)begin, (json_int_t)end);
}

static megamoe_status build_header(const char *path, const megamoe_tensor_spec *specs,
                                   const planned_tensor *plan, size_t n, char **text) {
    /* Loaders of other projects ask for this note. */
    json_t *header = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    megamoe_status status = MEGAMOE_OK;
    uint64_t end = 0;
    for (size_t i = 0; i < n; i++) {
        const megamoe_tensor_spec *spec = &specs[plan[i].index];
        const uint64_t begin = end;
        if (__builtin_add_overflow(begin, plan[i].bytes, &end) || end > INT64_MAX) {
            status =
                mm_fail(MEGAMOE_EINVAL, "%s: %s: the tensors exceed 2^63 bytes", path, spec->name);
            goto done;
        }
        if (json_object_get(header, spec->name)) {
            status =
                mm_fail(MEGAMOE_EINVAL, "%s: %s: two tensors have this name", path, spec->name);
            goto done;
        }
        errno = 0;
        if (json_object_set_new(header, spec->name, entry_of(spec, begin, end)) != 0) {
            const bool memory = !header || errno == ENOMEM;
            status = mm_fail(memory ? MEGAMOE_ENOMEM : MEGAMOE_EINVAL, "%s: %s: %s", path,
                             spec->name, memory ? "out of memory" : "its name is not valid UTF-8");
            goto done;
        }
    }
    *text = mm_json_text(header, JSON_COMPACT);
    if (!*text)
        status = mm_fail(MEGAMOE_ENOMEM, "%s: out of memory for its header", path);
done:
    json_decref(header);
    return status;
}

static megamoe_status write_header(const mm_output *output, const char *text, uint64_t *bytes) {
    static const char spaces[HEADER_MULTIPLE] = "        ";
    const uint64_t used = strlen(text);
    const uint64_t padding = (HEADER_MULTIPLE - used % HEADER_MULTIPLE) % HEADER_MULTIPLE;
    if (used + padding > MM_SAFETENSORS_HEADER_MAX)
        return mm_fail(MEGAMOE_EINVAL,
                       "%s: its header would take %" PRIu64 " bytes; the format allows %d",
                       output->path, used + padding, MM_SAFETENSORS_HEADER_MAX);
    uint8_t length[LENGTH_BYTES];
    for (int i = 0; i < LENGTH_BYTES; i++)
        length[i] = (uint8_t)((used + padding) >> 8 * i);
    MM_TRY(mm_output_write(output, 0, length, sizeof length));
    MM_TRY(mm_output_write(output, sizeof length, text, used));
    MM_TRY(mm_output_write(output, sizeof length + used, spaces, padding));
    *bytes = sizeof length + used + padding;
    return MEGAMOE_OK;
}

static megamoe_status write_tensor(const mm_output *output, uint64_t offset,
                                   const megamoe_tensor_spec *spec, const planned_tensor *planned,
                                   megamoe_tensor_fill_fn fill, void *user) {
    void *data = calloc(1, planned->bytes ? planned->bytes : 1);
    if (!data)
        return mm_fail(MEGAMOE_ENOMEM, "%s: %s: out of memory for its %" PRIu64 " bytes",
                       output->path, spec->name, planned->bytes);
    megamoe_status status = fill(user, planned->index, data, planned->bytes);
    if (status == MEGAMOE_OK)
        status = mm_output_write(output, offset, data, planned->bytes);
    free(data);
    return status;
}

megamoe_status megamoe_tensors_save(const char *path, const megamoe_tensor_spec *specs, size_t n,
                                    megamoe_tensor_fill_fn fill, void *user,
                                    megamoe_progress progress) {
    if (!path || !fill || (n && !specs))
        return mm_fail(MEGAMOE_EINVAL,
                       "megamoe_tensors_save: path, specs and fill must not be NULL");
    mm_output output = {.fd = -1};
    char *text = NULL;
    megamoe_status status = MEGAMOE_OK;
    planned_tensor *plan = calloc(n ? n : 1, sizeof *plan);
    if (!plan)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory for %zu tensors", path, n);
    uint64_t total = 0, done = 0, header_bytes = 0;
    for (size_t i = 0; i < n; i++)
        MM_TRY_GOTO(plan_tensor(path, specs, i, &plan[i]), end);
    qsort(plan, n, sizeof *plan, by_element_size);
    MM_TRY_GOTO(build_header(path, specs, plan, n, &text), end);
    for (size_t i = 0; i < n; i++)
        total += plan[i].bytes;
    MM_TRY_GOTO(mm_output_open(path, &output), end);
    MM_TRY_GOTO(write_header(&output, text, &header_bytes), end);
    for (size_t i = 0; i < n; i++) {
        MM_TRY_GOTO(
            write_tensor(&output, header_bytes + done, &specs[plan[i].index], &plan[i], fill, user),
            end);
        done += plan[i].bytes;
        if (progress.fn)
            progress.fn(progress.user, done, total);
    }
    status = mm_output_commit(&output);
end:
    mm_output_discard(&output);
    free(text);
    free(plan);
    return status;
}
