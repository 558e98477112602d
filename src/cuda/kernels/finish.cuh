/* SPDX-License-Identifier: Apache-2.0 */
/* What happens to a tile's sums: activation and FC2's input, or rows for the tokens' ranks. */
#ifndef MM_CUDA_KERNELS_FINISH_CUH
#define MM_CUDA_KERNELS_FINISH_CUH

#include "cuda/kernels/multiply.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "num/gated.h"
#include "num/input.h"

/* What a tile's task brought with it, in shared memory. */
typedef struct mm_tile {
    const mm_task *task;
    const mm_cuda_record *records; /* [MM_N] */
    const uint8_t *rows;           /* exponents, biases, globals of its 256 rows */
} mm_tile;

/* Row factors and biases of a lane's two rows (half 0, half 1) in one 64-row chunk. */
typedef struct mm_rows {
    float factor[2];
    float bias[2];
} mm_rows;

MM_DEVICE mm_rows mm_rows_of(const mm_tile *tile, bool has_bias, int32_t m) {
    const uint32_t thread = mm_thread();
    const uint32_t warp = thread / 32 % TEAM_WARPS, g = thread % 32 / 4;
    const uint32_t row = (warp / 4 * CHUNKS + m) * 64 + warp % 4 * 16 + g;
    mm_rows rows;
#pragma unroll
    for (int32_t half = 0; half < 2; half++) {
        rows.factor[half] = mm_exp2i(((const int8_t *)tile->rows)[row + 8 * half]);
        rows.bias[half] =
            has_bias ? ((const float *)(tile->rows + ROW_BIASES))[row + 8 * half] : 0.0f;
    }
    return rows;
}

MM_DEVICE float mm_global_of(const mm_tile *tile, megamoe_projection projection) {
    return ((const float *)(tile->rows + ROW_GLOBALS))[projection];
}

/* Global scales of MXFP4 are 1: nothing is multiplied. */
MM_DEVICE float mm_times_global(float x, float global) {
    return MM_FORMAT == 0 ? x : x * global;
}

/* ---- FC1 ---- */

enum {
    PAIRS_UNROLLED = MM_N > 64 ? PAIRS : 1, /* more code, and fewer registers */
    VALUES = 4 * AT_ONCE,                   /* of a lane */
    /* Of a chunk, in one loop: fewer moves with few, less code with many. */
    PART_SUMS = MM_N > 96                      ? 16
                : MM_N % 48 == 0 || MM_N == 80 ? 24
                : MM_N == 64                   ? 32
                                               : MM_N / 2
};

/* Out of line: it is rare, and code that runs is to stay in the instruction cache. */
static __device__ __noinline__ float mm_gated_any(float g, float u, float alpha, float offset,
                                                  float limit) {
    return mm_gated(g, u, alpha, offset, limit);
}

/*
 * mm_gated (src/num/gated.h) with mm_reciprocal, for what nearly all gates are: *ordinary is
 * cleared for others. exp(40) is 2^57.7; where alpha g is infinite or NaN no comparison holds.
 */
MM_DEVICE float mm_gated_fast(float g, float u, const mm_cuda_forward_args *args, bool *ordinary) {
    g = mm_min(g, args->limit);
    u = mm_max(mm_min(u, args->limit), -args->limit);
    const float x = -args->alpha * g;
    *ordinary &= fabsf(x) < 40.0f;
    int32_t exponent;
    const float y = mm_exp_split(x, &exponent);
    /* y 2^exponent, whose exponent is far from the ends. */
    const float power = __uint_as_float(__float_as_uint(y) + ((uint32_t)exponent << 23));
    return g * mm_reciprocal(1.0f + power) * (u + args->offset);
}

/* FC1's sums of a gate and its up, in the units of the activation. */
typedef struct mm_gate_up {
    float gate, up;
} mm_gate_up;

MM_DEVICE mm_gate_up mm_scaled(float gate, float up, float scale, float tiny, float gate_global,
                               float up_global, const mm_rows *rows) {
    gate = gate * scale * tiny;
    up = up * scale * tiny;
    mm_gate_up x = {__fmaf_rn(mm_times_global(gate, gate_global), rows->factor[0], rows->bias[0]),
                    __fmaf_rn(mm_times_global(up, up_global), rows->factor[1], rows->bias[1])};
    return x;
}

/*
 * Columns 8 j + 2 c and the next of a lane's 64-row chunks, AT_ONCE groups of eight columns: gates
 * and ups to h, in place of the gates. All values at once, so that their long chains of operations
 * run side by side.
 */
MM_DEVICE void mm_activate(const mm_cuda_forward_args *args, const mm_cuda_record *records,
                           const mm_rows *rows, float gate_global, float up_global, float *s0,
                           float *s1) {
    float *const sums[2] = {s0, s1};
    mm_cuda_record record[AT_ONCE][2];
    float h[VALUES];
    bool ordinary = true;
#pragma unroll
    for (int32_t j = 0; j < AT_ONCE; j++)
#pragma unroll
        for (int32_t k = 0; k < 2; k++) {
            *(int4 *)&record[j][k] = *(const int4 *)&records[8 * j + k];
            ordinary &= !(record[j][k].rank & MM_CUDA_TINY);
        }
#pragma unroll
    for (int32_t j = 0; j < AT_ONCE; j++)
#pragma unroll
        for (int32_t i = 0; i < 4; i++) {
            const int32_t m = i / 2, k = i % 2;
            const mm_gate_up x =
                mm_scaled(sums[m][4 * j + k], sums[m][4 * j + 2 + k], record[j][k].scale, 1.0f,
                          gate_global, up_global, &rows[m]);
            h[4 * j + i] = mm_gated_fast(x.gate, x.up, args, &ordinary);
        }
    if (!ordinary) {
#pragma unroll
        for (int32_t v = 0; v < VALUES; v++) {
            const int32_t j = v / 4, m = v / 2 % 2, k = v % 2;
            const float tiny = record[j][k].rank & MM_CUDA_TINY ? 0x1p-64f : 1.0f;
            const mm_gate_up x =
                mm_scaled(sums[m][4 * j + k], sums[m][4 * j + 2 + k], record[j][k].scale, tiny,
                          gate_global, up_global, &rows[m]);
            h[v] = mm_gated_any(x.gate, x.up, args->alpha, args->offset, args->limit);
        }
    }
#pragma unroll
    for (int32_t j = 0; j < AT_ONCE; j++)
#pragma unroll
        for (int32_t i = 0; i < 4; i++)
            sums[i / 2][4 * j + i % 2] =
                h[4 * j + i] * (args->weight_after_fc2 ? 1.0f : record[j][i % 2].weight);
}

/* The larger magnitude of two, as bits; NaN is largest. */
MM_DEVICE uint32_t mm_larger(float x, float y) {
    return __float_as_uint(mm_max(fabsf(x), fabsf(y)));
}

/* For each lane the larger one of its own `x` and of the value `y` that the lane `step` away wants
 * to have compared with its own; which of the two a lane keeps, a bit of its index says. */
MM_DEVICE uint32_t mm_larger_across(uint32_t x, uint32_t y, uint32_t lane, uint32_t step) {
    const bool upper = lane & step;
    const uint32_t mine = upper ? y : x;
    const uint32_t other = __shfl_xor_sync(~0u, upper ? x : y, step);
    return mine > other ? mine : other;
}

/*
 * The largest magnitudes that this warp's channels have in each column, into `largest` [MM_N]. The
 * columns are dealt out to the lanes on the way: all of a quad's lanes have the same ones, so each
 * exchange halves what is left. Where that is odd, both keep the last one.
 */
MM_DEVICE void mm_find_largest(uint32_t *largest, const float *s0, const float *s1) {
    enum { GROUPS = MM_N / 8, HALF = (GROUPS + 1) / 2, QUARTER = (HALF + 1) / 2 };
    const uint32_t lane = mm_thread() % 32;
    uint32_t best[GROUPS];
#pragma unroll
    for (int32_t j = 0; j < GROUPS; j++)
        best[j] = mm_larger_across(mm_larger(s0[4 * j], s1[4 * j]),
                                   mm_larger(s0[4 * j + 1], s1[4 * j + 1]), lane, 16);
#pragma unroll
    for (int32_t j = 0; j < HALF; j++)
        best[j] = mm_larger_across(best[j], best[j + HALF < GROUPS ? j + HALF : j], lane, 8);
    const uint32_t half = lane / 4 % 2 * QUARTER, whole = lane / 8 % 2 * HALF;
    largest += 2 * (lane % 4) + lane / 16;
#pragma unroll
    for (int32_t j = 0; j < QUARTER; j++) {
        best[j] = mm_larger_across(best[j], best[j + QUARTER < HALF ? j + QUARTER : j], lane, 4);
        if ((HALF % 2 == 0 || j + half < HALF) && (GROUPS % 2 == 0 || j + half + whole < GROUPS))
            largest[8 * (j + half + whole)] = best[j];
    }
}

/* The scale of one token's 128 channels, by one thread: what codes are multiplied by, NaN where the
 * block is not finite (so that all its codes are NaN), and the exponent for FC2. */
MM_DEVICE void mm_choose_scale(const mm_team *team, uint32_t column) {
    const uint32_t *largest = (const uint32_t *)(team->smem + LARGEST) + column;
    uint32_t bits = 0;
#pragma unroll
    for (int32_t slice = 0; slice < 8; slice++)
        bits = largest[slice * MM_N] > bits ? largest[slice * MM_N] : bits;
    const bool finite = bits < 0x7F800000u;
    const int32_t exponent = mm_block_exponent(bits);
    ((float *)(team->smem + INVERSES))[column] =
        finite ? mm_exp2i(-exponent) : __uint_as_float(0x7FC00000u);
    team->smem[EXPONENTS + column] = (uint8_t)(exponent + MM_CUDA_EXPONENT_BIAS);
}

/* Two codes each of two tokens. */
MM_DEVICE uint32_t mm_e4m3_pairs(float low0, float high0, float low1, float high1) {
    uint32_t pairs;
    asm("{\n.reg .b16 first, second;\n"
        "cvt.rn.satfinite.e4m3x2.f32 first, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 second, %4, %3;\n"
        "mov.b32 %0, {first, second};\n}"
        : "=r"(pairs)
        : "f"(low0), "f"(high0), "f"(low1), "f"(high1));
    return pairs;
}

/* Two rows of the transpose of an 8 x 8 tile of 16-bit elements. */
MM_DEVICE uint32_t mm_transpose(uint32_t pair) {
    uint32_t result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

/*
 * Codes of h into the tile that the finisher stores. An element that is transposed holds the codes
 * of one token's channels in chunks 0 and 1, which are 32 bytes apart; a lane then has those of two
 * neighbouring channels.
 */
MM_DEVICE void mm_encode(const mm_team *team, uint32_t pair, const float *s0, const float *s1) {
    const uint32_t thread = mm_thread();
    const uint32_t warp = thread / 32 % TEAM_WARPS, row = thread % 32 / 4, c = thread % 4;
    const float2 *inverses = (const float2 *)(team->smem + INVERSES) + c;
    const uint32_t place = (warp / 4 + pair) * 64 + warp % 4 * 8 + 2 * c;
    /* Of a row of 128 bytes, the pieces of 16 are exchanged by the row's number among eight. */
    const uint32_t first = team->shared + OUT + 128 * row + (place / 16 ^ row) * 16 + place % 16;
    const uint32_t second = first ^ 32;
    uint32_t codes[MM_N / 8];
#pragma unroll
    for (int32_t j = 0; j < MM_N / 8; j++) {
        const float2 inverse = inverses[4 * j];
        codes[j] = mm_e4m3_pairs(s0[4 * j] * inverse.x, s1[4 * j] * inverse.x,
                                 s0[4 * j + 1] * inverse.y, s1[4 * j + 1] * inverse.y);
    }
#pragma unroll
    for (int32_t j = 0; j < MM_N / 8; j++)
        codes[j] = mm_transpose(codes[j]);
#pragma unroll
    for (int32_t j = 0; j < MM_N / 8; j++) {
        mm_shared_store_2(first + 1024 * j, __byte_perm(codes[j], 0, 0x4420));
        mm_shared_store_2(second + 1024 * j, __byte_perm(codes[j], 0, 0x4431));
    }
}

/* Moves `count` sums `places` down, and of the first ones those of gates, h by now, to the end: ups
 * have served. */
template <int32_t count, int32_t places> MM_DEVICE void mm_turn(float *s) {
    float h[places];
#pragma unroll
    for (int32_t i = 0; i < places; i++)
        h[i] = s[i];
#pragma unroll
    for (int32_t i = 0; i < count - places; i++)
        s[i] = s[i + places];
#pragma unroll
    for (int32_t i = 0; i < places; i++)
        if (i % 4 < 2)
            s[count - places + i] = h[i];
}

/* The second pair of chunks to the first one's place, whose h go to the second's. */
MM_DEVICE void mm_exchange(float (&s)[CHUNKS][MM_N / 2]) {
#pragma unroll
    for (int32_t m = 0; m < 2; m++)
#pragma unroll
        for (int32_t i = 0; i < MM_N / 2; i++) {
            const float h = s[m][i];
            s[m][i] = s[CHUNKS - 2 + m][i];
            if (i % 4 < 2)
                s[CHUNKS - 2 + m][i] = h;
        }
}

/* The sums of two chunks from `begin` on, PART_SUMS of each in a loop. */
template <int32_t begin>
MM_DEVICE void mm_activate_from(const mm_cuda_forward_args *args, int32_t valid,
                                const mm_cuda_record *records, const mm_rows *rows,
                                float gate_global, float up_global, float *s0, float *s1) {
    constexpr int32_t left = MM_N / 2 - begin, count = left < PART_SUMS ? left : PART_SUMS;
#pragma unroll 1
    for (int32_t j = 0; j < count / 4; j += AT_ONCE) {
        const int32_t column = 2 * begin + 8 * j;
        if (column < valid)
            mm_activate(args, records + column, rows, gate_global, up_global, s0 + begin,
                        s1 + begin);
        if (count > 4 * AT_ONCE) {
            mm_turn<count, 4 * AT_ONCE>(s0 + begin);
            mm_turn<count, 4 * AT_ONCE>(s1 + begin);
        }
    }
    if constexpr (count < left)
        mm_activate_from<begin + count>(args, valid, records, rows, gate_global, up_global, s0, s1);
}

MM_DEVICE void mm_finish_fc1(const mm_team *team, const mm_tile *tile,
                             float (&s)[CHUNKS][MM_N / 2]) {
    const mm_cuda_forward_args *args = team->args;
    const float gate_global = mm_global_of(tile, MEGAMOE_GATE);
    const float up_global = mm_global_of(tile, MEGAMOE_UP);
    const uint32_t thread = mm_thread() % TEAM_THREADS;
    const mm_cuda_record *records = tile->records + 2 * (thread % 4);
    /* Loops, since to fetch code takes longer than to run it: the sums are turned round in their
     * registers, which only constants can index, and h stands in the gates' places after the last
     * turn. Where there are many, several loops turn a part of them each. The second pair of chunks
     * is activated in the place of the first, and stays there. */
#pragma unroll PAIRS_UNROLLED
    for (int32_t pair = 0; pair < PAIRS; pair++) {
        const mm_rows rows[2] = {mm_rows_of(tile, args->has_bias, 2 * pair),
                                 mm_rows_of(tile, args->has_bias, 2 * pair + 1)};
        mm_activate_from<0>(args, tile->task->valid, records, rows, gate_global, up_global, s[0],
                            s[1]);
        mm_find_largest((uint32_t *)(team->smem + LARGEST) + (thread / 32 + 4 * pair) * MM_N, s[0],
                        s[1]);
        if (pair + 1 < PAIRS)
            mm_exchange(s);
    }
    const uint32_t barrier = 1 + mm_thread() / TEAM_THREADS;
    MM_NAMED_BARRIER(barrier, TEAM_THREADS);
    if (thread < MM_N)
        mm_choose_scale(team, thread);
    MM_NAMED_BARRIER(barrier, TEAM_THREADS);
    mm_encode(team, PAIRS - 1, s[0], s[1]);
    if (PAIRS == 2)
        mm_encode(team, 0, s[CHUNKS - 2], s[CHUNKS - 1]);
    mm_fence_proxy_async_shared();
}

/* ---- FC2 ---- */

MM_DEVICE uint32_t mm_bf16_pair(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* Columns 8 j + 2 c and the next of one of a lane's rows, transposed: two channels of one token.
 * `before` and `after` are what biases and results are multiplied by: of a weight and 1. */
MM_DEVICE uint32_t mm_route_pair(const float *sums, float global, float factor, float bias,
                                 const float (&before)[2], const float (&after)[2]) {
    float value[2];
#pragma unroll
    for (int32_t k = 0; k < 2; k++)
        value[k] = __fmaf_rn(mm_times_global(sums[k], global), factor, before[k] * bias) * after[k];
    return mm_transpose(mm_bf16_pair(value[0], value[1]));
}

/* A rank's results. From shared memory: its window, from L2, is far behind a fence. */
MM_DEVICE uint16_t *mm_results_of(const mm_team *team, uint32_t rank) {
    const uint2 results = mm_shared_load_8(team->block + RESULTS + 8 * rank);
    return (uint16_t *)((uint64_t)results.y << 32 | results.x);
}

/* Where a lane's eight channels of the token of a record go, which is any if there is no token. */
MM_DEVICE uint16_t *mm_route_place(const mm_team *team, const mm_cuda_record *record,
                                   int32_t channel, bool is_token) {
    const uint32_t rank = is_token ? (uint32_t)(record->rank & ~MM_CUDA_TINY) : 0;
    return mm_results_of(team, rank) + record->route * team->args->results_stride + channel;
}

/* Groups of eight columns that leave at once, so that one's latencies hide behind the other. */
enum { LEAVING = 2 };

MM_DEVICE void mm_finish_fc2(const mm_team *team, const mm_tile *tile,
                             const float (&s)[CHUNKS][MM_N / 2]) {
    const mm_cuda_forward_args *args = team->args;
    const mm_task *task = tile->task;
    const float global = mm_global_of(tile, MEGAMOE_DOWN);
    const int32_t thread = (int32_t)mm_thread() % TEAM_THREADS;
    const int32_t warp = thread / 32, g = thread % 32 / 4, c = thread % 4;
    const int32_t channel = task->tile * MM_CUDA_TILE_ROWS + warp / 4 * 128 + warp % 4 * 32 + c * 8;
    const int32_t valid = task->valid;
    mm_rows rows[CHUNKS];
#pragma unroll
    for (int32_t m = 0; m < CHUNKS; m++)
        rows[m] = mm_rows_of(tile, args->has_bias, m);
#pragma unroll
    for (int32_t start = 0; start < MM_N / 8; start += LEAVING) {
        if (8 * start >= valid)
            break;
        enum { WORDS_OF_PAIR = 4 }; /* chunk 0 halves 0 and 1, chunk 1 halves 0 and 1 */
        uint32_t words[LEAVING][PAIRS][WORDS_OF_PAIR];
        uint16_t *to[LEAVING];
#pragma unroll
        for (int32_t j = start; j < start + LEAVING && j < MM_N / 8; j++) {
            to[j - start] =
                mm_route_place(team, &tile->records[8 * j + g], channel, 8 * j + g < valid);
            float before[2], after[2];
#pragma unroll
            for (int32_t k = 0; k < 2; k++) {
                const float weight = tile->records[8 * j + 2 * c + k].weight;
                before[k] = args->weight_after_fc2 ? 1.0f : weight;
                after[k] = args->weight_after_fc2 ? weight : 1.0f;
            }
#pragma unroll
            for (int32_t i = 0; i < PAIRS * WORDS_OF_PAIR; i++) {
                const int32_t m = i / 2, half = i % 2;
                words[j - start][i / WORDS_OF_PAIR][i % WORDS_OF_PAIR] =
                    mm_route_pair(s[m] + 4 * j + 2 * half, global, rows[m].factor[half],
                                  rows[m].bias[half], before, after);
            }
        }
#pragma unroll
        for (int32_t j = start; j < start + LEAVING && j < MM_N / 8; j++) {
            if (8 * j + g >= valid)
                continue;
#pragma unroll
            for (int32_t pair = 0; pair < PAIRS; pair++) {
                const uint32_t(&w)[WORDS_OF_PAIR] = words[j - start][pair];
                *(uint4 *)(to[j - start] + 128 * pair) = make_uint4(w[0], w[1], w[2], w[3]);
            }
        }
    }
}

/* ---- the finisher ---- */

/* FC2's input of a tile and its exponents go to their pools, then the tile counts. */
MM_DEVICE void mm_store_hidden(const mm_block *b, const mm_team *team, const mm_task *task) {
    const int64_t rows = team->args->rows;
    if (threadIdx.x % 32 == 0)
        mm_bulk_store(team->rank->hidden_codes + (task->tile * rows + task->row) * 128,
                      team->shared + OUT, (uint32_t)task->valid * 128);
    bool unusual = false;
    for (int32_t column = threadIdx.x % 32; column < task->valid; column += 32) {
        const uint8_t exponent = team->smem[EXPONENTS + column];
        team->rank->hidden_scales[task->tile * rows + mm_scale_place(task->row + column)] =
            exponent;
        unusual |= exponent != MM_BLOCK_EXPONENT_USUAL + MM_CUDA_EXPONENT_BIAS;
    }
    mm_fence_proxy_async_global();
    unusual = __any_sync(~0u, unusual);
    if (threadIdx.x % 32 == 0) {
        mm_bulk_store_wait();
        mm_fence_proxy_async_global();
        mm_add_acq_rel_gpu(team->rank->fc1_done + b->parity * team->args->units + task->unit,
                           unusual ? 1 + FC1_UNUSUAL : 1);
    }
    __syncwarp();
}

/* Counts a tile of FC2; the last one of its tokens tells their ranks. */
MM_DEVICE void mm_return_routes(const mm_block *b, const mm_team *team, const mm_task *task,
                                const mm_cuda_record *records) {
    const mm_cuda_forward_args *args = team->args;
    uint32_t done = 0;
    if (threadIdx.x % 32 == 0)
        done = mm_add_acq_rel_gpu(team->rank->fc2_done + b->parity * args->units + task->unit, 1);
    done = __shfl_sync(~0u, done, 0);
    __syncwarp(); /* what lane 0 has acquired, all have */
    if (done + 1 < (uint32_t)args->fc2_tiles)
        return;
    if (args->ranks == 1) /* who waits for them is on this GPU */
        mm_fence_acq_rel_gpu();
    else
        mm_fence_acq_rel_sys();
    for (int32_t column = threadIdx.x % 32; column < task->valid; column += 32) {
        const uint32_t rank = (uint32_t)(records[column].rank & ~MM_CUDA_TINY);
        const uint8_t *window = (const uint8_t *)mm_results_of(team, rank) - args->window.results;
        uint32_t *returned = (uint32_t *)(window + args->window.returned);
        mm_store_relaxed_sys(returned + records[column].route, b->epoch);
    }
}

#endif
