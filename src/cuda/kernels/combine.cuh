/* SPDX-License-Identifier: Apache-2.0 */
/* The weighted top-k sum: every token's rows in slot order, as they come back. */
#ifndef MM_CUDA_KERNELS_COMBINE_CUH
#define MM_CUDA_KERNELS_COMBINE_CUH

#include "cuda/kernels/shared.cuh"

enum {
    SEGMENT = 256,                         /* channels that a warp sums at once */
    SEGMENTS_AT_ONCE = TEAMS == 1 ? 2 : 1, /* in flight; eight warps need more than sixteen */
    SLOTS_AT_ONCE = 8
};

/* Adds eight BF16. */
MM_DEVICE void mm_add_piece(float (&sum)[8], uint4 piece) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int32_t i = 0; i < 4; i++) {
        sum[2 * i] += __uint_as_float(words[i] << 16);
        sum[2 * i + 1] += __uint_as_float(words[i] & 0xFFFF0000u);
    }
}

MM_DEVICE void mm_store_piece(const mm_block *b, int64_t token, int32_t channel,
                              const float (&sum)[8], bool wide) {
    uint32_t words[4];
#pragma unroll
    for (int32_t i = 0; i < 4; i++)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
            : "=r"(words[i])
            : "f"(sum[2 * i + 1]), "f"(sum[2 * i]));
    uint16_t *to = b->rank->y + token * b->rank->y_stride + channel;
    if (wide && channel + 8 <= b->args->hidden) {
        *(uint4 *)to = make_uint4(words[0], words[1], words[2], words[3]);
        return;
    }
#pragma unroll
    for (int32_t i = 0; i < 8; i++)
        if (channel + i < b->args->hidden)
            to[i] = (uint16_t)(words[i / 2] >> 16 * (i % 2));
}

/* Until all routes of the token (slots in `mask`) are back; false once this rank has given up. */
MM_DEVICE bool mm_await_routes(const mm_block *b, int64_t token, uint32_t mask) {
    const int32_t lane = threadIdx.x % 32;
    const uint8_t *window = b->rank->windows[b->rank->rank];
    const uint32_t *returned =
        (const uint32_t *)(window + b->args->window.returned) + token * b->args->topk;
    bool going = true;
    if (mask >> lane & 1) {
        uint32_t polls = 0;
        uint64_t start = 0;
        while (going && mm_load_acquire_sys(returned + lane) != b->epoch)
            going = mm_keep_waiting(b, &polls, &start, MEGAMOE_PHASE_COMBINE, -1);
    }
    __syncwarp(); /* what one lane has acquired, all have */
    return __all_sync(~0u, going);
}

/* This math warp's share of the rank's tokens, as soon as their rows are back. */
MM_DEVICE void mm_combine(const mm_block *b) {
    const mm_cuda_forward_args *args = b->args;
    if (*(volatile int32_t *)&b->words->stop)
        return;
    const int32_t lane = threadIdx.x % 32;
    const int32_t worker = b->block * MATH_WARPS + (int32_t)(threadIdx.x / 32);
    const int32_t workers = args->blocks * MATH_WARPS;
    const int32_t segments = (args->hidden + SEGMENT - 1) / SEGMENT;
    /* Few tokens are spread over many warps; of many, a warp takes whole ones. */
    const int32_t span = (int64_t)b->tokens * segments <= 4 * workers ? 1
                         : b->tokens >= 4 * workers                   ? segments
                                                                      : 4;
    const int32_t parts = (segments + span - 1) / span;
    const uint16_t *results =
        (const uint16_t *)(b->rank->windows[b->rank->rank] + args->window.results);
    const bool wide = ((uint64_t)b->rank->y | (uint64_t)b->rank->y_stride * 2) % 16 == 0;
    for (int64_t unit = worker; unit < (int64_t)b->tokens * parts; unit += workers) {
        const int64_t token = unit / parts;
        const int32_t first = (int32_t)(unit % parts) * span;
        const int32_t last = first + span < segments ? first + span : segments;
        const int32_t id = lane < args->topk ? b->rank->staged.ids[token * args->topk + lane] : -1;
        const uint32_t mask = __ballot_sync(~0u, id >= 0);
        if (!mm_await_routes(b, token, mask))
            return;
        for (int32_t segment = first; segment < last; segment += SEGMENTS_AT_ONCE) {
            const int32_t channel = segment * SEGMENT + lane * 8;
            const uint16_t *rows = results + token * args->topk * args->results_stride + channel;
            float sum[SEGMENTS_AT_ONCE][8] = {};
            for (int32_t slot0 = 0; slot0 < args->topk; slot0 += SLOTS_AT_ONCE) {
                uint4 pieces[SEGMENTS_AT_ONCE][SLOTS_AT_ONCE];
#pragma unroll
                for (int32_t n = 0; n < SEGMENTS_AT_ONCE; n++)
#pragma unroll
                    for (int32_t i = 0; i < SLOTS_AT_ONCE; i++)
                        if (mask >> (slot0 + i) & 1 && segment + n < last)
                            pieces[n][i] = mm_load_16_l2(rows + n * SEGMENT +
                                                         (slot0 + i) * args->results_stride);
#pragma unroll
                for (int32_t n = 0; n < SEGMENTS_AT_ONCE; n++)
#pragma unroll
                    for (int32_t i = 0; i < SLOTS_AT_ONCE; i++)
                        if (mask >> (slot0 + i) & 1 && segment + n < last)
                            mm_add_piece(sum[n], pieces[n][i]);
            }
#pragma unroll
            for (int32_t n = 0; n < SEGMENTS_AT_ONCE; n++)
                if (segment + n < last && channel + n * SEGMENT < args->hidden)
                    mm_store_piece(b, token, channel + n * SEGMENT, sum[n], wide);
        }
    }
}

#endif
