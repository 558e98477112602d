/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MEGAMOE_VERSION_H
#define MEGAMOE_VERSION_H

#include "status.h"

#define MEGAMOE_VERSION_MAJOR 0
#define MEGAMOE_VERSION_MINOR 1
#define MEGAMOE_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the library that is running, "major.minor.patch". */
MEGAMOE_API const char *megamoe_version(void);

/*
 * The commit that it was built from, with "+" behind it where files had been changed since; ""
 * where it was not built in a checkout of git.
 */
MEGAMOE_API const char *megamoe_build_commit(void);

#ifdef __cplusplus
}
#endif
#endif
