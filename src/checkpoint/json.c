/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/json.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/file.h"

enum { LARGEST_FILE = 100000000 };

/*
 * Where an allocation fails, jansson's parser may lose a byte of a string, or end the process by an
 * assertion. So while it parses for us its allocations are noted, and the first that fails leaves
 * it for good: its blocks are freed here. Other threads that use it meanwhile come through these
 * functions too, which then do nothing but call what was there before.
 */
typedef struct watch {
    void **blocks; /* NULL: freed again */
    size_t n, room;
    jmp_buf out;
} watch;

static pthread_mutex_t watch_lock = PTHREAD_MUTEX_INITIALIZER;
static json_malloc_t its_malloc;
static json_free_t its_free;
static _Thread_local watch *watched;

static bool note(watch *w, void *block) {
    if (block && w->n == w->room) {
        const size_t room = w->room ? 2 * w->room : 64;
        void **grown = realloc(w->blocks, room * sizeof *grown);
        if (!grown)
            return false;
        w->blocks = grown;
        w->room = room;
    }
    if (block)
        w->blocks[w->n++] = block;
    return block != NULL;
}

static void *watching_malloc(size_t bytes) {
    void *block = its_malloc(bytes);
    if (watched && !note(watched, block)) {
        its_free(block);
        longjmp(watched->out, 1);
    }
    return block;
}

/* Most blocks that are freed are among the last ones. */
static void watching_free(void *block) {
    watch *w = watched;
    for (size_t i = w && block ? w->n : 0; i-- > 0;)
        if (w->blocks[i] == block) {
            w->blocks[i] = NULL;
            break;
        }
    while (w && w->n && !w->blocks[w->n - 1])
        w->n--;
    its_free(block);
}

megamoe_status mm_json_parse(const char *text, size_t bytes, json_t **value, json_error_t *error) {
    watch w = {0};
    *value = NULL;
    pthread_mutex_lock(&watch_lock);
    json_get_alloc_funcs(&its_malloc, &its_free);
    json_set_alloc_funcs(watching_malloc, watching_free);
    watched = &w;
    const bool out_of_memory = setjmp(w.out) != 0;
    if (!out_of_memory)
        *value = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, error);
    watched = NULL;
    json_set_alloc_funcs(its_malloc, its_free);
    for (size_t i = 0; out_of_memory && i < w.n; i++)
        its_free(w.blocks[i]);
    pthread_mutex_unlock(&watch_lock);
    free(w.blocks);
    if (out_of_memory)
        return MEGAMOE_ENOMEM;
    return *value ? MEGAMOE_OK : MEGAMOE_EFORMAT;
}

megamoe_status mm_json_read(const char *path, json_t **value) {
    char *text;
    size_t bytes;
    json_error_t error;
    *value = NULL;
    MM_TRY(mm_file_read_all(path, LARGEST_FILE, &text, &bytes));
    json_t *read;
    const megamoe_status status = mm_json_parse(text, bytes, &read, &error);
    free(text);
    if (status == MEGAMOE_ENOMEM)
        return mm_fail(status, "%s: out of memory", path);
    if (status != MEGAMOE_OK)
        return mm_fail(status, "%s: line %d: %s", path, error.line, error.text);
    if (!json_is_object(read)) {
        json_decref(read);
        return mm_fail(MEGAMOE_EFORMAT, "%s: must hold one JSON object", path);
    }
    *value = read;
    return MEGAMOE_OK;
}

typedef struct written {
    char *text;
    size_t n, room;
    bool failed;
} written;

static int append(const char *text, size_t n, void *user) {
    written *w = user;
    if (w->room - w->n <= n) { /* a NUL follows */
        const size_t room = 2 * (w->n + n + 1);
        char *grown = realloc(w->text, room);
        if (!grown) {
            w->failed = true;
            return -1;
        }
        w->text = grown;
        w->room = room;
    }
    memcpy(w->text + w->n, text, n);
    w->n += n;
    w->text[w->n] = 0;
    return 0;
}

char *mm_json_text(const json_t *value, size_t flags) {
    written w = {0};
    if (json_dump_callback(value, append, &w, flags) == 0 && !w.failed)
        return w.text;
    free(w.text);
    return NULL;
}
