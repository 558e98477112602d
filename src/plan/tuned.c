/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "plan/tuned.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/memory.h"
#include "checkpoint/json.h"
#include "plan/tuned_entry.h"

enum { LARGEST_FILE = 16 << 20, PATH_BYTES = 4096 };

static const char entries_member[] = "tuned";

/* ---- Where it is ---- */

static const char *variable(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

megamoe_status megamoe_tuned_path(char *path, size_t bytes) {
    if (!path || !bytes)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_tuned_path: there is no room");
    const char *own = variable("MEGAMOE_CACHE_DIR"), *cache = variable("XDG_CACHE_HOME");
    const char *home = variable("HOME");
    int n;
    if (own)
        n = snprintf(path, bytes, "%s/plans.json", own);
    else if (cache && *cache == '/') /* else it is to be ignored: XDG Base Directory */
        n = snprintf(path, bytes, "%s/megamoe/plans.json", cache);
    else if (home)
        n = snprintf(path, bytes, "%s/.cache/megamoe/plans.json", home);
    else
        return mm_fail(MEGAMOE_ENOTFOUND, "measured plans have no place: set MEGAMOE_CACHE_DIR");
    if (n < 0 || (size_t)n >= bytes)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_tuned_path: the path has more than %zu bytes",
                       bytes - 1);
    return MEGAMOE_OK;
}

/* `path`, or the default one, which `room` holds. */
static megamoe_status resolve(const char *path, char room[PATH_BYTES], const char **resolved) {
    *resolved = path ? path : room;
    return path ? MEGAMOE_OK : megamoe_tuned_path(room, PATH_BYTES);
}

/* ---- Reading ---- */

/*
 * NULL in *root where there is no file, or none of use, of which a warning tells. MEGAMOE_EIO for
 * one that cannot be read.
 */
static megamoe_status read_file(const char *path, json_t **root) {
    *root = NULL;
    char *text;
    size_t bytes;
    json_error_t error;
    megamoe_status status = mm_file_read_all(path, LARGEST_FILE, &text, &bytes);
    if (status == MEGAMOE_ENOTFOUND)
        return MEGAMOE_OK;
    if (status == MEGAMOE_EFORMAT) {
        mm_log(MEGAMOE_LOG_WARN, "measured plans are ignored: %s", megamoe_last_error());
        return MEGAMOE_OK;
    }
    MM_TRY(status);
    status = mm_json_parse(text, bytes, root, &error);
    free(text);
    if (status == MEGAMOE_ENOMEM)
        return mm_fail(status, "%s: out of memory", path);
    if (status != MEGAMOE_OK) {
        mm_log(MEGAMOE_LOG_WARN, "%s is ignored: line %d: %s", path, error.line, error.text);
        return MEGAMOE_OK;
    }
    if (!json_is_array(json_object_get(*root, entries_member))) {
        mm_log(MEGAMOE_LOG_WARN, "%s is ignored: it has no array \"%s\"", path, entries_member);
        json_decref(*root);
        *root = NULL;
    }
    return MEGAMOE_OK;
}

/* Calls fn for each entry that can be read. One warning tells of the others. */
static megamoe_status each_entry(const json_t *root, const char *path, megamoe_tuned_fn fn,
                                 void *user) {
    const json_t *entries = json_object_get(root, entries_member);
    size_t ignored = 0;
    char why[256] = "";
    for (size_t i = 0; i < json_array_size(entries); i++) {
        mm_tuned_entry entry;
        const megamoe_status status = mm_tuned_entry_read(json_array_get(entries, i), &entry);
        if (status == MEGAMOE_ENOMEM)
            return status;
        if (status == MEGAMOE_OK) {
            fn(user, &entry.key, entry.tuned.plans, entry.tuned.n);
            mm_tuned_entry_close(&entry);
        } else if (ignored++ == 0) {
            snprintf(why, sizeof why, "entry %zu: %.200s", i + 1, megamoe_last_error());
        }
    }
    if (ignored)
        mm_log(MEGAMOE_LOG_WARN, "%s: %zu of %zu entries are ignored: %s", path, ignored,
               json_array_size(entries), why);
    return MEGAMOE_OK;
}

megamoe_status megamoe_tuned_each(const char *path, megamoe_tuned_fn fn, void *user) {
    if (!fn)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_tuned_each: fn is NULL");
    char room[PATH_BYTES];
    if (resolve(path, room, &path) != MEGAMOE_OK)
        return MEGAMOE_OK;
    json_t *root;
    megamoe_status status = read_file(path, &root);
    if (status == MEGAMOE_EIO) {
        mm_log(MEGAMOE_LOG_WARN, "measured plans are ignored: %s", megamoe_last_error());
        return MEGAMOE_OK;
    }
    MM_TRY(status);
    status = each_entry(root, path, fn, user);
    json_decref(root);
    return status;
}

typedef struct search {
    const megamoe_tuned_key *key;
    int64_t capacity; /* of the best so far; 0: none */
    mm_tuned *found;
    bool failed; /* for want of memory */
} search;

static void consider(void *user, const megamoe_tuned_key *key, const megamoe_tuned_plan *plans,
                     int32_t n) {
    search *s = user;
    if (s->failed || key->capacity < s->key->capacity ||
        (s->capacity && key->capacity >= s->capacity) || !mm_tuned_same_kind(key, s->key))
        return;
    megamoe_tuned_plan *kept = mm_alloc((size_t)n * sizeof *kept);
    s->failed = !kept;
    if (!kept)
        return;
    memcpy(kept, plans, (size_t)n * sizeof *kept);
    free(s->found->plans);
    *s->found = (mm_tuned){kept, n};
    s->capacity = key->capacity;
}

megamoe_status mm_tuned_find(const char *path, const megamoe_tuned_key *key, mm_tuned *found) {
    *found = (mm_tuned){0};
    search s = {.key = key, .found = found};
    megamoe_status status = megamoe_tuned_each(path, consider, &s);
    if (status == MEGAMOE_OK && s.failed)
        status = mm_fail(MEGAMOE_ENOMEM, "measured plans: out of memory");
    if (status != MEGAMOE_OK) {
        free(found->plans);
        *found = (mm_tuned){0};
    }
    return status;
}

/* How many times the larger of two numbers is the smaller one. */
static double ratio(int64_t a, int64_t b) {
    return a > b ? (double)a / (double)b : (double)b / (double)a;
}

const megamoe_tuned_plan *mm_tuned_near(const mm_tuned *tuned, int64_t tokens) {
    static const double FARTHEST = 1.5; /* batches that are powers of two cover all between them */
    const megamoe_tuned_plan *nearest = NULL;
    for (int32_t i = 0; tokens > 0 && i < tuned->n; i++) {
        const megamoe_tuned_plan *plan = &tuned->plans[i];
        if (ratio(plan->tokens, tokens) <= FARTHEST &&
            (!nearest || ratio(plan->tokens, tokens) < ratio(nearest->tokens, tokens)))
            nearest = plan;
    }
    return nearest;
}

/* ---- Changing ---- */

/* mkdir -p of the directory that the file is in. */
static void make_directories(const char *path) {
    char *copy = strdup(path);
    for (char *slash = copy ? strchr(copy + 1, '/') : NULL; slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        (void)mkdir(copy, 0777); /* what is missing in the end is found when the file is opened */
        *slash = '/';
    }
    free(copy);
}

/*
 * Waits until no other process changes the file. The lock is a file beside it, for the file itself
 * is replaced. Owns: the caller closes *lock.
 */
static megamoe_status lock_file(const char *path, int *lock) {
    char *name;
    if (asprintf(&name, "%s.lock", path) < 0)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", path);
    megamoe_status status = MEGAMOE_OK;
    *lock = open(name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOCTTY, 0666);
    int failed = *lock < 0;
    while (!failed && (failed = flock(*lock, LOCK_EX)) != 0 && errno == EINTR)
        failed = 0;
    if (failed) {
        status = mm_fail(MEGAMOE_EIO, "%s: cannot lock: %s", name, strerror(errno));
        if (*lock >= 0)
            close(*lock);
    }
    free(name);
    return status;
}

static megamoe_status write_file(const char *path, const json_t *root) {
    char *text = root ? mm_json_text(root, JSON_INDENT(1) | JSON_PRESERVE_ORDER) : NULL;
    if (!text)
        return mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", path);
    mm_output output;
    megamoe_status status = mm_output_open(path, &output);
    if (status == MEGAMOE_OK)
        status = mm_output_write(&output, 0, text, strlen(text));
    if (status == MEGAMOE_OK)
        status = mm_output_commit(&output);
    else
        mm_output_discard(&output);
    free(text);
    return status;
}

static json_t *empty_file(void) {
    json_t *root = json_object();
    if (root && json_object_set_new(root, entries_member, json_array()) == 0)
        return root;
    json_decref(root);
    return NULL;
}

/* Whether the value is an entry of this key; *entry is open if it is. */
static megamoe_status open_if_of(const json_t *value, const megamoe_tuned_key *key,
                                 mm_tuned_entry *entry, bool *matches) {
    *matches = false;
    const megamoe_status status = mm_tuned_entry_read(value, entry);
    if (status != MEGAMOE_OK)
        return status == MEGAMOE_ENOMEM ? status : MEGAMOE_OK;
    *matches = entry->key.capacity == key->capacity && mm_tuned_same_kind(&entry->key, key);
    if (!*matches)
        mm_tuned_entry_close(entry);
    return MEGAMOE_OK;
}

static megamoe_status add(json_t *entries, const megamoe_tuned_key *key,
                          const megamoe_tuned_plan *plans, int32_t n) {
    mm_tuned_entry entry = {.key = *key};
    size_t at = 0;
    bool found = false;
    for (; at < json_array_size(entries); at++) {
        MM_TRY(open_if_of(json_array_get(entries, at), key, &entry, &found));
        if (found)
            break;
    }
    if (!found)
        entry = (mm_tuned_entry){.key = *key};
    megamoe_status status = mm_tuned_entry_add(&entry, plans, n);
    if (status == MEGAMOE_OK) {
        json_t *value = mm_tuned_entry_json(&entry);
        const int failed =
            found ? json_array_set_new(entries, at, value) : json_array_append_new(entries, value);
        if (failed)
            status = mm_fail(MEGAMOE_ENOMEM, "measured plans: out of memory");
    }
    mm_tuned_entry_close(&entry);
    return status;
}

/* Holding the lock. */
static megamoe_status store_locked(const char *path, const megamoe_tuned_key *key,
                                   const megamoe_tuned_plan *plans, int32_t n) {
    json_t *root;
    MM_TRY(read_file(path, &root));
    if (!root)
        root = empty_file();
    megamoe_status status = root ? add(json_object_get(root, entries_member), key, plans, n)
                                 : mm_fail(MEGAMOE_ENOMEM, "%s: out of memory", path);
    if (status == MEGAMOE_OK)
        status = write_file(path, root);
    json_decref(root);
    return status;
}

megamoe_status megamoe_tuned_store(const char *path, const megamoe_tuned_key *key,
                                   const megamoe_tuned_plan *plans, int32_t n) {
    if (!key || !plans || n < 1)
        return mm_fail(MEGAMOE_EINVAL, "megamoe_tuned_store: %s",
                       !key ? "key is NULL" : (!plans ? "plans is NULL" : "there are no plans"));
    megamoe_tuned_key taken;
    MM_TRY(mm_take_struct(&taken, sizeof taken, key, "megamoe_tuned_key"));
    char room[PATH_BYTES];
    MM_TRY(resolve(path, room, &path));
    make_directories(path);
    int lock;
    MM_TRY(lock_file(path, &lock));
    const megamoe_status status = store_locked(path, &taken, plans, n);
    close(lock);
    return status;
}

static megamoe_status forget(json_t *entries, megamoe_tuned_match_fn matches, void *user,
                             int32_t *removed) {
    for (size_t i = json_array_size(entries); i-- > 0;) {
        mm_tuned_entry entry = {.tuned.n = 0};
        const megamoe_status status = mm_tuned_entry_read(json_array_get(entries, i), &entry);
        if (status == MEGAMOE_ENOMEM)
            return status;
        if (!matches || (status == MEGAMOE_OK && matches(user, &entry.key))) {
            json_array_remove(entries, i);
            ++*removed;
        }
        mm_tuned_entry_close(&entry);
    }
    return MEGAMOE_OK;
}

/* Holding the lock. */
static megamoe_status forget_locked(const char *path, megamoe_tuned_match_fn matches, void *user,
                                    int32_t *removed) {
    json_t *root;
    MM_TRY(read_file(path, &root));
    if (!root && !matches)
        root = empty_file(); /* in place of one that cannot be read */
    if (!root)
        return MEGAMOE_OK;
    megamoe_status status = forget(json_object_get(root, entries_member), matches, user, removed);
    if (status == MEGAMOE_OK && (*removed || !matches))
        status = write_file(path, root);
    json_decref(root);
    return status;
}

megamoe_status megamoe_tuned_forget(const char *path, megamoe_tuned_match_fn match, void *user,
                                    int32_t *removed) {
    int32_t n = 0;
    char room[PATH_BYTES];
    megamoe_status status = MEGAMOE_OK;
    if (resolve(path, room, &path) == MEGAMOE_OK && mm_file_exists(path)) {
        int lock;
        MM_TRY(lock_file(path, &lock));
        status = forget_locked(path, match, user, &n);
        close(lock);
    }
    if (removed)
        *removed = status == MEGAMOE_OK ? n : 0;
    return status;
}
