/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "base/directory.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "t.h"

static const char *make_directory(const char *name) {
    const char *path = t_path(name);
    T_REQUIRE(mkdir(path, 0777) == 0);
    return path;
}

static int count_entries(const char *directory) {
    DIR *stream = opendir(directory);
    T_REQUIRE(stream != NULL);
    int count = -2; /* . and .. */
    while (readdir(stream))
        count++;
    closedir(stream);
    return count;
}

static void put_file(const mm_output_directory *output, const char *name) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", output->temporary, name);
    t_write_file(path, "x", 1);
}

T_CASE(it_appears_with_all_its_files) {
    const char *parent = make_directory("commit");
    const char *const paths[] = {"commit/new", "commit/slash///", "commit/empty"};
    make_directory("commit/empty");
    for (int i = 0; i < 3; i++) {
        mm_output_directory output;
        T_OK(mm_output_directory_open(t_path(paths[i]), &output));
        put_file(&output, "a");
        put_file(&output, "b");
        T_OK(mm_output_directory_commit(&output));
        T_EQ_INT(count_entries(t_path(paths[i])), 2);
        T_CHECK(output.temporary == NULL);
        mm_output_directory_discard(&output);
    }
    T_EQ_INT(count_entries(parent), 3);
    const mode_t mask = umask(0);
    umask(mask);
    struct stat st;
    T_REQUIRE(stat(t_path("commit/new"), &st) == 0);
    T_EQ_HEX(st.st_mode & 0777, 0777 & ~mask);
}

T_CASE(a_discarded_one_leaves_nothing) {
    const char *parent = make_directory("discard");
    mm_output_directory output;
    T_OK(mm_output_directory_open(t_path("discard/new"), &output));
    put_file(&output, "a");
    T_EQ_INT(count_entries(parent), 1);
    mm_output_directory_discard(&output);
    T_EQ_INT(count_entries(parent), 0);
}

T_CASE(what_is_there_is_not_touched) {
    const char *parent = make_directory("there");
    make_directory("there/full");
    t_write_file(t_path("there/full/mine"), "x", 1);
    t_write_file(t_path("there/file"), "x", 1);
    static const char *const paths[] = {"there/full", "there/file", "there/no/parent"};
    static const char *const says[] = {"not empty", "not a directory", "cannot create"};
    for (int i = 0; i < 3; i++) {
        mm_output_directory output;
        T_STATUS(mm_output_directory_open(t_path(paths[i]), &output), MEGAMOE_EIO);
        T_CONTAINS(megamoe_last_error(), paths[i]);
        T_CONTAINS(megamoe_last_error(), says[i]);
        mm_output_directory_discard(&output);
    }
    T_EQ_INT(count_entries(parent), 2);
}

/* Someone else took the name meanwhile. */
T_CASE(a_name_that_is_taken_fails_and_leaves_nothing) {
    const char *parent = make_directory("taken");
    mm_output_directory output;
    T_OK(mm_output_directory_open(t_path("taken/new"), &output));
    put_file(&output, "a");
    make_directory("taken/new");
    t_write_file(t_path("taken/new/theirs"), "x", 1);
    T_STATUS(mm_output_directory_commit(&output), MEGAMOE_EIO);
    T_CONTAINS(megamoe_last_error(), "taken/new");
    T_EQ_INT(count_entries(parent), 1);
    T_EQ_INT(access(t_path("taken/new/theirs"), F_OK), 0);
}
