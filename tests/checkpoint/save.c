/* SPDX-License-Identifier: Apache-2.0 */
/* megamoe_tensors_save: what it writes, and that it leaves nothing behind when it fails. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fixture.h"

static megamoe_status fill_index(void *user, size_t index, void *data, uint64_t bytes) {
    size_t *order = user;
    memset(data, (int)index + 1, bytes);
    if (order)
        order[++order[0]] = index;
    return MEGAMOE_OK;
}

static megamoe_status save(const char *path, const megamoe_tensor_spec *specs, size_t n) {
    return megamoe_tensors_save(path, specs, n, fill_index, NULL, (megamoe_progress){0});
}

T_CASE(large_elements_come_first_and_lie_aligned) {
    const megamoe_tensor_spec specs[] = {
        {"u8", "U8", 1, {3}},     {"f32 \"quoted\"\n", "F32", 2, {2, 1}},
        {"bf16", "BF16", 1, {3}}, {"scalar", "F32", 0, {0}},
        {"i64", "I64", 1, {1}},   {"empty", "F8_E8M0", 2, {0, 4}}};
    enum { N = sizeof specs / sizeof *specs };
    size_t order[N + 1] = {0};
    const char *path = t_path("saved.safetensors");
    T_OK(megamoe_tensors_save(path, specs, N, fill_index, order, (megamoe_progress){0}));
    static const size_t expected[N + 1] = {N, 4, 1, 3, 2, 0, 5};
    T_EQ_MEM(order, expected, sizeof expected);

    size_t bytes;
    uint8_t *file = t_read_file(path, &bytes);
    const size_t header = file[0] | (size_t)file[1] << 8;
    T_EQ_INT((int64_t)(header % 8), 0);
    T_EQ_INT((int64_t)bytes, (int64_t)(8 + header + 8 + 8 + 4 + 6 + 3));
    T_EQ_INT(file[8], '{');
    T_CHECK(file[8 + header - 1] == '}' || file[8 + header - 1] == ' ');
    free(file);

    megamoe_checkpoint *opened_file;
    T_OK(megamoe_tensors_open(path, &opened_file));
    for (size_t i = 0; i < N; i++) {
        megamoe_tensor tensor;
        T_OK(megamoe_checkpoint_tensor(opened_file, specs[i].name, &tensor));
        T_EQ_STR(tensor.dtype, specs[i].dtype);
        T_EQ_INT(tensor.rank, specs[i].rank);
        T_EQ_MEM(tensor.shape, specs[i].shape, sizeof tensor.shape);
        for (uint64_t b = 0; b < tensor.bytes; b++)
            T_EQ_INT(((const uint8_t *)tensor.data)[b], (int64_t)i + 1);
        if (strcmp(tensor.dtype, "I64") == 0)
            T_EQ_INT((int64_t)((uintptr_t)tensor.data % 8), 0);
    }
    megamoe_checkpoint_close(opened_file);
}

T_CASE(a_file_without_tensors_can_be_written_and_read) {
    T_OK(save(t_path("none.safetensors"), NULL, 0));
    megamoe_checkpoint *file;
    T_OK(megamoe_tensors_open(t_path("none.safetensors"), &file));
    megamoe_checkpoint_close(file);
}

static megamoe_status refused(megamoe_tensor_spec a, megamoe_tensor_spec b) {
    const char *path = t_path("refused.safetensors");
    const megamoe_status status = save(path, (megamoe_tensor_spec[]){a, b}, 2);
    T_CHECK(access(path, F_OK) != 0);
    return status;
}

T_CASE(impossible_tensors_are_refused) {
    const megamoe_tensor_spec good = {"good", "U8", 1, {1}};
    FAILS(refused(good, good), MEGAMOE_EINVAL, "good", "two tensors");
    FAILS(refused(good, (megamoe_tensor_spec){"bad", "U9", 1, {1}}), MEGAMOE_EINVAL, "bad",
          "\"U9\"");
    FAILS(refused(good, (megamoe_tensor_spec){"bad", "U8", 9, {1}}), MEGAMOE_EINVAL, "bad",
          "rank 9");
    FAILS(refused(good, (megamoe_tensor_spec){"bad", "U8", -1, {1}}), MEGAMOE_EINVAL, "rank -1");
    FAILS(refused(good, (megamoe_tensor_spec){"bad", "U8", 1, {-1}}), MEGAMOE_EINVAL, "shape[0]");
    FAILS(refused(good, (megamoe_tensor_spec){"bad", "U8", 2, {1LL << 32, 1LL << 32}}),
          MEGAMOE_EINVAL, "bad", "overflows");
    FAILS(refused(good, (megamoe_tensor_spec){"bad", "F4", 1, {3}}), MEGAMOE_EINVAL,
          "whole number");
    megamoe_tensor_spec huge[9];
    static const char *const names[9] = {"1", "2", "3", "4", "5", "6", "7", "8", "9"};
    for (int i = 0; i < 9; i++)
        huge[i] = (megamoe_tensor_spec){names[i], "F64", 1, {1LL << 57}};
    FAILS(save(t_path("refused.safetensors"), huge, 9), MEGAMOE_EINVAL, "8", "2^63");
    FAILS(refused(good, (megamoe_tensor_spec){"bad\xff", "U8", 1, {1}}), MEGAMOE_EINVAL, "UTF-8");
    FAILS(refused(good, (megamoe_tensor_spec){"__metadata__", "U8", 1, {1}}), MEGAMOE_EINVAL,
          "name");
    FAILS(refused(good, (megamoe_tensor_spec){NULL, "U8", 1, {1}}), MEGAMOE_EINVAL, "name");
}

static megamoe_status fill_until_third(void *user, size_t index, void *data, uint64_t bytes) {
    (void)user;
    (void)data;
    (void)bytes;
    return index == 2 ? MEGAMOE_ECHECK : MEGAMOE_OK;
}

T_CASE(a_failing_fill_ends_it_and_leaves_the_old_file) {
    const megamoe_tensor_spec specs[] = {
        {"a", "U8", 1, {1}}, {"b", "U8", 1, {1}}, {"c", "U8", 1, {1}}};
    const char *path = t_path("kept.safetensors");
    write_text(path, "old");
    T_STATUS(megamoe_tensors_save(path, specs, 3, fill_until_third, NULL, (megamoe_progress){0}),
             MEGAMOE_ECHECK);
    size_t bytes;
    char *kept = t_read_file(path, &bytes);
    T_EQ_INT((int64_t)bytes, 3);
    T_EQ_MEM(kept, "old", 3);
    free(kept);
    FAILS(save(t_path("no/such/directory.safetensors"), specs, 3), MEGAMOE_EIO, "directory");
}

typedef struct seen {
    uint64_t calls, done, total;
} seen;

static void see(void *user, uint64_t done, uint64_t total) {
    seen *progress = user;
    progress->calls++;
    T_CHECK(done >= progress->done && done <= total);
    progress->done = done;
    progress->total = total;
}

T_CASE(progress_counts_bytes) {
    const megamoe_tensor_spec specs[] = {{"a", "F32", 1, {10}}, {"b", "U8", 1, {2}}};
    seen progress = {0};
    T_OK(megamoe_tensors_save(t_path("progress.safetensors"), specs, 2, fill_index, NULL,
                              (megamoe_progress){see, &progress}));
    T_EQ_INT((int64_t)progress.calls, 2);
    T_EQ_INT((int64_t)progress.done, 42);
    T_EQ_INT((int64_t)progress.total, 42);
}
