/* SPDX-License-Identifier: Apache-2.0 */
#include <megamoe/version.h>

#include "base/mm_commit.h"

const char *megamoe_build_commit(void) {
    return MM_COMMIT;
}
