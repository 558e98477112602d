/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The file of measured plans: whatever it holds, entries are sound, are found by their own key and
 * are the same once they have been written and read again.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "plan/tuned_entry.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void demand(bool condition) {
    if (!condition)
        abort();
}

static void check_entry(void *user, const megamoe_tuned_key *key, const megamoe_tuned_plan *plans,
                        int32_t n) {
    const char *path = user;
    mm_tuned found;
    demand(n > 0 && mm_tuned_find(path, key, &found) == MEGAMOE_OK && found.n > 0);
    for (int64_t tokens = 1; tokens < 1 << 16; tokens *= 3) {
        const megamoe_tuned_plan *plan = mm_tuned_near(&found, tokens);
        demand(!plan || (plan->token_tile >= 0 && plan->lag >= 0));
    }
    free(found.plans);

    mm_tuned_entry entry = {.key = *key}, again;
    demand(mm_tuned_entry_add(&entry, plans, n) == MEGAMOE_OK && entry.tuned.n == n);
    demand(memcmp(entry.tuned.plans, plans, (size_t)n * sizeof *plans) == 0);
    json_t *value = mm_tuned_entry_json(&entry);
    demand(value && mm_tuned_entry_read(value, &again) == MEGAMOE_OK && again.tuned.n == n);
    demand(memcmp(again.tuned.plans, plans, (size_t)n * sizeof *plans) == 0);
    demand(mm_tuned_same_kind(&again.key, key) && again.key.capacity == key->capacity);
    json_decref(value);
    mm_tuned_entry_close(&again);
    mm_tuned_entry_close(&entry);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const int fd = memfd_create("input", MFD_CLOEXEC);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (fd >= 0 && write(fd, data, size) == (ssize_t)size)
        demand(megamoe_tuned_each(path, check_entry, path) == MEGAMOE_OK);
    close(fd);
    return 0;
}
