/* SPDX-License-Identifier: Apache-2.0 */
/* The clock of everything that the tool times on the host. */
#ifndef MONOTONIC_H
#define MONOTONIC_H

/* Milliseconds of the monotonic clock; only differences mean something. */
double monotonic_ms(void);

#endif
