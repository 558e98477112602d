/* SPDX-License-Identifier: Apache-2.0 */
#define MM_ROWS(name) mm_##name##_avx2
#include "cpu/rows_tmpl.h"
