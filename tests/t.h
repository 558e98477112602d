/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The test harness. A test program is one or more files of cases; main() is in t.c:
 *
 *     T_CASE(rounds_to_even) {
 *         T_EQ_INT(round(2.5), 2);
 *     }
 *
 * Checks print both operands with file and line; a failed T_CHECK or T_EQ lets the case go on (and
 * yields false), a failed T_REQUIRE or T_OK ends it. Checks may run in any thread, T_REQUIRE, T_OK
 * and T_SKIP only in the case's own. Arguments of the program choose cases by parts of their names.
 * Exit status: 0, 1 when a case failed, 77 when none ran to its end because all were skipped.
 */
#ifndef T_H
#define T_H

#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "megamoe/status.h"

#define T_CASE(name)                                                                               \
    static void name(void);                                                                        \
    static void __attribute__((constructor)) t_register_##name(void) {                             \
        static t_case registered = {#name, name, NULL};                                            \
        t_register(&registered);                                                                   \
    }                                                                                              \
    static void name(void)

/* Anything true. T_CHECK_MSG adds a printf message that says what was tested. */
#define T_CHECK(condition) t_check((condition), __FILE__, __LINE__, "%s", #condition)
#define T_CHECK_MSG(condition, ...) t_check((condition), __FILE__, __LINE__, __VA_ARGS__)

/* The order is what was computed, then what is expected. Each operand is evaluated once. */
#define T_EQ_INT(a, b) t_eq_int((a), (b), __FILE__, __LINE__, #a, #b)
#define T_EQ_HEX(a, b) t_eq_hex((a), (b), __FILE__, __LINE__, #a, #b)
/* Equal values (+0 equals -0) or both NaN. */
#define T_EQ_F64(a, b) t_eq_f64((a), (b), __FILE__, __LINE__, #a, #b)
#define T_NEAR(a, b, tolerance) t_near((a), (b), (tolerance), __FILE__, __LINE__, #a, #b)
#define T_EQ_STR(a, b) t_eq_str((a), (b), __FILE__, __LINE__, #a, #b)
#define T_EQ_MEM(a, b, bytes) t_eq_mem((a), (b), (bytes), __FILE__, __LINE__, #a, #b)
/* `text` contains `part`. */
#define T_CONTAINS(text, part) t_contains((text), (part), __FILE__, __LINE__, #text)

/* A call returned this status; the message of an unexpected failure is printed. */
#define T_STATUS(call, expected)                                                                   \
    t_status((call), (expected), megamoe_status_name, megamoe_last_error, __FILE__, __LINE__, #call)

#define T_REQUIRE(condition)                                                                       \
    do {                                                                                           \
        if (!T_CHECK(condition))                                                                   \
            t_leave();                                                                             \
    } while (0)
#define T_OK(call)                                                                                 \
    do {                                                                                           \
        if (!T_STATUS(call, MEGAMOE_OK))                                                           \
            t_leave();                                                                             \
    } while (0)
#define T_SKIP(...) t_skip(__VA_ARGS__)

/*
 * Random numbers: xoshiro256** seeded by splitmix64 from the program's seed and a stream number.
 * The seed is fixed, printed, and set by MEGAMOE_TEST_SEED.
 */
typedef struct t_random {
    uint64_t state[4];
} t_random;

t_random t_random_start(uint64_t stream);
uint64_t t_u64(t_random *random);
/* 0..n-1. */
uint32_t t_below(t_random *random, uint32_t n);
/* [0, 1). */
double t_uniform(t_random *random);
/* Mean 0, deviation 1. */
double t_normal(t_random *random);

/*
 * "DIRECTORY/name" in a fresh directory of this program that is removed with all it holds when the
 * program ends; "" gives the directory. Valid for the next 15 calls. Only from the case's thread.
 */
const char *t_path(const char *name);
/* Writes a whole file; ends the case if it cannot. */
void t_write_file(const char *path, const void *data, size_t bytes);
/* Reads a whole file; the caller frees. Ends the case if it cannot. */
void *t_read_file(const char *path, size_t *bytes);

/*
 * Runs fn(argument) in a process of its own, which dies with this one, and ends it there: with 0,
 * or 1 when a check failed. Only from the case's thread, before it has started others. Ends the
 * case if there is no process; the caller waits for it.
 */
pid_t t_fork(void (*fn)(void *argument), void *argument);

/* What the macros above call. */
typedef struct t_case {
    const char *name;
    void (*run)(void);
    struct t_case *next;
} t_case;

void t_register(t_case *registered);
bool t_check(bool holds, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
bool t_eq_int(int64_t a, int64_t b, const char *file, int line, const char *a_text,
              const char *b_text);
bool t_eq_hex(uint64_t a, uint64_t b, const char *file, int line, const char *a_text,
              const char *b_text);
bool t_eq_f64(double a, double b, const char *file, int line, const char *a_text,
              const char *b_text);
bool t_near(double a, double b, double tolerance, const char *file, int line, const char *a_text,
            const char *b_text);
bool t_eq_str(const char *a, const char *b, const char *file, int line, const char *a_text,
              const char *b_text);
bool t_eq_mem(const void *a, const void *b, size_t bytes, const char *file, int line,
              const char *a_text, const char *b_text);
bool t_contains(const char *text, const char *part, const char *file, int line,
                const char *expression);
bool t_status(megamoe_status status, megamoe_status expected, const char *(*name)(megamoe_status),
              const char *(*message)(void), const char *file, int line, const char *call);
_Noreturn void t_leave(void);
_Noreturn void t_skip(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
