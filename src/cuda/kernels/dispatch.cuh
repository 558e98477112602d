/* SPDX-License-Identifier: Apache-2.0 */
/* Counting, agreeing, and sending tokens to the ranks of their experts. */
#ifndef MM_CUDA_KERNELS_DISPATCH_CUH
#define MM_CUDA_KERNELS_DISPATCH_CUH

#include "cuda/kernels/shared.cuh"

/* The physical expert of a route. */
MM_DEVICE int32_t mm_physical_of(const mm_block *b, int32_t id, int32_t route) {
    const mm_cuda_rank *rank = b->rank;
    if (!rank->replica_start)
        return id;
    const int32_t start = rank->replica_start[id];
    const int32_t count = rank->replica_start[id + 1] - start;
    const uint32_t token = (uint32_t)route / (uint32_t)b->args->topk;
    const uint32_t turn = ((uint32_t)rank->rank + token) % (uint32_t)count;
    return rank->replicas[start + (int32_t)turn];
}

enum {
    PIECES_AT_ONCE = 4,         /* of 16 bytes, that a lane has in registers */
    PART = 32 * PIECES_AT_ONCE, /* pieces of a row that a warp sends at once */
    /* Of a math warp, if it is to hold all of them: for batches of up to 256 tokens of 4096
     * channels in tiles of up to 64, and 512 in those of 80 to 112. More takes the former 2 us. */
    PARTS_HELD = MATH_WARPS == 16           ? 2
                 : MM_N > 64 && MM_N <= 112 ? 6
                                            : 3
};

/* Parts of a token's row. */
MM_DEVICE uint32_t mm_parts(const mm_block *b) {
    return ((uint32_t)b->args->hidden_chunks * 8 + PART - 1) / PART;
}

/* A block's share of the rank's routes: [low, low + routes). */
typedef struct mm_share {
    int32_t low, routes;
    bool few; /* math warps hold its rows from the beginning on */
} mm_share;

MM_DEVICE mm_share mm_share_of(const mm_block *b) {
    const int32_t routes = b->tokens * b->args->topk, blocks = b->args->blocks;
    mm_share share;
    share.low = mm_share_first(routes, b->block, blocks);
    share.routes = mm_share_first(routes, b->block + 1, blocks) - share.low;
    share.few = (int64_t)share.routes * mm_parts(b) <= PARTS_HELD * MATH_WARPS;
    return share;
}

/* What a thread of the math warps holds of this block's routes where they are few. */
typedef struct mm_held {
    uint4 piece[PARTS_HELD][PIECES_AT_ONCE];
    uint32_t scale[PARTS_HELD]; /* of a chunk of the part: SCALE_BLOCK's byte or a float */
    /* Of the route of this thread's number. */
    int32_t id;
    float weight, token_scale;
    uint8_t tiny;
} mm_held;

/*
 * Reads the rows of few routes before it is known where they go: memory's latency passes while
 * routes are counted. A math warp has every MATH_WARPS-th part.
 */
MM_DEVICE void mm_hold(const mm_block *b, mm_held *held) {
    const mm_cuda_forward_args *args = b->args;
    const mm_cuda_staged *staged = &b->rank->staged;
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const mm_share share = mm_share_of(b);
    if (!share.few || warp >= MATH_WARPS)
        return;
    const uint32_t parts = mm_parts(b);
    const int32_t pieces = args->hidden_chunks * 8;
    if ((int32_t)threadIdx.x < share.routes) {
        const int32_t route = share.low + (int32_t)threadIdx.x;
        held->id = staged->ids[route];
        held->weight = staged->weights[route];
        if (args->input_scale == MEGAMOE_SCALE_TOKEN) {
            held->token_scale = staged->scales[route / args->topk];
            held->tiny = staged->tiny[route / args->topk];
        }
    }
#pragma unroll
    for (int32_t k = 0; k < PARTS_HELD; k++) {
        const uint32_t item = (uint32_t)(warp + k * MATH_WARPS);
        if (item >= (uint32_t)share.routes * parts)
            break;
        const int64_t token = ((uint32_t)share.low + item / parts) / (uint32_t)args->topk;
        const int32_t v = (int32_t)(item % parts) * PART + lane;
        const uint4 *from = (const uint4 *)staged->codes + token * pieces + v;
#pragma unroll
        for (int32_t u = 0; u < PIECES_AT_ONCE; u++)
            if (v + 32 * u < pieces)
                held->piece[k][u] = from[32 * u];
        const int32_t chunk = (int32_t)(item % parts) * (PART / 8) + lane;
        if (lane >= PART / 8 || chunk >= args->hidden_chunks)
            continue;
        const int64_t place = token * args->hidden_chunks + chunk;
        if (args->input_scale == MEGAMOE_SCALE_BLOCK)
            held->scale[k] = staged->blocks[place];
        else if (args->input_scale == MEGAMOE_SCALE_BLOCK_F32)
            held->scale[k] = __float_as_uint(staged->block_scales[place]);
    }
}

/* The counters of the next epoch: nobody has used them since the last one. */
MM_DEVICE void mm_clear_counters(const mm_block *b) {
    const uint32_t parity = b->parity ^ 1;
    const int64_t thread = (int64_t)b->block * THREADS + threadIdx.x;
    const int64_t threads = (int64_t)b->args->blocks * THREADS;
#pragma unroll 1
    for (int64_t i = thread; i < b->args->physical; i += threads)
        b->rank->dispatched[parity * b->args->physical + i] = 0;
#pragma unroll 1
    for (int64_t i = thread; i < b->args->units; i += threads) {
        b->rank->fc1_done[parity * b->args->units + i] = 0;
        b->rank->fc2_done[parity * b->args->units + i] = 0;
    }
    if (thread == 0)
        b->rank->state->claims[parity] = 0;
}

/*
 * Every chunk of a row may lie in another page. What this warp reads here tells the multiprocessor
 * where they are before rows are stored.
 */
MM_DEVICE void mm_touch_pool(const mm_block *b) {
    const uint8_t *window = b->rank->windows[b->rank->rank];
    for (int32_t c = threadIdx.x % 32; c < b->args->hidden_chunks; c += 32)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(window + b->args->window.codes +
                                                      c * b->args->rows * 128));
}

enum { IDS_AT_ONCE = 2 /* vectors of four, that a thread has asked for while it counts others */ };

/* Ids from route `at` on, at intervals of all threads; -1 beyond the last route. */
MM_DEVICE void mm_read_ids(const mm_block *b, int32_t routes, int32_t at, int4 *ids) {
#pragma unroll
    for (int32_t j = 0; j < IDS_AT_ONCE; j++) {
        const int32_t i = at + 4 * THREADS * j;
        ids[j] = make_int4(-1, -1, -1, -1);
        if (i < routes) /* the buffer has room behind the last */
            ids[j] = __ldg((const int4 *)(b->rank->staged.ids + i));
    }
}

/*
 * Every block counts all routes of its rank, so that none waits for another: those before its share
 * (`cursor`), in its share (`own`), and all (`mine`, and `total` as long as there is one rank).
 * `ids`: this thread's first ones.
 */
MM_DEVICE void mm_count(const mm_block *b, int4 *ids) {
    const int32_t physical = b->args->physical;
    const int32_t routes = b->tokens * b->args->topk;
#pragma unroll 1
    for (int32_t p = threadIdx.x; p < physical; p += THREADS) {
        b->mine[p] = 0;
        b->cursor[p] = 0;
        b->own[p] = 0;
    }
    __syncthreads();
    const mm_share share = mm_share_of(b);
    const int32_t end = share.low + share.routes;
    const int32_t step = 4 * THREADS * IDS_AT_ONCE;
#pragma unroll 1
    for (int32_t at = 4 * (int32_t)threadIdx.x; at < routes; at += step) {
        int4 next[IDS_AT_ONCE];
        mm_read_ids(b, routes, at + step, next);
        int32_t experts[4 * IDS_AT_ONCE];
#pragma unroll
        for (int32_t j = 0; j < IDS_AT_ONCE; j++) {
            experts[4 * j] = ids[j].x;
            experts[4 * j + 1] = ids[j].y;
            experts[4 * j + 2] = ids[j].z;
            experts[4 * j + 3] = ids[j].w;
            ids[j] = next[j];
        }
        if (b->rank->replica_start) {
#pragma unroll
            for (int32_t u = 0; u < 4 * IDS_AT_ONCE; u++) {
                const int32_t i = at + 4 * THREADS * (u / 4) + u % 4;
                if (i < routes && experts[u] >= 0)
                    experts[u] = mm_physical_of(b, experts[u], i);
            }
        }
#pragma unroll
        for (int32_t u = 0; u < 4 * IDS_AT_ONCE; u++) {
            const int32_t i = at + 4 * THREADS * (u / 4) + u % 4;
            int32_t *table = i < share.low ? b->cursor : i < end ? b->own : b->mine;
            if (i < routes && experts[u] >= 0)
                atomicAdd(&table[experts[u]], 1);
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int32_t p = threadIdx.x; p < physical; p += THREADS) {
        const int32_t all = b->mine[p] + b->cursor[p] + b->own[p];
        b->mine[p] = all;
        b->total[p] = all;
    }
    __syncthreads();
}

MM_DEVICE mm_cuda_cell *mm_cells(const mm_block *b, uint8_t *window) {
    return (mm_cuda_cell *)(window + b->args->window.cells) + (int64_t)b->parity * b->args->ranks;
}

/* Routes of `source` to every expert, as `window` has them. */
MM_DEVICE int32_t *mm_counts(const mm_block *b, uint8_t *window, int32_t source) {
    return (int32_t *)(window + b->args->window.counts) +
           ((int64_t)b->parity * b->args->ranks + source) * b->args->physical;
}

/* The staged batch's first error, as a token and a slot (-1: a scale); false if there is none. */
MM_DEVICE bool mm_staged_error(const mm_block *b, int32_t *token, int32_t *slot) {
    const uint64_t order = b->rank->state->order;
    const uint64_t per_token = (uint64_t)b->args->topk + 1;
    if (order == UINT64_MAX) {
        *token = *slot = -1;
        return false;
    }
    *token = (int32_t)(order / per_token);
    *slot = (int32_t)(order % per_token);
    if (*slot == b->args->topk)
        *slot = -1;
    return true;
}

/* The layer has been placed anew since this launch was captured: what it names may be gone. */
MM_DEVICE bool mm_stale(const mm_cuda_rank *rank) {
    return rank->layer->form != rank->form;
}

/* What is wrong with this rank's part of the forward, before any rank has computed. */
MM_DEVICE int32_t mm_own_status(const mm_block *b, int32_t *token, int32_t *slot) {
    if (mm_staged_error(b, token, slot))
        return MEGAMOE_EID;
    return mm_stale(b->rank) ? MEGAMOE_ESTATE : MEGAMOE_OK;
}

/* By the first block of a rank. */
MM_DEVICE void mm_publish(const mm_block *b) {
    const int32_t me = b->rank->rank;
    for (int32_t r = 0; r < b->args->ranks; r++) {
        int32_t *counts = mm_counts(b, b->rank->windows[r], me);
        for (int32_t p = threadIdx.x; p < b->args->physical; p += THREADS)
            counts[p] = b->mine[p];
    }
    __syncthreads();
    for (int32_t r = threadIdx.x; r < b->args->ranks; r += THREADS) {
        mm_cuda_cell *cell = mm_cells(b, b->rank->windows[r]) + me;
        int32_t token, slot;
        cell->status = mm_own_status(b, &token, &slot);
        cell->token = token;
        cell->slot = slot;
        cell->value = b->rank->state->value;
        cell->key = b->rank->layer->key;
        mm_fence_acq_rel_sys();
        mm_store_release_sys(&cell->epoch, b->epoch);
    }
}

/* Until every rank has published this epoch: nobody goes on before. */
MM_DEVICE void mm_await_cells(const mm_block *b) {
    for (int32_t r = threadIdx.x; r < b->args->ranks; r += THREADS) {
        const mm_cuda_cell *cell = mm_cells(b, b->rank->windows[b->rank->rank]) + r;
        uint32_t polls = 0;
        uint64_t start = 0;
        while (mm_load_acquire_sys(&cell->epoch) != b->epoch)
            if (!mm_keep_waiting(b, &polls, &start, MEGAMOE_PHASE_COUNT, r))
                break;
    }
    __syncthreads();
}

/* Totals over ranks, and how many of each expert's rows come before this block's. */
MM_DEVICE void mm_total(const mm_block *b) {
    uint8_t *window = b->rank->windows[b->rank->rank];
    for (int32_t p = threadIdx.x; p < b->args->physical; p += THREADS) {
        int32_t total = 0, before = 0;
        for (int32_t r = 0; r < b->args->ranks; r++) {
            const int32_t count = __ldcg(mm_counts(b, window, r) + p);
            total += count;
            before += r < b->rank->rank ? count : 0;
        }
        b->total[p] = total;
        b->cursor[p] += before;
    }
    __syncthreads();
}

/* Exclusive prefix sum over the lanes; *sum gets all. */
MM_DEVICE int32_t mm_prefix(int32_t value, int32_t *sum) {
    int32_t inclusive = value;
    for (int32_t step = 1; step < 32; step *= 2) {
        const int32_t other = __shfl_up_sync(~0u, inclusive, step);
        inclusive += (int32_t)(threadIdx.x % 32) >= step ? other : 0;
    }
    *sum = __shfl_sync(~0u, inclusive, 31);
    return inclusive - value;
}

/*
 * Experts in the order in which routes are sent: the first of every rank, then the second, and so
 * on, so that no rank waits while the experts of another are served. Ranks begin with themselves.
 */
MM_DEVICE int32_t mm_nth_expert(const mm_block *b, int32_t i) {
    const int32_t ranks = b->args->ranks, physical = b->args->physical;
    const int32_t nth = i / ranks;
    int32_t owner = i % ranks;
    if (nth < physical / ranks) /* which all ranks have */
        owner = (owner + b->rank->rank) % ranks;
    return mm_share_first(physical, owner, ranks) + nth;
}

/* Where rows begin, at every owner; token tiles of this rank; places in `order`. A warp each. */
MM_DEVICE void mm_prefix_sums(const mm_block *b) {
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t physical = b->args->physical, ranks = b->args->ranks;
    int32_t sum;
#pragma unroll 1
    for (int32_t owner = warp; owner < ranks; owner += WARPS - 2) {
        if (warp >= WARPS - 2)
            break;
        const int32_t first = mm_share_first(physical, owner, ranks);
        const int32_t end = mm_share_first(physical, owner + 1, ranks);
        int32_t rows = 0, need = 0;
#pragma unroll 1
        for (int32_t p0 = first; p0 < end; p0 += 32) {
            const int32_t p = p0 + lane;
            const int32_t total = p < end ? b->total[p] : 0;
            const int32_t padded = (total + MM_CUDA_ROW_MULTIPLE - 1) & -MM_CUDA_ROW_MULTIPLE;
            const int32_t before = mm_prefix(padded, &sum);
            if (p < end)
                b->start[p] = rows + before;
            rows += sum;
            need += __reduce_add_sync(~0u, total);
        }
        if (lane == 0)
            ((int32_t *)(b->smem + NEEDS))[owner] = need;
    }
    if (warp == WARPS - 2) {
        int32_t tiles = 0;
#pragma unroll 1
        for (int32_t e0 = 0; e0 < b->rank->local; e0 += 32) {
            const int32_t e = e0 + lane;
            const int32_t total = e < b->rank->local ? b->total[b->first + e] : 0;
            const int32_t before = mm_prefix((total + MM_N - 1) / MM_N, &sum);
            if (e < b->rank->local)
                b->tiles[e] = tiles + before;
            tiles += sum;
        }
        if (lane == 0) {
            b->tiles[b->rank->local] = tiles;
            b->words->units = tiles;
        }
    }
    if (warp == WARPS - 1 && !mm_share_of(b).few) {
        int32_t place = 0;
#pragma unroll 1
        for (int32_t i0 = 0; i0 < physical; i0 += 32) {
            const int32_t i = i0 + lane;
            const int32_t p = i < physical ? mm_nth_expert(b, i) : 0;
            const int32_t before = mm_prefix(i < physical ? b->own[p] : 0, &sum);
            if (i < physical)
                b->own[p] = place + before;
            place += sum;
        }
    }
    __syncthreads();
}

/*
 * By one thread; `good`: nothing is wrong with this rank's part. An error of one rank is the error
 * of all: status of a batch, layers that differ, pools that overflow, in this order. Every rank
 * sees the same and decides alike.
 */
MM_DEVICE void mm_agree(const mm_block *b, bool good) {
    const int32_t ranks = b->args->ranks, me = b->rank->rank;
    const bool reports = b->block == 0;
    int32_t token, slot;
    if (ranks == 1) {
        if (!good) {
            const int32_t status = mm_own_status(b, &token, &slot);
            if (reports)
                mm_report(b, status, MEGAMOE_PHASE_COUNT, me, token, slot, b->rank->state->value);
            b->words->stop = 1;
            return;
        }
    } else {
        const volatile mm_cuda_cell *cells = mm_cells(b, b->rank->windows[me]);
        int32_t bad = 0, other = 0;
        while (bad < ranks && cells[bad].status == MEGAMOE_OK)
            bad++;
        while (other < ranks && cells[other].key == cells[0].key)
            other++;
        if (bad < ranks || other < ranks) {
            b->words->stop = 1;
            if (!reports)
                return;
            if (bad < ranks)
                mm_report(b, cells[bad].status, MEGAMOE_PHASE_COUNT, bad, cells[bad].token,
                          cells[bad].slot, cells[bad].value);
            else
                mm_report(b, MEGAMOE_EINVAL, MEGAMOE_PHASE_COUNT, other, -1, -1, 0);
            return;
        }
    }
    for (int32_t r = 0; r < ranks; r++) {
        const int32_t need = ((const int32_t *)(b->smem + NEEDS))[r];
        if (need <= b->args->pool_rows)
            continue;
        b->words->stop = 1;
        if (reports)
            mm_report(b, MEGAMOE_ECAPACITY, MEGAMOE_PHASE_DISPATCH, r, -1, -1, need);
        return;
    }
}

/*
 * This block's routes by expert: {route, physical expert, row, owner}. A few fit shared memory.
 * Where they are few enough to be held they stay as they come, with expert -1 for none.
 */
MM_DEVICE int4 *mm_order(const mm_block *b) {
    const mm_share share = mm_share_of(b);
    return share.routes <= ORDER_ROUTES ? (int4 *)(b->smem + ORDER)
                                        : (int4 *)b->rank->order + share.low;
}

/* A row for a route of this block. */
MM_DEVICE int4 mm_place(const mm_block *b, int32_t id, int32_t route) {
    const int32_t p = mm_physical_of(b, id, route);
    const int32_t row = b->start[p] + atomicAdd(&b->cursor[p], 1);
    const int32_t ranks = b->args->ranks;
    return make_int4(route, p, row, ranks == 1 ? 0 : mm_share_owner(b->args->physical, p, ranks));
}

/* Sorts this block's routes in the order of mm_nth_expert: FC1's first tiles are complete early. */
MM_DEVICE void mm_sort_routes(const mm_block *b, const mm_held *held) {
    const mm_share share = mm_share_of(b);
    int4 *order = mm_order(b);
    if (share.few) {
        const int32_t i = (int32_t)threadIdx.x;
        if (i < share.routes)
            order[i] = held->id < 0 ? make_int4(0, -1, 0, 0) : mm_place(b, held->id, share.low + i);
    } else {
        const int32_t high = share.low + share.routes;
#pragma unroll 1
        for (int32_t i = share.low + (int32_t)threadIdx.x; i < high; i += THREADS) {
            const int32_t id = b->rank->staged.ids[i];
            if (id < 0)
                continue;
            const int4 entry = mm_place(b, id, i);
            order[atomicAdd(&b->own[entry.y], 1)] = entry;
        }
    }
    __syncthreads();
}

/* Everything before the roles part; `good` as in mm_agree. */
MM_DEVICE void mm_begin(const mm_block *b, mm_held *held, bool good) {
    int4 ids[IDS_AT_ONCE];
    mm_read_ids(b, b->tokens * b->args->topk, 4 * (int32_t)threadIdx.x, ids);
    mm_hold(b, held);
    if (threadIdx.x / 32 == PRODUCER_WARP)
        mm_touch_pool(b);
    mm_clear_counters(b);
    mm_count(b, ids);
    if (b->args->ranks > 1) {
        if (b->block == 0)
            mm_publish(b);
        mm_await_cells(b);
        if (b->words->stop)
            return;
        mm_total(b);
    }
    mm_prefix_sums(b);
    if (threadIdx.x == THREADS - 32)
        mm_agree(b, good);
    if (b->block == 0)
        for (int32_t e = threadIdx.x; e < b->rank->local; e += THREADS)
            b->rank->received[e] = b->total[b->first + e];
    mm_sort_routes(b, held);
    if (b->block == 0 && b->words->stop == 0)
        for (int32_t e = threadIdx.x; e < b->rank->local; e += THREADS)
            atomicAdd((unsigned long long *)&b->rank->layer->received[e],
                      (unsigned long long)b->total[b->first + e]);
}

/* A rank's window. */
MM_DEVICE uint8_t *mm_window(const mm_block *b, int32_t rank) {
    return (uint8_t *)((uint16_t *const *)(b->smem + RESULTS))[rank] - b->args->window.results;
}

MM_DEVICE void mm_store_scale(const mm_block *b, uint8_t *window, int32_t chunk, int64_t row,
                              uint32_t scale) {
    uint8_t *scales = window + b->args->window.scales;
    const int64_t place = chunk * b->args->rows + mm_scale_place(row);
    if (b->args->input_scale == MEGAMOE_SCALE_BLOCK)
        scales[place] = (uint8_t)(scale - 127 + MM_CUDA_EXPONENT_BIAS);
    else
        ((uint32_t *)scales)[place] = scale;
}

MM_DEVICE void mm_store_record(const mm_block *b, uint8_t *window, const int4 *entry, float weight,
                               float scale, uint8_t tiny) {
    const bool by_token = b->args->input_scale == MEGAMOE_SCALE_TOKEN;
    const int4 record = {__float_as_int(by_token ? scale : 1.0f), __float_as_int(weight),
                         b->rank->rank + (by_token && tiny ? MM_CUDA_TINY : 0), entry->x};
    *(int4 *)(window + b->args->window.records + (int64_t)entry->z * RECORD_BYTES) = record;
}

/* A route's row is stored, by this thread and those that it has met at a barrier since. */
MM_DEVICE void mm_tell_stored(const mm_block *b, uint8_t *window, const int4 *entry) {
    const mm_cuda_forward_args *args = b->args;
    const int32_t p = entry->y;
    uint32_t *stored = b->rank->dispatched + b->parity * args->physical + p;
    if (args->ranks == 1) {
        mm_add_release_gpu(stored, 1);
    } else if (mm_add_acq_rel_gpu(stored, 1) + 1 == (uint32_t)b->mine[p]) {
        const int32_t local = p - mm_share_first(args->physical, entry->w, args->ranks);
        mm_fence_acq_rel_sys();
        mm_store_relaxed_sys((uint32_t *)(window + args->window.arrivals) +
                                 (int64_t)local * args->ranks + b->rank->rank,
                             b->epoch);
    }
}

/* The row of one route, by one warp. */
MM_DEVICE void mm_send(const mm_block *b, int4 entry) {
    const mm_cuda_forward_args *args = b->args;
    const mm_cuda_staged *staged = &b->rank->staged;
    const int32_t lane = threadIdx.x % 32;
    const int64_t row = entry.z, token = entry.x / args->topk;
    const int32_t chunks = args->hidden_chunks;
    uint8_t *window = mm_window(b, entry.w);

    float weight = 0.0f, scale = 0.0f;
    uint8_t tiny = 0;
    if (lane == 0) {
        weight = staged->weights[entry.x];
        if (args->input_scale == MEGAMOE_SCALE_TOKEN) {
            scale = staged->scales[token];
            tiny = staged->tiny[token];
        }
    }
    const uint4 *from = (const uint4 *)(staged->codes + token * chunks * 128);
    uint8_t *to = window + args->window.codes + row * 128;
    const int64_t chunk_stride = args->rows * 128;
    const int32_t pieces = chunks * 8;
    const int32_t place = (lane % 8) ^ (int32_t)(row % 8); /* the piece in its chunk is lane % 8 */
    for (int32_t v = lane; v < pieces; v += PART) {
        uint4 piece[PIECES_AT_ONCE];
#pragma unroll
        for (int32_t u = 0; u < PIECES_AT_ONCE; u++)
            if (v + 32 * u < pieces)
                piece[u] = from[v + 32 * u];
#pragma unroll
        for (int32_t u = 0; u < PIECES_AT_ONCE; u++)
            if (v + 32 * u < pieces)
                *(uint4 *)(to + (v / 8 + 4 * u) * chunk_stride + place * 16) = piece[u];
    }
    if (args->input_scale == MEGAMOE_SCALE_BLOCK)
        for (int32_t c = lane; c < chunks; c += 32)
            mm_store_scale(b, window, c, row, staged->blocks[token * chunks + c]);
    else if (args->input_scale == MEGAMOE_SCALE_BLOCK_F32)
        for (int32_t c = lane; c < chunks; c += 32)
            mm_store_scale(b, window, c, row,
                           __float_as_uint(staged->block_scales[token * chunks + c]));
    if (lane == 0)
        mm_store_record(b, window, &entry, weight, scale, tiny);
    mm_fence_proxy_async_global();
    __syncwarp();
    if (lane == 0)
        mm_tell_stored(b, window, &entry);
    __syncwarp();
}

/* The named barrier of all math warps; teams have those from 1 on. */
enum { ALL_MATH = 1 + TEAMS };

/* Sends what mm_hold has read. By all math warps. */
MM_DEVICE void mm_send_held(const mm_block *b, const mm_held *held) {
    const mm_cuda_forward_args *args = b->args;
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t parts = mm_parts(b);
    const int32_t pieces = args->hidden_chunks * 8;
    const mm_share share = mm_share_of(b);
    const int4 *order = (const int4 *)(b->smem + ORDER);
#pragma unroll
    for (int32_t k = 0; k < PARTS_HELD; k++) {
        const uint32_t item = (uint32_t)(warp + k * MATH_WARPS);
        if (item >= (uint32_t)share.routes * parts)
            break;
        const int4 entry = order[item / parts];
        if (entry.y < 0)
            continue;
        uint8_t *window = mm_window(b, entry.w);
        const int64_t row = entry.z, chunk_stride = args->rows * 128;
        const int32_t v = (int32_t)(item % parts) * PART + lane;
        uint8_t *to = window + args->window.codes + row * 128 + v / 8 * chunk_stride +
                      ((lane % 8) ^ (int32_t)(row % 8)) * 16;
#pragma unroll
        for (int32_t u = 0; u < PIECES_AT_ONCE; u++)
            if (v + 32 * u < pieces)
                *(uint4 *)(to + 4 * u * chunk_stride) = held->piece[k][u];
        const int32_t chunk = (int32_t)(item % parts) * (PART / 8) + lane;
        if (args->input_scale != MEGAMOE_SCALE_TOKEN && lane < PART / 8 &&
            chunk < args->hidden_chunks)
            mm_store_scale(b, window, chunk, row, held->scale[k]);
    }
    const bool tells = (int32_t)threadIdx.x < share.routes && order[threadIdx.x].y >= 0;
    if (tells)
        mm_store_record(b, mm_window(b, order[threadIdx.x].w), &order[threadIdx.x], held->weight,
                        held->token_scale, held->tiny);
    mm_fence_proxy_async_global();
    MM_NAMED_BARRIER(ALL_MATH, 32 * MATH_WARPS);
    if (tells)
        mm_tell_stored(b, mm_window(b, order[threadIdx.x].w), &order[threadIdx.x]);
    __syncwarp();
}

/* Sends this block's routes with the other warps that do; helpers leave after `most` of them. */
MM_DEVICE void mm_dispatch(const mm_block *b, int32_t most) {
    /* After sorting, the place behind the last expert's routes is the number of routes. */
    const int32_t routes = b->own[mm_nth_expert(b, b->args->physical - 1)];
    const int4 *order = mm_order(b);
    for (;;) {
        int32_t index = routes;
        if (threadIdx.x % 32 == 0 && *(volatile int32_t *)&b->words->next < most)
            index = atomicAdd(&b->words->next, 1);
        index = __shfl_sync(~0u, index, 0);
        if (index >= routes)
            return;
        mm_send(b, order[index]);
    }
}

#endif
