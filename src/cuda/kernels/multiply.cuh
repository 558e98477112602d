/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The main loop: 4-bit weights from the ring become E4M3 registers, tokens stay in shared memory.
 *
 * Each warpgroup multiplies one or two 64-row chunks. The next chunk of K is decoded into the other
 * register set while the tensor cores work on this one. One loop without peeled steps serves every
 * way of scaling: ptxas gives the operands of each copy registers of their own, and serializes
 * every wgmma where they do not suffice.
 */
#ifndef MM_CUDA_KERNELS_MULTIPLY_CUH
#define MM_CUDA_KERNELS_MULTIPLY_CUH

#include "cuda/kernels/shared.cuh"
#include "cuda/ptx/wgmma.cuh"

enum { OPERANDS = EXACT ? 32 : 16 /* registers of one chunk of 64 rows times 128 k */ };

/* A math thread's place in the ring. Everything here stays in registers. */
typedef struct mm_reader {
    uint32_t shared; /* address of the block's shared memory */
    uint32_t stages;
    uint32_t scales, scale_stride; /* address of the stages' scales, bytes of one */
    uint32_t stage, parity;
    uint32_t last, last_parity; /* the stage before */
} mm_reader;

/* Eight weights: the halves of a word become two registers of four E4M3 each. Volatile keeps this
 * before the wait and the group that it stands before. */
MM_DEVICE void mm_decode(uint32_t word, uint2 magnitudes, uint32_t *low, uint32_t *high) {
    const uint32_t selector = word & 0x77777777u;
    asm volatile("{\n.reg .b32 m;\n"
                 "prmt.b32 m, %1, %2, %3;\n"
                 "lop3.b32 %0, %4, 0x80808080, m, 0xEA;\n}" /* sign bits of %4, or m */
                 : "=r"(*low)
                 : "r"(magnitudes.x), "r"(magnitudes.y), "r"(selector), "r"(word));
    asm volatile("{\n.reg .b32 m;\n"
                 "prmt.b32 m, %1, %2, %3;\n"
                 "lop3.b32 %0, %4, 0x80808080, m, 0xEA;\n}"
                 : "=r"(*high)
                 : "r"(magnitudes.x), "r"(magnitudes.y), "r"(selector >> 16), "r"(word << 4));
}

/* One row of a chunk: four k32 steps into every second register from `a`. */
MM_DEVICE void mm_decode_row(uint4 words, uint2 first, uint2 second, uint32_t *a) {
    mm_decode(words.x, first, &a[0], &a[2]);
    mm_decode(words.y, first, &a[4], &a[6]);
    mm_decode(words.z, second, &a[8], &a[10]);
    mm_decode(words.w, second, &a[12], &a[14]);
}

/* Chunk `m` of this warpgroup in the stage; `mask` 0 gives zeros. */
MM_DEVICE void mm_decode_chunk(uint32_t shared, uint32_t stage, uint32_t m, uint32_t mask,
                               uint32_t (&a)[OPERANDS]) {
    const uint32_t lane = threadIdx.x % 128;
    const uint32_t chunk = shared + RING + stage * STAGE_BYTES + TOKEN_BYTES +
                           (threadIdx.x / 128 * MM_CHUNKS + m) * CHUNK_BYTES;
    const uint32_t scales = chunk + 2 * MM_CUDA_PLANE_BYTES, table = shared + TABLE;
    uint4 low = mm_shared_load_16(chunk + lane * 16);
    uint4 high = mm_shared_load_16(chunk + MM_CUDA_PLANE_BYTES + lane * 16);
    low.x &= mask, low.y &= mask, low.z &= mask, low.w &= mask;
    high.x &= mask, high.y &= mask, high.z &= mask, high.w &= mask;
#define MM_TABLE_ROW(byte) mm_shared_load_8(table + 8 * (byte))
#if MM_FORMAT == 0
    const uint32_t s = mm_shared_load_2(scales + lane * 2);
    const uint2 l = MM_TABLE_ROW(s & 255), h = MM_TABLE_ROW(s >> 8);
    mm_decode_row(low, l, l, a);
    mm_decode_row(high, h, h, a + 1);
#else
    const uint32_t s = mm_shared_load_4(scales + lane * 4);
    mm_decode_row(low, MM_TABLE_ROW(s & 255), MM_TABLE_ROW(s >> 16 & 255), a);
    mm_decode_row(high, MM_TABLE_ROW(s >> 8 & 255), MM_TABLE_ROW(s >> 24), a + 1);
#endif
#if MM_FORMAT == 1
    mm_decode_row(low, MM_TABLE_ROW(128 + (s & 255)), MM_TABLE_ROW(128 + (s >> 16 & 255)), a + 16);
    mm_decode_row(high, MM_TABLE_ROW(128 + (s >> 8 & 255)), MM_TABLE_ROW(128 + (s >> 24)), a + 17);
#endif
#undef MM_TABLE_ROW
}

MM_DEVICE void mm_multiply_chunk(uint32_t d, const uint32_t (&a)[OPERANDS],
                                 float (&sum)[MM_N / 2]) {
#pragma unroll
    for (int32_t j = 0; j < OPERANDS / 4; j++)
        mm_wgmma(sum, a[4 * j], a[4 * j + 1], a[4 * j + 2], a[4 * j + 3], d + j % 4 * 2,
                 MM_PROMOTE ? j > 0 : 1);
}

/* ---- scales per block ---- */

/* Columns of a lane whose exponents are read together: of 16 columns, or of 8 where a tile may
 * begin in the middle of the 16 rows that share a block of scales. */
enum { SCALE_COLUMNS = MM_N % 16 ? 2 : 4, SCALE_WORDS = MM_N / (4 * SCALE_COLUMNS) };

/* Exponent bytes of this lane's columns in a stage: byte 2 j + b of word n is column
 * 4 SCALE_COLUMNS n + 8 j + 2 c + b. `half`: the tile begins with the second half of 16 rows. */
MM_DEVICE uint32_t mm_exponent_word(const mm_reader *reader, uint32_t stage, uint32_t n,
                                    uint32_t half) {
    const uint32_t scales = reader->scales + stage * reader->scale_stride + 4 * (threadIdx.x % 4);
    if (SCALE_COLUMNS == 4)
        return mm_shared_load_4(scales + 16 * n);
    const uint32_t group = half + n; /* of eight rows */
    return mm_shared_load_2(scales + 16 * (group / 2) + 2 * (group % 2));
}

/*
 * 2^(byte - 127) of byte i. Volatile keeps it where it stands, behind the wait for the tensor
 * cores: before it, a lane's powers would need as many registers as it has columns.
 */
MM_DEVICE float mm_power(uint32_t bytes, uint32_t i) {
    uint32_t top;
    asm volatile("prmt.b32 %0, %1, 0, %2;" : "=r"(top) : "r"(bytes), "r"(i << 12 | 0x444u));
    return __uint_as_float(top >> 1);
}

MM_DEVICE void mm_zero(float (&sum)[MM_N / 2]) {
#pragma unroll
    for (uint32_t i = 0; i < MM_N / 2; i++)
        asm volatile("mov.b32 %0, 0;" : "=f"(sum[i]));
}

/* Multiplies the columns of word n by powers of two. */
MM_DEVICE void mm_scale_columns(float (&sum)[MM_N / 2], uint32_t n, uint32_t bytes) {
#pragma unroll
    for (uint32_t i = 0; i < SCALE_COLUMNS; i++) {
        const float f = mm_power(bytes, i);
        const uint32_t at = 2 * SCALE_COLUMNS * n + 4 * (i / 2) + i % 2;
        sum[at] *= f;
        sum[at + 2] *= f;
    }
}

/* How the scales of tokens enter the sum. */
enum { SCALES_NONE, SCALES_EXPONENTS, SCALES_FLOATS };

#if MM_PROMOTE
/* total = fma(sum, scale in the last stage, total); without `live` scales are 0. */
MM_DEVICE void mm_promote(const mm_reader *reader, int32_t kind, uint32_t half, bool live,
                          const float (&sum)[MM_N / 2], float (&total)[MM_N / 2]) {
#pragma unroll
    for (uint32_t n = 0; n < SCALE_WORDS; n++) {
        const uint32_t bytes = kind == SCALES_EXPONENTS
                                   ? mm_exponent_word(reader, reader->last, n, half) + 0x4F4F4F4Fu
                                   : 0;
        uint4 floats = {0, 0, 0, 0};
        if (kind == SCALES_FLOATS)
            floats = mm_shared_load_16(reader->scales + reader->last * reader->scale_stride +
                                       64 * n + 16 * (threadIdx.x % 4));
        const uint32_t words[4] = {floats.x, floats.y, floats.z, floats.w};
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const float scale = kind == SCALES_FLOATS      ? __uint_as_float(words[i])
                                : kind == SCALES_EXPONENTS ? mm_power(bytes, i)
                                                           : 1.0f;
            const float used = live ? scale : 0.0f;
            const uint32_t at = 8 * n + 4 * (i / 2) + i % 2;
            total[at] = __fmaf_rn(sum[at], used, total[at]);
            total[at + 2] = __fmaf_rn(sum[at + 2], used, total[at + 2]);
        }
    }
}
#endif

/*
 * One chunk of K for the warpgroup's 64-row chunks, with the register sets A0 and A1. While
 * its operands are decoded the chunk before is multiplied. Where K has an odd number of chunks the
 * last step multiplies zeros by the stage that is already there (LIVE false). BEGUN is false in the
 * first step, which has nothing to scale and no stage to give back.
 *
 * The second wait for a stage that is full is the branch that keeps ptxas from moving the decoding
 * behind the wait for the tensor cores.
 */
#define MM_STEP(A0, A1, LIVE, BEGUN)                                                               \
    do {                                                                                           \
        const bool live = (LIVE);                                                                  \
        const uint32_t stage = live ? reader->stage : reader->last;                                \
        const uint32_t parity = live ? reader->parity : reader->last_parity;                       \
        /* A reduction tells the compiler that all lanes have the same. */                         \
        const uint32_t tokens = __reduce_max_sync(                                                 \
            ~0u, mm_wgmma_descriptor(reader->shared + RING + stage * STAGE_BYTES));                \
        mm_barrier_wait(reader->shared + FULL + 8 * stage, parity);                                \
        mm_decode_chunk(reader->shared, stage, 0, live ? ~0u : 0u, A0);                            \
        if (MM_CHUNKS == 2)                                                                        \
            mm_decode_chunk(reader->shared, stage, 1, live ? ~0u : 0u, A1);                        \
        if (MM_PROMOTE || kind != SCALES_NONE) {                                                   \
            mm_barrier_wait(reader->shared + FULL + 8 * stage, parity);                            \
            mm_wgmma_wait();                                                                       \
            if (BEGUN)                                                                             \
                MM_SCALE(stage);                                                                   \
        }                                                                                          \
        mm_wgmma_fence();                                                                          \
        mm_multiply_chunk(tokens, A0, p0);                                                         \
        if (MM_CHUNKS == 2)                                                                        \
            mm_multiply_chunk(tokens, A1, p1);                                                     \
        mm_wgmma_commit();                                                                         \
        mm_wgmma_wait_but_one();                                                                   \
        __syncwarp();                                                                              \
        if (live && (BEGUN) && threadIdx.x % 32 == 0)                                              \
            mm_barrier_arrive(reader->shared + EMPTY + 8 * reader->last);                          \
        if (live) {                                                                                \
            reader->last = reader->stage;                                                          \
            reader->last_parity = reader->parity;                                                  \
            if (++reader->stage == reader->stages) {                                               \
                reader->stage = 0;                                                                 \
                reader->parity ^= 1;                                                               \
            }                                                                                      \
        }                                                                                          \
    } while (0)

#if MM_PROMOTE
#define MM_SCALE(stage)                                                                            \
    do {                                                                                           \
        mm_promote(reader, kind, half, true, p0, s0);                                              \
        mm_promote(reader, kind, half, true, p1, s1);                                              \
    } while (0)
#else
/* Before chunk c the sum is multiplied by 2^(e(c - 1) - e(c)). */
#define MM_SCALE(stage)                                                                            \
    do {                                                                                           \
        _Pragma("unroll") for (uint32_t n = 0; n < SCALE_WORDS; n++) {                             \
            const uint32_t ratio = mm_exponent_word(reader, reader->last, n, half) + 0x7F7F7F7Fu - \
                                   mm_exponent_word(reader, stage, n, half);                       \
            mm_scale_columns(s0, n, ratio);                                                        \
            if (MM_CHUNKS == 2)                                                                    \
                mm_scale_columns(s1, n, ratio);                                                    \
        }                                                                                          \
    } while (0)
#endif

/*
 * The sums of a tile over all of K: s0 and s1 for chunks 0 and 1 of this warpgroup, to be zero at
 * the beginning. With one chunk s1 is not used.
 */
MM_DEVICE void mm_multiply(mm_reader *reader, int32_t chunks, int32_t kind, uint32_t half,
                           float (&s0)[MM_N / 2], float (&s1)[MM_N / 2]) {
    uint32_t a0[OPERANDS], a1[OPERANDS], c0[OPERANDS], c1[OPERANDS];
#if MM_PROMOTE
    float p0[MM_N / 2], p1[MM_N / 2];
    mm_zero(p0);
    mm_zero(p1);
#else
#define p0 s0
#define p1 s1
#endif
#pragma unroll 1
    for (int32_t c = 0; c < chunks; c += 2) {
        MM_STEP(a0, a1, true, c > 0);
        MM_STEP(c0, c1, c + 1 < chunks, true);
    }
    mm_wgmma_wait();
#if MM_PROMOTE
    const bool odd = chunks % 2;
    mm_promote(reader, kind, half, !odd, p0, s0);
    mm_promote(reader, kind, half, !odd, p1, s1);
#else
    if (kind != SCALES_NONE) {
#pragma unroll
        for (uint32_t n = 0; n < SCALE_WORDS; n++) {
            const uint32_t power = mm_exponent_word(reader, reader->last, n, half) + 0x4F4F4F4Fu;
            mm_scale_columns(s0, n, power);
            if (MM_CHUNKS == 2)
                mm_scale_columns(s1, n, power);
        }
    }
#endif
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        mm_barrier_arrive(reader->shared + EMPTY + 8 * reader->last);
}

#endif
