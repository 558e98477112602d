/* SPDX-License-Identifier: Apache-2.0 */
#include "tensor_field.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"

static int wrong_dtype(const char *path, const tensor_field *f, const char *dtype) {
    if (f->dtypes[1] == MEGAMOE_DTYPE_NONE)
        return report_error("%s: %s: dtype %s; expected %s", path, f->name, dtype,
                            megamoe_dtype_name(f->dtypes[0]));
    return report_error("%s: %s: dtype %s; expected %s or %s", path, f->name, dtype,
                        megamoe_dtype_name(f->dtypes[0]), megamoe_dtype_name(f->dtypes[1]));
}

int tensor_field_read(const char *path, const megamoe_checkpoint *file, tensor_field *f) {
    megamoe_tensor tensor;
    const megamoe_status status = megamoe_checkpoint_tensor(file, f->name, &tensor);
    if (status == MEGAMOE_ENOTFOUND)
        return EXIT_DONE;
    if (status != MEGAMOE_OK)
        return report_failure(status);
    for (int i = 0; i < 2; i++)
        if (f->dtypes[i] != MEGAMOE_DTYPE_NONE &&
            strcmp(tensor.dtype, megamoe_dtype_name(f->dtypes[i])) == 0)
            f->dtype = f->dtypes[i];
    if (f->dtype == MEGAMOE_DTYPE_NONE)
        return wrong_dtype(path, f, tensor.dtype);
    if (tensor.rank != f->rank)
        return report_error("%s: %s: %" PRId32 " dimensions; expected %" PRId32, path, f->name,
                            tensor.rank, f->rank);
    memcpy(f->shape, tensor.shape, (size_t)f->rank * sizeof *f->shape);
    f->data = malloc(tensor.bytes + 1);
    if (f->data == NULL)
        return report_error("%s: %s: out of memory", path, f->name);
    if (tensor.bytes > 0)
        memcpy(f->data, tensor.data, tensor.bytes);
    return EXIT_DONE;
}

int64_t tensor_field_id(const tensor_field *f, int64_t i) {
    return f->dtype == MEGAMOE_DTYPE_I64 ? ((const int64_t *)f->data)[i]
                                         : ((const int32_t *)f->data)[i];
}

int tensor_field_check_ids(const char *path, const tensor_field *f, int64_t least, int64_t n) {
    const int64_t columns = f->rank == 2 ? f->shape[1] : 1;
    for (int64_t i = 0; i < f->shape[0] * columns; i++) {
        const int64_t id = tensor_field_id(f, i);
        if (id < least || id >= n)
            return report_error("%s: %s: token %" PRId64 ", slot %" PRId64 ": id %" PRId64
                                " is not in %" PRId64 "..%" PRId64,
                                path, f->name, i / columns, i % columns, id, least, n - 1);
    }
    return EXIT_DONE;
}
