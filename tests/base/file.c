/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "base/file.h"

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "t.h"

/* A fresh directory for one case. */
static const char *make_directory(const char *name) {
    const char *path = t_path(name);
    T_REQUIRE(mkdir(path, 0777) == 0);
    return path;
}

static int count_entries(const char *directory) {
    DIR *stream = opendir(directory);
    T_REQUIRE(stream != NULL);
    int count = 0;
    for (const struct dirent *entry; (entry = readdir(stream)) != NULL;)
        count += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    closedir(stream);
    return count;
}

static void check_content(const char *path, const char *expected) {
    size_t n;
    char *data = t_read_file(path, &n);
    T_EQ_INT(n, strlen(expected));
    T_EQ_MEM(data, expected, n);
    free(data);
}

T_CASE(a_file_is_read_and_mapped) {
    const char *path = t_path("read");
    char bytes[8192 + 5];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (char)(i * 31 >> 3);
    t_write_file(path, bytes, sizeof bytes);
    mm_file file;
    T_OK(mm_file_open(path, &file));
    T_EQ_INT((int64_t)file.bytes, sizeof bytes);
    char part[97];
    T_OK(mm_file_read(&file, 8100, part, sizeof part));
    T_EQ_MEM(part, bytes + 8100, sizeof part);
    T_OK(mm_file_read(&file, sizeof bytes, part, 0));
    mm_mapping mapping;
    T_OK(mm_file_map(&file, 4096, 4096 + 5, &mapping));
    mm_file_close(&file);
    T_CHECK(file.path == NULL);
    mm_file_close(&file);
    T_EQ_MEM(mapping.data, bytes + 4096, mapping.bytes);
    mm_mapping_close(&mapping);
    T_CHECK(mapping.data == NULL);
    mm_mapping_close(&mapping);
}

T_CASE(a_whole_file_is_read) {
    const char *path = t_path("whole");
    char *text;
    size_t bytes;
    t_write_file(path, "hello", 5);
    T_OK(mm_file_read_all(path, 5, &text, &bytes));
    T_EQ_INT((int64_t)bytes, 5);
    T_EQ_STR(text, "hello");
    free(text);
    T_STATUS(mm_file_read_all(path, 4, &text, &bytes), MEGAMOE_EFORMAT);
    T_CONTAINS(megamoe_last_error(), "at most 4");
    t_write_file(path, "", 0);
    T_OK(mm_file_read_all(path, 5, &text, &bytes));
    T_EQ_STR(text, "");
    free(text);
}

T_CASE(a_file_that_shrinks_is_an_error) {
    const char *path = t_path("shrinks");
    char bytes[5000] = {0};
    t_write_file(path, bytes, sizeof bytes);
    mm_file file;
    T_OK(mm_file_open(path, &file));
    T_REQUIRE(truncate(path, 3000) == 0);
    T_OK(mm_file_read(&file, 0, bytes, 3000));
    T_STATUS(mm_file_read(&file, 1000, bytes, 4000), MEGAMOE_EIO);
    T_CONTAINS(megamoe_last_error(), path);
    T_CONTAINS(megamoe_last_error(), "ends at byte 3000, 2000 bytes too early");
    T_CONTAINS(megamoe_last_error(), "it had 5000 bytes");
    mm_file_close(&file);
}

T_CASE(what_cannot_be_read_is_named) {
    mm_file file;
    const char *missing = t_path("missing");
    T_STATUS(mm_file_open(missing, &file), MEGAMOE_ENOTFOUND);
    T_CONTAINS(megamoe_last_error(), missing);
    T_STATUS(mm_file_open(t_path(""), &file), MEGAMOE_EIO);
    T_CONTAINS(megamoe_last_error(), t_path(""));
    T_CHECK(file.path == NULL);
    T_STATUS(mm_file_open("/dev/null", &file), MEGAMOE_EIO);
    T_CONTAINS(megamoe_last_error(), "regular file");
    const char *fifo = t_path("fifo");
    T_REQUIRE(mkfifo(fifo, 0600) == 0);
    T_STATUS(mm_file_open(fifo, &file), MEGAMOE_EIO); /* and does not wait for a writer */
    T_CONTAINS(megamoe_last_error(), "regular file");
}

T_CASE(an_output_appears_when_it_is_committed) {
    const char *directory = make_directory("commit");
    const char *path = t_path("commit/file");
    mm_output output;
    T_OK(mm_output_open(path, &output));
    T_OK(mm_output_write(&output, 6, "world", 5));
    T_OK(mm_output_write(&output, 0, "hello ", 6));
    T_CHECK(access(path, F_OK) != 0);
    T_OK(mm_output_commit(&output));
    check_content(path, "hello world");
    T_EQ_INT(count_entries(directory), 1);
    mm_output_discard(&output);
    check_content(path, "hello world");
}

T_CASE(an_output_replaces_the_file_of_its_name) {
    make_directory("replace");
    const char *path = t_path("replace/file");
    t_write_file(path, "old", 3);
    mm_output output;
    T_OK(mm_output_open(path, &output));
    T_OK(mm_output_write(&output, 0, "newer", 5));
    check_content(path, "old");
    T_OK(mm_output_commit(&output));
    check_content(path, "newer");
}

T_CASE(a_discarded_output_leaves_nothing) {
    const char *directory = make_directory("discard");
    const char *path = t_path("discard/file");
    t_write_file(path, "old", 3);
    mm_output output;
    T_OK(mm_output_open(path, &output));
    T_OK(mm_output_write(&output, 0, "new", 3));
    T_EQ_INT(count_entries(directory), 2);
    mm_output_discard(&output);
    T_EQ_INT(count_entries(directory), 1);
    check_content(path, "old");
    mm_output_discard(&output);
}

T_CASE(an_output_obeys_the_umask) {
    make_directory("mask");
    const char *path = t_path("mask/file");
    const mode_t before = umask(027);
    mm_output output;
    T_OK(mm_output_open(path, &output));
    T_OK(mm_output_commit(&output));
    umask(before);
    struct stat status;
    T_REQUIRE(stat(path, &status) == 0);
    T_EQ_INT(status.st_mode & 0777, 0640);
}

T_CASE(an_output_that_cannot_begin_says_so) {
    mm_output output;
    const char *path = t_path("no/such/directory");
    T_STATUS(mm_output_open(path, &output), MEGAMOE_EIO);
    T_CONTAINS(megamoe_last_error(), path);
    T_EQ_INT(output.fd, -1);
    mm_output_discard(&output);
}

T_CASE(only_regular_files_are_replaced) {
    const char *directory = make_directory("irregular");
    const char *path = t_path("irregular/directory");
    T_REQUIRE(mkdir(path, 0777) == 0);
    mm_output output;
    T_STATUS(mm_output_open(path, &output), MEGAMOE_EIO);
    T_CONTAINS(megamoe_last_error(), path);
    T_EQ_INT(output.fd, -1);
    T_EQ_INT(count_entries(directory), 1);
    T_STATUS(mm_output_open("/dev/null", &output), MEGAMOE_EIO);
}

T_CASE(a_failed_commit_leaves_nothing) {
    const char *directory = make_directory("failed");
    const char *path = t_path("failed/taken");
    mm_output output;
    T_OK(mm_output_open(path, &output));
    T_OK(mm_output_write(&output, 0, "data", 4));
    T_REQUIRE(mkdir(path, 0777) == 0); /* a rename onto a directory fails */
    T_STATUS(mm_output_commit(&output), MEGAMOE_EIO);
    T_CONTAINS(megamoe_last_error(), path);
    T_EQ_INT(count_entries(directory), 1);
    T_EQ_INT(count_entries(path), 0);
    T_EQ_INT(output.fd, -1);
}

T_CASE(a_failed_write_is_reported) {
    const char *directory = make_directory("full");
    mm_output output;
    T_OK(mm_output_open(t_path("full/file"), &output));
    struct rlimit before;
    T_REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
    const struct rlimit limit = {4096, before.rlim_max};
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    T_REQUIRE(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    static const char data[10000];
    const megamoe_status status = mm_output_write(&output, 0, data, sizeof data);
    setrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, handler);
    T_STATUS(status, MEGAMOE_EIO);
    T_CONTAINS(megamoe_last_error(), "full/file");
    mm_output_discard(&output);
    T_EQ_INT(count_entries(directory), 0);
}

enum { WRITERS = 4, BLOCKS = 50, BLOCK_BYTES = 1000 };

typedef struct writer {
    const mm_output *output;
    int index;
} writer;

static void *write_blocks(void *argument) {
    const writer *w = argument;
    char block[BLOCK_BYTES];
    memset(block, 'a' + w->index, sizeof block);
    for (int i = BLOCKS - 1; i >= 0; i--) {
        const uint64_t offset = (uint64_t)(i * WRITERS + w->index) * BLOCK_BYTES;
        T_STATUS(mm_output_write(w->output, offset, block, sizeof block), MEGAMOE_OK);
    }
    return NULL;
}

T_CASE(threads_write_to_one_output) {
    const char *path = t_path("threads");
    mm_output output;
    T_OK(mm_output_open(path, &output));
    pthread_t threads[WRITERS];
    writer writers[WRITERS];
    for (int i = 0; i < WRITERS; i++) {
        writers[i] = (writer){&output, i};
        T_REQUIRE(pthread_create(&threads[i], NULL, write_blocks, &writers[i]) == 0);
    }
    for (int i = 0; i < WRITERS; i++)
        pthread_join(threads[i], NULL);
    T_OK(mm_output_commit(&output));
    size_t n;
    char *data = t_read_file(path, &n);
    T_EQ_INT(n, WRITERS * BLOCKS * BLOCK_BYTES);
    for (size_t at = 0; at < n; at++)
        if (!T_CHECK(data[at] == 'a' + (int)(at / BLOCK_BYTES % WRITERS)))
            break;
    free(data);
}
