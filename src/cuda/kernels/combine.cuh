/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The weighted top-k sum: every token's rows in slot order, as they come back.
 *
 * A unit is a part of a token that one warp sums. Few units are dealt out to the math warps of all
 * blocks. Of many tokens each block sums its own, and units are claimed: by the dispatch warps,
 * whose routes are sent by then, as tokens become complete while math multiplies; what is left when
 * its tiles end, math takes.
 */
#ifndef MM_CUDA_KERNELS_COMBINE_CUH
#define MM_CUDA_KERNELS_COMBINE_CUH

#include "cuda/kernels/shared.cuh"

/* "At once": in flight, in registers. */
enum {
    SEGMENT = 256,                         /* channels that a warp sums at once */
    SEGMENTS_AT_ONCE = TEAMS == 1 ? 2 : 1, /* eight warps need more than sixteen */
    SLOTS_AT_ONCE = 8,
    BESIDE_SEGMENTS_AT_ONCE = 2, /* for the dispatch warps, with fewer registers */
    BESIDE_SLOTS_AT_ONCE = 4,
    BESIDE_WARPS = 2,
    SWEEP_NS = 5000 /* between looks at tokens of which none was complete */
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
                              const float (&sum)[8]) {
    const int32_t hidden = b->args->hidden;
    uint32_t words[4];
#pragma unroll
    for (int32_t i = 0; i < 4; i++)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
            : "=r"(words[i])
            : "f"(sum[2 * i + 1]), "f"(sum[2 * i]));
    uint16_t *y = b->rank->y;
    const int64_t y_stride = b->rank->y_stride;
    uint16_t *to = y + token * y_stride + channel;
    const bool wide = ((uint64_t)y | (uint64_t)y_stride * 2) % 16 == 0;
    if (wide && channel + 8 <= hidden) {
        *(uint4 *)to = make_uint4(words[0], words[1], words[2], words[3]);
        return;
    }
#pragma unroll
    for (int32_t i = 0; i < 8; i++)
        if (channel + i < hidden)
            to[i] = (uint16_t)(words[i / 2] >> 16 * (i % 2));
}

/* How this rank's sums are divided; nothing is claimed yet. */
MM_DEVICE void mm_divide_sums(const mm_block *b) {
    if (threadIdx.x < CLAIMABLE / 32)
        ((uint32_t *)(b->smem + SUMMED))[threadIdx.x] = 0;
    if (threadIdx.x != THREADS - 1)
        return;
    const int32_t blocks = b->args->blocks, workers = blocks * MATH_WARPS;
    const int32_t segments = (b->args->hidden + SEGMENT - 1) / SEGMENT;
    /* Few tokens are spread over many warps; of many, a warp takes whole ones. */
    const int32_t span = (int64_t)b->tokens * segments <= 4 * workers ? 1
                         : b->tokens >= 4 * workers                   ? segments
                                                                      : 4;
    const int32_t parts = (segments + span - 1) / span;
    const bool many = TEAMS == 1 && b->tokens >= workers;
    mm_words *words = b->words;
    words->span = span;
    words->parts = parts;
    words->own_units = many ? (b->tokens - b->block + blocks - 1) / blocks * parts : 0;
    words->next_unit = 0;
    words->combining = 0;
}

/* The i-th of this block's own tokens. */
MM_DEVICE int32_t mm_own_token(const mm_block *b, int32_t i) {
    return b->block + i * b->args->blocks;
}

/* Whether one of this block's units was still to be had, and is the caller's now. By one thread.
 * Units for which there is no bit only mm_next_unit hands out. */
MM_DEVICE bool mm_claim_unit(const mm_block *b, int32_t unit) {
    const uint32_t bit = 1u << unit % 32;
    return unit >= CLAIMABLE || !(atomicOr((uint32_t *)(b->smem + SUMMED) + unit / 32, bit) & bit);
}

/* The next of this block's units that nobody has claimed; own_units or more: none. By a warp. */
MM_DEVICE int32_t mm_next_unit(const mm_block *b) {
    int32_t unit = 0;
    if (threadIdx.x % 32 == 0)
        do
            unit = atomicAdd(&b->words->next_unit, 1);
        while (unit < b->words->own_units && !mm_claim_unit(b, unit));
    return __shfl_sync(~0u, unit, 0);
}

/* The words that say which of a token's routes are back: [topk]. */
MM_DEVICE const uint32_t *mm_returned(const mm_block *b, int64_t token) {
    const uint8_t *window = b->rank->windows[b->rank->rank];
    return (const uint32_t *)(window + b->args->window.returned) + token * b->args->topk;
}

/* Until all routes of the token (slots in `mask`) are back; false once this rank has given up. */
MM_DEVICE bool mm_await_routes(const mm_block *b, int64_t token, uint32_t mask) {
    const int32_t lane = threadIdx.x % 32;
    const uint32_t *returned = mm_returned(b, token);
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

/* One unit, as soon as its rows are back; false once this rank has given up. By a warp. */
template <int32_t SEGMENTS, int32_t SLOTS>
MM_DEVICE bool mm_sum(const mm_block *b, int32_t token, int32_t part) {
    const mm_cuda_forward_args *args = b->args;
    const int32_t lane = threadIdx.x % 32, topk = args->topk;
    const int64_t route = (int64_t)token * topk;
    const int32_t id = lane < topk ? b->rank->staged.ids[route + lane] : -1;
    const uint32_t mask = __ballot_sync(~0u, id >= 0);
    if (!mm_await_routes(b, token, mask))
        return false;
    const int32_t span = b->words->span;
    int32_t segment = part * span;
    const int32_t left = (args->hidden + SEGMENT - 1) / SEGMENT - segment;
    const int32_t last = segment + (span < left ? span : left);
    const uint32_t stride = (uint32_t)args->results_stride;
    const uint16_t *from =
        (const uint16_t *)(b->rank->windows[b->rank->rank] + args->window.results) +
        route * stride + segment * SEGMENT + lane * 8;
    for (; segment < last; segment += SEGMENTS, from += SEGMENTS * SEGMENT) {
        float sum[SEGMENTS][8] = {};
        const uint16_t *row = from;
        for (uint32_t slots = mask; slots; slots >>= SLOTS) {
            uint4 pieces[SLOTS][SEGMENTS];
#pragma unroll
            for (int32_t i = 0; i < SLOTS; i++, row += stride)
#pragma unroll
                for (int32_t n = 0; n < SEGMENTS; n++)
                    if (slots >> i & 1 && segment + n < last)
                        pieces[i][n] = mm_load_16_l2(row + n * SEGMENT);
#pragma unroll
            for (int32_t i = 0; i < SLOTS; i++)
#pragma unroll
                for (int32_t n = 0; n < SEGMENTS; n++)
                    if (slots >> i & 1 && segment + n < last)
                        mm_add_piece(sum[n], pieces[i][n]);
        }
#pragma unroll
        for (int32_t n = 0; n < SEGMENTS; n++)
            if (segment + n < last)
                mm_store_piece(b, token, (segment + n) * SEGMENT + lane * 8, sum[n]);
    }
    return true;
}

/* By a math warp whose tiles have ended. */
MM_DEVICE void mm_combine(const mm_block *b) {
    mm_words *words = b->words;
    *(volatile int32_t *)&words->combining = 1;
    if (*(volatile int32_t *)&words->stop)
        return;
    const int32_t parts = words->parts, own = words->own_units;
    int64_t dealt = b->block * MATH_WARPS + (int32_t)(threadIdx.x / 32);
    for (;;) {
        int32_t token, part;
        if (own) {
            const int32_t unit = mm_next_unit(b);
            if (unit >= own)
                return;
            token = mm_own_token(b, unit / parts);
            part = unit % parts;
        } else {
            if (dealt >= (int64_t)b->tokens * parts)
                return;
            token = (int32_t)(dealt / parts);
            part = (int32_t)(dealt % parts);
            dealt += b->args->blocks * MATH_WARPS;
        }
        if (!mm_sum<SEGMENTS_AT_ONCE, SLOTS_AT_ONCE>(b, token, part))
            return;
    }
}

/* Whether all of a token's routes are back. No more than a hint: nothing is acquired. */
MM_DEVICE bool mm_seems_complete(const mm_block *b, int32_t token) {
    const int32_t topk = b->args->topk;
    const int32_t *ids = b->rank->staged.ids + (int64_t)token * topk;
    const uint32_t *returned = mm_returned(b, token);
    const uint32_t epoch = b->epoch;
    for (int32_t slot = 0; slot < topk; slot++)
        if (__ldg(ids + slot) >= 0 && mm_load_relaxed_sys(returned + slot) != epoch)
            return false;
    return true;
}

/* Whether a dispatch warp is to sum no more. The same in all lanes. */
MM_DEVICE bool mm_beside_ends(const mm_block *b) {
    const volatile mm_words *words = b->words;
    return __any_sync(~0u, words->stop | words->combining);
}

/* All parts of one of this block's complete tokens; false: to sum no more. */
MM_DEVICE bool mm_sum_beside(const mm_block *b, int32_t own) {
    for (int32_t part = 0; part < b->words->parts; part++) {
        if (mm_beside_ends(b))
            return false;
        const bool claimed =
            threadIdx.x % 32 == 0 && mm_claim_unit(b, own * b->words->parts + part);
        if (__any_sync(~0u, claimed) &&
            !mm_sum<BESIDE_SEGMENTS_AT_ONCE, BESIDE_SLOTS_AT_ONCE>(b, mm_own_token(b, own), part))
            return false;
    }
    return true;
}

/* The block's tokens beginning with `own`, of which each lane has one that no other takes before
 * math comes: the complete ones that are not summed. *left: others are not complete. */
MM_DEVICE uint32_t mm_sweep(const mm_block *b, int32_t own, bool *left) {
    const mm_words *words = b->words;
    const int32_t i = own + BESIDE_WARPS * (int32_t)(threadIdx.x % 32);
    const int32_t end = (i + 1) * words->parts; /* the last part is claimed last */
    const volatile uint32_t *summed = (const volatile uint32_t *)(b->smem + SUMMED);
    const bool open = end <= words->own_units && end <= CLAIMABLE &&
                      !(summed[(end - 1) / 32] >> (end - 1) % 32 & 1);
    const bool complete = open && mm_seems_complete(b, mm_own_token(b, i));
    *left |= __any_sync(~0u, open && !complete);
    return __ballot_sync(~0u, complete);
}

/*
 * By a dispatch warp that has sent its routes: sums this block's tokens as they become complete. It
 * never waits for one, and leaves when math has come to sum what is left.
 */
MM_DEVICE void mm_combine_beside(const mm_block *b) {
    const int32_t warp = (int32_t)(threadIdx.x / 32) - (WARPS - BESIDE_WARPS);
    bool left, found;
    do {
        left = found = false;
        for (int32_t own = warp; own * b->words->parts < b->words->own_units;
             own += BESIDE_WARPS * 32)
            for (uint32_t set = mm_sweep(b, own, &left); set; set &= set - 1) {
                found = true;
                if (!mm_sum_beside(b, own + BESIDE_WARPS * (__ffs(set) - 1)))
                    return;
            }
        if (left && !found)
            __nanosleep(SWEEP_NS);
    } while (left && !mm_beside_ends(b));
}

#endif
