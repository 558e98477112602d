/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "t.h"

#include <errno.h>
#include <ftw.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { PRINTED_FAILURES = 10, PATHS = 16, PATH_BYTES = 512 };

static t_case *first_case;
static t_case *last_case;
static jmp_buf leave_case;
static bool skipped;
static atomic_int failures; /* of the case that runs; checks count from any thread */
static uint64_t seed = 20260901;
static char directory[PATH_BYTES];

void t_register(t_case *registered) {
    *(last_case ? &last_case->next : &first_case) = registered;
    last_case = registered;
}

/* Whether this failure is among those that are printed. */
static bool fail_at(const char *file, int line) {
    const int count = atomic_fetch_add(&failures, 1);
    if (count == PRINTED_FAILURES)
        printf("  further failures of this case are not printed\n");
    if (count >= PRINTED_FAILURES)
        return false;
    printf("%s:%d: ", file, line);
    return true;
}

bool t_check(bool holds, const char *file, int line, const char *format, ...) {
    if (holds || !fail_at(file, line))
        return holds;
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf(": does not hold\n");
    return false;
}

bool t_eq_int(int64_t a, int64_t b, const char *file, int line, const char *a_text,
              const char *b_text) {
    if (a == b)
        return true;
    if (fail_at(file, line))
        printf("%s == %s: %" PRId64 " != %" PRId64 "\n", a_text, b_text, a, b);
    return false;
}

bool t_eq_hex(uint64_t a, uint64_t b, const char *file, int line, const char *a_text,
              const char *b_text) {
    if (a == b)
        return true;
    if (fail_at(file, line))
        printf("%s == %s: 0x%" PRIx64 " != 0x%" PRIx64 "\n", a_text, b_text, a, b);
    return false;
}

bool t_eq_f64(double a, double b, const char *file, int line, const char *a_text,
              const char *b_text) {
    if (a == b || (isnan(a) && isnan(b)))
        return true;
    if (fail_at(file, line))
        printf("%s == %s: %.17g (%a) != %.17g (%a)\n", a_text, b_text, a, a, b, b);
    return false;
}

bool t_near(double a, double b, double tolerance, const char *file, int line, const char *a_text,
            const char *b_text) {
    if (a == b || fabs(a - b) <= tolerance)
        return true;
    if (fail_at(file, line))
        printf("%s near %s: %.17g and %.17g differ by %g, more than %g\n", a_text, b_text, a, b,
               fabs(a - b), tolerance);
    return false;
}

bool t_eq_str(const char *a, const char *b, const char *file, int line, const char *a_text,
              const char *b_text) {
    if (strcmp(a, b) == 0)
        return true;
    if (fail_at(file, line))
        printf("%s == %s: \"%s\" != \"%s\"\n", a_text, b_text, a, b);
    return false;
}

bool t_eq_mem(const void *a, const void *b, size_t bytes, const char *file, int line,
              const char *a_text, const char *b_text) {
    if (bytes == 0 || memcmp(a, b, bytes) == 0)
        return true;
    const uint8_t *left = a;
    const uint8_t *right = b;
    size_t first = 0;
    while (left[first] == right[first])
        first++;
    if (fail_at(file, line))
        printf("%s == %s: byte %zu of %zu: 0x%02x != 0x%02x\n", a_text, b_text, first, bytes,
               left[first], right[first]);
    return false;
}

bool t_contains(const char *text, const char *part, const char *file, int line,
                const char *expression) {
    if (strstr(text, part))
        return true;
    if (fail_at(file, line))
        printf("%s: \"%s\" lacks \"%s\"\n", expression, text, part);
    return false;
}

bool t_status(megamoe_status status, megamoe_status expected, const char *(*name)(megamoe_status),
              const char *(*message)(void), const char *file, int line, const char *call) {
    if (status == expected)
        return true;
    if (fail_at(file, line))
        printf("%s: %s, expected %s%s%s\n", call, name(status), name(expected),
               status == MEGAMOE_OK ? "" : "; last error: ", status == MEGAMOE_OK ? "" : message());
    return false;
}

void t_leave(void) {
    longjmp(leave_case, 1);
}

void t_skip(const char *format, ...) {
    printf("  ");
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
    skipped = true;
    t_leave();
}

static uint64_t splitmix64(uint64_t *state) {
    uint64_t z = (*state += 0x9E3779B97F4A7C15u);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

t_random t_random_start(uint64_t stream) {
    uint64_t state = seed ^ stream * 0xD1342543DE82EF95u;
    t_random random;
    for (int i = 0; i < 4; i++)
        random.state[i] = splitmix64(&state);
    return random;
}

static uint64_t rotate_left(uint64_t value, int bits) {
    return value << bits | value >> (64 - bits);
}

uint64_t t_u64(t_random *random) {
    uint64_t *s = random->state;
    const uint64_t result = rotate_left(s[1] * 5, 7) * 9;
    const uint64_t shifted = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= shifted;
    s[3] = rotate_left(s[3], 45);
    return result;
}

uint32_t t_below(t_random *random, uint32_t n) {
    return (uint32_t)((t_u64(random) >> 32) * n >> 32);
}

double t_uniform(t_random *random) {
    return (double)(t_u64(random) >> 11) * 0x1p-53;
}

double t_normal(t_random *random) {
    const double radius = sqrt(-2 * log(1 - t_uniform(random)));
    return radius * cos(6.283185307179586 * t_uniform(random));
}

static int remove_entry(const char *path, const struct stat *status, int kind, struct FTW *at) {
    (void)status;
    (void)kind;
    (void)at;
    return remove(path);
}

const char *t_path(const char *name) {
    static char paths[PATHS][2 * PATH_BYTES];
    static unsigned next;
    if (!directory[0]) {
        const char *parent = getenv("TMPDIR");
        snprintf(directory, sizeof directory, "%s/megamoe-test-XXXXXX", parent ? parent : "/tmp");
        if (!mkdtemp(directory)) {
            perror(directory);
            exit(1);
        }
    }
    char *path = paths[next++ % PATHS];
    snprintf(path, sizeof paths[0], "%s%s%s", directory, name[0] ? "/" : "", name);
    return path;
}

void t_write_file(const char *path, const void *data, size_t bytes) {
    FILE *file = fopen(path, "wb");
    const bool written = file && fwrite(data, 1, bytes, file) == bytes;
    const bool closed = file && fclose(file) == 0;
    if (!T_CHECK_MSG(written && closed, "writing %s", path))
        t_leave();
}

void *t_read_file(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    char *data = NULL;
    *bytes = 0;
    if (file && fseek(file, 0, SEEK_END) == 0) {
        const long end = ftell(file);
        rewind(file);
        data = end >= 0 ? malloc((size_t)end + 1) : NULL;
        *bytes = data ? fread(data, 1, (size_t)end, file) : 0;
    }
    if (file)
        fclose(file);
    if (!T_CHECK_MSG(data != NULL, "reading %s", path))
        t_leave();
    return data;
}

pid_t t_fork(void (*fn)(void *argument), void *argument) {
    const pid_t parent = getpid();
    fflush(NULL); /* or the child would write it again */
    const pid_t child = fork();
    if (child < 0) {
        t_check(false, __FILE__, __LINE__, "fork: %s", strerror(errno));
        t_leave();
    }
    if (child > 0)
        return child;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(1);
    atomic_store(&failures, 0);
    if (setjmp(leave_case) == 0)
        fn(argument);
    exit(atomic_load(&failures) ? 1 : 0);
}

static bool is_chosen(const t_case *test, int n_parts, char **parts) {
    for (int i = 0; i < n_parts; i++)
        if (strstr(test->name, parts[i]))
            return true;
    return n_parts == 0;
}

int main(int argc, char **argv) {
    const char *seed_text = getenv("MEGAMOE_TEST_SEED");
    if (seed_text)
        seed = strtoull(seed_text, NULL, 0);
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("seed %" PRIu64 "\n", seed);
    int counts[3] = {0};
    for (const t_case *test = first_case; test; test = test->next) {
        if (!is_chosen(test, argc - 1, argv + 1))
            continue;
        skipped = false;
        atomic_store(&failures, 0);
        if (setjmp(leave_case) == 0)
            test->run();
        const int result = atomic_load(&failures) ? 1 : skipped ? 2 : 0;
        printf("%s %s\n", (const char *[]){"ok", "FAILED", "skipped"}[result], test->name);
        counts[result]++;
    }
    if (directory[0])
        nftw(directory, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    printf("%d passed, %d failed, %d skipped\n", counts[0], counts[1], counts[2]);
    return counts[1] ? 1 : counts[2] && !counts[0] ? 77 : 0;
}
