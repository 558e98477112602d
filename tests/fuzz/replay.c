/* SPDX-License-Identifier: Apache-2.0 */
/* Gives every file of the named directories to a fuzzer's entry point, in place of libFuzzer. */
#define _GNU_SOURCE
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay_file(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) {
        perror(path);
        return 1;
    }
    fseek(file, 0, SEEK_END);
    const long end = ftell(file);
    rewind(file);
    /* Exactly as long as the input, so that a sanitizer sees a byte too many. */
    uint8_t *data = end >= 0 ? malloc((size_t)end + (end == 0)) : NULL;
    const size_t size = data ? fread(data, 1, (size_t)end, file) : 0;
    const int failed = !data || (long)size != end;
    fclose(file);
    if (failed)
        fprintf(stderr, "%s: cannot be read\n", path);
    else
        LLVMFuzzerTestOneInput(data, size);
    free(data);
    return failed;
}

static int is_visible(const struct dirent *entry) {
    return entry->d_name[0] != '.';
}

int main(int argc, char **argv) {
    int passed = 0;
    int failed = 0;
    for (int i = 1; i < argc; i++) {
        struct dirent **entries;
        const int n = scandir(argv[i], &entries, is_visible, alphasort);
        if (n <= 0) {
            fprintf(stderr, "%s: no inputs\n", argv[i]);
            failed++;
        }
        for (int e = 0; e < n; e++) {
            char *path = NULL;
            if (asprintf(&path, "%s/%s", argv[i], entries[e]->d_name) < 0 || replay_file(path))
                failed++;
            else
                passed++;
            free(path);
            free(entries[e]);
        }
        if (n >= 0)
            free(entries);
    }
    printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed ? 1 : 0;
}
