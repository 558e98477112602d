/* SPDX-License-Identifier: Apache-2.0 */
/* The gated activation of docs/numerics.md, item 4. */
#ifndef MM_NUM_GATED_H
#define MM_NUM_GATED_H

#include "num/exp.h"

/* NaN passes through every comparison. limit is INFINITY where there is none. */
MM_NUM_INLINE float mm_gated(float g, float u, float alpha, float offset, float limit) {
    g = g > limit ? limit : g;
    u = u > limit ? limit : u;
    u = u < -limit ? -limit : u;
    return g * (1.0f / (1.0f + mm_expf(-alpha * g))) * (u + offset);
}

#endif
