/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The weighted top-k sum: every token's rows in slot order, as they come back.
 *
 * Few tokens are dealt out in parts to the math warps of all blocks. Of many, each block has its
 * own, whole: its dispatch warps, whose routes are sent by then, take them as they become complete
 * while math multiplies, and math takes those that are left when its tiles end.
 */
#ifndef MM_CUDA_KERNELS_COMBINE_CUH
#define MM_CUDA_KERNELS_COMBINE_CUH

#include "cuda/kernels/shared.cuh"

/* "At once": in flight, in registers. */
enum {
    SEGMENT = 256,                              /* channels that a warp sums at once */
    SEGMENTS_AT_ONCE = MATH_WARPS == 8 ? 2 : 1, /* eight warps need more than sixteen */
    SLOTS_AT_ONCE = 8,
    BESIDE_SEGMENTS_AT_ONCE = 2, /* for the dispatch warps, with fewer registers */
    BESIDE_SLOTS_AT_ONCE = 5,
    BESIDE_WARPS = 2, /* the last ones */
    SWEEP_NS = 5000   /* between looks at tokens of which none was complete */
};

/* threadIdx.x % 32, read anew: what follows from it is not to stay in registers. */
MM_DEVICE int32_t mm_lane(void) {
    int32_t lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

/* Adds eight BF16. */
MM_DEVICE void mm_add_piece(float (&sum)[8], uint4 piece) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int32_t i = 0; i < 4; i++) {
        sum[2 * i] += __uint_as_float(words[i] << 16);
        sum[2 * i + 1] += __uint_as_float(words[i] & 0xFFFF0000u);
    }
}

MM_DEVICE void mm_store_piece(const mm_block *b, uint32_t token, int32_t channel,
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
    /* No warp has two parts, for what comes before a part's rows takes longer than they do. A part
     * is a whole token where there are as many tokens as warps. */
    const int32_t most = b->tokens && b->tokens < workers ? workers / b->tokens : 1;
    const int32_t span = (segments + most - 1) / most;
    mm_words *words = b->words;
    words->span = span;
    words->parts = (segments + span - 1) / span;
    words->own =
        TEAMS == 1 && b->tokens >= workers ? (b->tokens - b->block + blocks - 1) / blocks : 0;
    words->next_own = 0;
    words->combining = 0;
}

/* The i-th of this block's own tokens. */
MM_DEVICE int32_t mm_own_token(const mm_block *b, int32_t i) {
    return b->block + i * b->args->blocks;
}

/* Whether one of this block's tokens was still to be had, and is the caller's now. By one thread.
 * Only mm_next_own hands out those for which there is no bit. */
MM_DEVICE bool mm_claim_own(const mm_block *b, int32_t i) {
    const uint32_t bit = 1u << i % 32;
    return i >= CLAIMABLE || !(atomicOr((uint32_t *)(b->smem + SUMMED) + i / 32, bit) & bit);
}

/* The next of this block's tokens that nobody has claimed; `own` or more: none. By a warp. */
MM_DEVICE int32_t mm_next_own(const mm_block *b, int32_t own) {
    int32_t i = 0;
    if (mm_lane() == 0)
        do
            i = atomicAdd(&b->words->next_own, 1);
        while (i < own && !mm_claim_own(b, i));
    return __shfl_sync(~0u, i, 0);
}

/* The words that say which of a token's routes are back: [topk]. `window`: this rank's. */
MM_DEVICE const uint32_t *mm_returned(const mm_block *b, const uint8_t *window, int64_t token) {
    return (const uint32_t *)(window + b->args->window.returned) + token * b->args->topk;
}

/* Until all routes of the token (slots in `mask`) are back; false once this rank has given up. */
MM_DEVICE bool mm_await_routes(const mm_block *b, const uint8_t *window, int64_t token,
                               uint32_t mask) {
    const int32_t lane = mm_lane();
    const uint32_t *returned = mm_returned(b, window, token);
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

/* A pointer that the optimizer knows nothing of: it computes no others ahead, for which registers
 * are missing. */
MM_DEVICE const uint8_t *mm_kept_place(const uint8_t *place) {
    asm volatile("" : "+l"(place));
    return place;
}

/* One part, as soon as its rows are back; false once this rank has given up. By a warp. */
template <int32_t SEGMENTS, int32_t SLOTS>
MM_DEVICE bool mm_sum(const mm_block *b, const uint8_t *window, int32_t token, int32_t part) {
    const mm_cuda_forward_args *args = b->args;
    const int32_t lane = mm_lane(), topk = args->topk;
    const int64_t route = (int64_t)token * topk;
    const int32_t id = lane < topk ? b->rank->staged.ids[route + lane] : -1;
    const uint32_t mask = __ballot_sync(~0u, id >= 0);
    if (!mm_await_routes(b, window, token, mask))
        return false;
    const int32_t span = b->words->span;
    int32_t channel = part * span * SEGMENT;
    int32_t left = (args->hidden - channel + SEGMENT - 1) / SEGMENT; /* segments */
    left = left < span ? left : span;
    channel += mm_lane() * 8;
    const uint32_t stride = (uint32_t)args->results_stride * 2;
    const uint8_t *from = window + args->window.results + route * stride + channel * 2;
    for (; left > 0; left -= SEGMENTS) {
        float sum[SEGMENTS][8] = {};
        const uint8_t *row = from;
        for (uint32_t slots = mask; slots; slots >>= SLOTS) {
            uint4 pieces[SLOTS][SEGMENTS];
#pragma unroll
            for (int32_t i = 0; i < SLOTS; i++) {
#pragma unroll
                for (int32_t n = 0; n < SEGMENTS; n++)
                    if (slots >> i & 1 && (n == 0 || n < left))
                        pieces[i][n] = mm_load_16_l2(row + n * SEGMENT * 2);
                row = mm_kept_place(row + stride);
            }
#pragma unroll
            for (int32_t i = 0; i < SLOTS; i++)
#pragma unroll
                for (int32_t n = 0; n < SEGMENTS; n++)
                    if (slots >> i & 1 && (n == 0 || n < left))
                        mm_add_piece(sum[n], pieces[i][n]);
        }
#pragma unroll
        for (int32_t n = 0; n < SEGMENTS; n++)
            if (n == 0 || n < left)
                mm_store_piece(b, token, channel + n * SEGMENT, sum[n]);
        from += SEGMENTS * SEGMENT * 2;
        channel += SEGMENTS * SEGMENT;
    }
    return true;
}

/*
 * By a math warp whose tiles have ended. `b` names the kernel's own arguments, so that they are in
 * constant memory, and the window is looked up at once: what is read when the rows are back comes
 * from L2, since to acquire them has emptied L1.
 */
MM_DEVICE void mm_combine(const mm_block *b) {
    const uint8_t *window = b->rank->windows[b->rank->rank];
    mm_words *words = b->words;
    *(volatile int32_t *)&words->combining = 1;
    if (*(volatile int32_t *)&words->stop)
        return;
    const int32_t parts = words->parts, own = words->own;
    int64_t dealt = b->block * MATH_WARPS + (int32_t)(threadIdx.x / 32);
    for (;;) {
        int32_t token, part = 0;
        if (own) {
            const int32_t i = mm_next_own(b, own);
            if (i >= own)
                return;
            token = mm_own_token(b, i);
        } else {
            if (dealt >= (int64_t)b->tokens * parts)
                return;
            token = (int32_t)(dealt / parts);
            part = (int32_t)(dealt % parts);
            dealt += b->args->blocks * MATH_WARPS;
        }
        if (!mm_sum<SEGMENTS_AT_ONCE, SLOTS_AT_ONCE>(b, window, token, part))
            return;
    }
}

/* Whether all of a token's routes are back. No more than a hint: nothing is acquired. */
MM_DEVICE bool mm_seems_complete(const mm_block *b, const uint8_t *window, int32_t token) {
    const int32_t topk = b->args->topk;
    const int32_t *ids = b->rank->staged.ids + (int64_t)token * topk;
    const uint32_t *returned = mm_returned(b, window, token);
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

/* Of the block's tokens i, i + 2, ..., one for each lane: those that are complete and not claimed.
 * Rests where there are none yet; *left: some are not complete. */
MM_DEVICE uint32_t mm_sweep(const mm_block *b, const uint8_t *window, int32_t i, bool *left) {
    i += BESIDE_WARPS * mm_lane();
    const volatile uint32_t *summed = (const volatile uint32_t *)(b->smem + SUMMED);
    const bool open = i < b->words->own && i < CLAIMABLE && !(summed[i / 32] >> i % 32 & 1);
    const bool complete = open && mm_seems_complete(b, window, mm_own_token(b, i));
    const uint32_t set = __ballot_sync(~0u, complete);
    if (__any_sync(~0u, open && !complete)) {
        *left = true;
        if (!set)
            __nanosleep(SWEEP_NS);
    }
    return set;
}

/*
 * By a dispatch warp that has sent its routes: sums this block's tokens as they become complete. It
 * never waits for one, and leaves when math has come to sum those that are left.
 */
MM_DEVICE void mm_combine_beside(const mm_block *b) {
    const uint8_t *window = b->rank->windows[b->rank->rank];
    bool left;
    do {
        left = false;
        for (int32_t i0 = (int32_t)(threadIdx.x / 32) % BESIDE_WARPS; i0 < b->words->own;
             i0 += BESIDE_WARPS * 32) {
            for (uint32_t set = mm_sweep(b, window, i0, &left); set; set &= set - 1) {
                const int32_t i = i0 + BESIDE_WARPS * (__ffs(set) - 1);
                if (__any_sync(~0u, mm_lane() == 0 && mm_claim_own(b, i)))
                    mm_sum<BESIDE_SEGMENTS_AT_ONCE, BESIDE_SLOTS_AT_ONCE>(b, window,
                                                                          mm_own_token(b, i), 0);
                if (mm_beside_ends(b))
                    return;
            }
            if (mm_beside_ends(b))
                return;
        }
    } while (left);
}

#endif
