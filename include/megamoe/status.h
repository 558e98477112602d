/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Status codes and error text.
 *
 * Every function that can fail returns a megamoe_status: MEGAMOE_OK (0) or a negative code. The
 * text of a failure names the file, tensor and value; megamoe_last_error() gives it to the thread
 * that made the failing call. The library never exits, aborts or prints.
 */
#ifndef MEGAMOE_STATUS_H
#define MEGAMOE_STATUS_H

#if defined(__GNUC__)
#define MEGAMOE_API __attribute__((visibility("default")))
#define MEGAMOE_CHECKED __attribute__((warn_unused_result))
#else
#define MEGAMOE_API
#define MEGAMOE_CHECKED
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, value, sentence) */
#define MEGAMOE_STATUS_LIST(X)                                                                     \
    X(MEGAMOE_OK, 0, "success")                                                                    \
    X(MEGAMOE_EINVAL, -1, "invalid argument")                                                      \
    X(MEGAMOE_ENOMEM, -2, "out of memory")                                                         \
    X(MEGAMOE_EIO, -3, "a file could not be read or written")                                      \
    X(MEGAMOE_EFORMAT, -4, "a file is malformed or contradicts itself")                            \
    X(MEGAMOE_ENOTFOUND, -5, "not found")                                                          \
    X(MEGAMOE_EUNSUPPORTED, -6, "not supported")                                                   \
    X(MEGAMOE_EINEXACT, -7, "a weight cannot be represented exactly")                              \
    X(MEGAMOE_ECAPACITY, -8, "capacity exceeded")                                                  \
    X(MEGAMOE_EID, -9, "an expert id or input scale is out of range")                              \
    X(MEGAMOE_ESTATE, -10, "calls out of order")                                                   \
    X(MEGAMOE_ETIMEDOUT, -11, "a deadline passed")                                                 \
    X(MEGAMOE_EPEER, -12, "another rank failed")                                                   \
    X(MEGAMOE_EDEVICE, -13, "the device failed")                                                   \
    X(MEGAMOE_ECHECK, -14, "a hash or a comparison does not hold")

typedef enum megamoe_status {
#define X(name, value, sentence) name = value,
    MEGAMOE_STATUS_LIST(X)
#undef X
} megamoe_status;

/* The name of a code, such as "MEGAMOE_EINVAL", and its sentence. Static storage; never NULL. */
MEGAMOE_API const char *megamoe_status_name(megamoe_status status);
MEGAMOE_API const char *megamoe_status_text(megamoe_status status);

/*
 * The message of the last call that failed on this thread; "" if none did.
 * Owns: the library; valid until this thread's next failing call. Thread: any.
 */
MEGAMOE_API const char *megamoe_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
