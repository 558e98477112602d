/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MM_BASE_LOG_H
#define MM_BASE_LOG_H

#include "megamoe/log.h"

void mm_log(megamoe_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
