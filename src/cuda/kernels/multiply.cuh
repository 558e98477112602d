/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The main loop: 4-bit weights from the ring become E4M3 registers, tokens stay in shared memory.
 *
 * A warpgroup multiplies two or four 64-row chunks, each with sums of its own, and operands in two
 * sets of registers: while the tensor cores work on one chunk, the next one's are decoded. Loops
 * have no peeled first or last step, and there are few of them: ptxas gives the operands of each
 * copy registers of their own, and serializes every wgmma where they do not suffice.
 */
#ifndef MM_CUDA_KERNELS_MULTIPLY_CUH
#define MM_CUDA_KERNELS_MULTIPLY_CUH

#include "cuda/kernels/shared.cuh"
#include "cuda/ptx/wgmma.cuh"

enum {
    OPERANDS = EXACT ? 32 : 16, /* registers of one chunk of 64 rows times 128 k */
    /* Whether there are loops of fewer columns, for tiles with so few tokens: where registers
     * suffice for another loop, and time is gained. */
    NARROWER =
        !MM_PROMOTE && !EXACT && (MM_N == 64 || (MM_N == 80 && NVFP4) || MM_N == 96 || MM_N == 112),
    FEWER = NARROWER ? MM_N - 16 : MM_N,
    FEWEST = NARROWER && MM_N == 96 && !NVFP4 ? MM_N - 32 : FEWER,
    /* The next chunk leaves shared memory before this one is multiplied, where registers suffice.
     */
    AHEAD = MATH_WARPS == 8 ? MM_N <= (NVFP4 ? 128 : 144) : MM_N <= (NVFP4 ? 24 : 32)
};

/* Where math is in the ring. */
typedef struct mm_position {
    uint32_t stage, parity;
} mm_position;

/* A math thread's view of it. Everything here stays in registers. */
typedef struct mm_reader {
    uint32_t shared;             /* address of the team's shared memory */
    uint32_t table;              /* of decoding */
    uint32_t codes, code_scales; /* of this lane in chunk 0 of its warpgroup, stage 0 */
    uint32_t stages;
    uint32_t scales, scale_stride; /* this lane's first exponents of stage 0, bytes of a stage */
    mm_position at;
    /* Of the main loop. */
    uint32_t place; /* of its stage, bytes from stage 0 on */
    uint32_t last;  /* the stage before */
} mm_reader;

/* threadIdx.x, read anew: what follows from it is not to stay in registers while the main loop
 * runs. */
MM_DEVICE uint32_t mm_thread(void) {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

/* An address that is not computed anew in every step: the optimizer does not see what from. */
MM_DEVICE uint32_t mm_kept(uint32_t address) {
    uint32_t kept;
    asm volatile("mov.b32 %0, %1;" : "=r"(kept) : "r"(address));
    return kept;
}

/* For one tile: what is here is not to stay in registers while the tile's sums are finished. */
MM_DEVICE mm_reader mm_reader_of(const mm_team *team, mm_position at) {
    const uint32_t thread = mm_thread(), lane = thread % 128;
    const uint32_t chunk =
        team->shared + RING + TOKEN_BYTES + thread % TEAM_THREADS / 128 * CHUNKS * CHUNK_BYTES;
    const mm_reader reader = {
        team->shared,
        team->block + TABLE,
        mm_kept(chunk + lane * 16),
        mm_kept(chunk + 2 * MM_CUDA_PLANE_BYTES + lane * (CHUNK_SCALE_BYTES / 128)),
        (uint32_t)team->args->stages,
        team->shared + mm_stage_scales(team->args) + 4 * (thread % 4),
        SCALE_ROWS * mm_scale_bytes(team->args),
        at};
    return reader;
}

/* x >> 16. Where MMAs of many columns leave few clocks for the pipe that shifts, by the other one:
 * the upper half times 1 and the lower one times 0. */
MM_DEVICE uint32_t mm_upper_half(uint32_t x) {
    if (MM_N < 128)
        return x >> 16;
    uint32_t upper;
    asm volatile("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(upper) : "r"(x), "r"(0x0100), "r"(0));
    return upper;
}

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
                 : "r"(magnitudes.x), "r"(magnitudes.y), "r"(mm_upper_half(selector)),
                   "r"(word << 4));
}

/* One row of a chunk: four k32 steps into every second register from `a`. */
MM_DEVICE void mm_decode_row(uint4 words, uint2 first, uint2 second, uint32_t *a) {
    mm_decode(words.x, first, &a[0], &a[2]);
    mm_decode(words.y, first, &a[4], &a[6]);
    mm_decode(words.z, second, &a[8], &a[10]);
    mm_decode(words.w, second, &a[12], &a[14]);
}

/* A lane's part of a chunk as it lies in the ring, and the rows of the table for it: of rows g and
 * g + 8, for NVFP4 of both halves of each. Exact NVFP4 has a second table of as many rows. */
enum { TABLE_ROWS = NVFP4 ? 4 : 2, TABLES = EXACT ? 2 : 1 };

typedef struct mm_packed {
    uint4 low, high;
    uint2 rows[TABLES][TABLE_ROWS];
} mm_packed;

/* Chunk `m` of this warpgroup in the stage at `place`. */
MM_DEVICE void mm_fetch(const mm_reader *reader, uint32_t place, uint32_t m, mm_packed *packed) {
    place += m * CHUNK_BYTES;
    const uint32_t codes = reader->codes + place, scales = reader->code_scales + place;
    /* Byte by byte: to take a word apart is more instructions. */
    uint32_t rows[TABLE_ROWS];
#pragma unroll
    for (uint32_t i = 0; i < TABLE_ROWS; i++)
        rows[i] = mm_shared_load_1(scales + i);
    packed->low = mm_shared_load_16(codes);
    packed->high = mm_shared_load_16(codes + MM_CUDA_PLANE_BYTES);
#pragma unroll
    for (uint32_t t = 0; t < TABLES; t++)
#pragma unroll
        for (uint32_t i = 0; i < TABLE_ROWS; i++)
            packed->rows[t][i] = mm_shared_load_8(reader->table + 1024 * t + 8 * rows[i]);
}

MM_DEVICE void mm_decode_chunk(const mm_packed *packed, uint32_t (&a)[OPERANDS]) {
#pragma unroll
    for (uint32_t t = 0; t < TABLES; t++) {
        const uint2(&rows)[TABLE_ROWS] = packed->rows[t];
        mm_decode_row(packed->low, rows[0], rows[TABLE_ROWS - 2], a + 16 * t);
        mm_decode_row(packed->high, rows[1], rows[TABLE_ROWS - 1], a + 16 * t + 1);
    }
}

/* One chunk's group of MMAs. */
template <int32_t COLUMNS>
MM_DEVICE void
mm_multiply_chunk(const uint64_t (&d)[4], const uint32_t (&a)[OPERANDS], float (&sum)[MM_N / 2]) {
    mm_wgmma_fence();
#pragma unroll
    for (int32_t j = 0; j < OPERANDS / 4; j++)
        mm_wgmma<COLUMNS>(sum, &a[4 * j], d[j % 4], MM_PROMOTE ? j > 0 : 1);
    mm_wgmma_commit();
}

/* ---- scales per block ---- */

/* Columns of a lane whose exponents are read together: of 16 columns, or of 8 where a tile may
 * begin in the middle of the 16 rows that share a block of scales. */
enum { SCALE_COLUMNS = MM_N % 16 ? 2 : 4, SCALE_WORDS = MM_N / (4 * SCALE_COLUMNS) };

/* Exponent bytes of this lane's columns in a stage: byte 2 j + b of word n is column
 * 4 SCALE_COLUMNS n + 8 j + 2 c + b. `half`: the tile begins with the second half of 16 rows. */
MM_DEVICE uint32_t mm_exponent_word(const mm_reader *reader, uint32_t stage, uint32_t n,
                                    uint32_t half) {
    const uint32_t scales = reader->scales + stage * reader->scale_stride;
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

#if MM_PROMOTE
/* total = fma(sum, scale in the last stage, total). */
MM_DEVICE void mm_promote(const mm_reader *reader, int32_t kind, uint32_t half,
                          const float (&sum)[MM_N / 2], float (&total)[MM_N / 2]) {
#pragma unroll
    for (uint32_t n = 0; n < SCALE_WORDS; n++) {
        const uint32_t bytes = kind == SCALES_EXPONENTS
                                   ? mm_exponent_word(reader, reader->last, n, half) + 0x4F4F4F4Fu
                                   : 0;
        uint4 floats = {0, 0, 0, 0};
        if (kind == SCALES_FLOATS) /* of which a lane has four times as many bytes */
            floats = mm_shared_load_16(reader->scales + reader->last * reader->scale_stride +
                                       64 * n + 12 * (threadIdx.x % 4));
        const uint32_t words[4] = {floats.x, floats.y, floats.z, floats.w};
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const float scale = kind == SCALES_FLOATS      ? __uint_as_float(words[i])
                                : kind == SCALES_EXPONENTS ? mm_power(bytes, i)
                                                           : 1.0f;
            const uint32_t at = 8 * n + 4 * (i / 2) + i % 2;
            total[at] = __fmaf_rn(sum[at], scale, total[at]);
            total[at + 2] = __fmaf_rn(sum[at + 2], scale, total[at + 2]);
        }
    }
}
#else
/* Whether any exponent of a stage differs from that of the stage before; the same in all lanes,
 * each of which looks at other tokens. */
MM_DEVICE bool mm_exponents_change(const mm_reader *reader) {
    const uint32_t lane = mm_thread() % 32;
    const uint32_t scales = reader->scales + 4 * (lane & ~3u); /* its lowest bits are in there */
    uint32_t changed = 0;
#pragma unroll
    for (uint32_t word = 0; word < SCALE_ROWS / 4; word += 32)
        if (word + lane < SCALE_ROWS / 4)
            changed |=
                mm_shared_load_4(scales + reader->last * reader->scale_stride + 4 * word) ^
                mm_shared_load_4(scales + reader->at.stage * reader->scale_stride + 4 * word);
    return __reduce_or_sync(~0u, changed) != 0;
}

/* Before chunk c of K the sums are multiplied by 2^(e(c - 1) - e(c)): the exponents, 127 more. */
MM_DEVICE void mm_ratios(const mm_reader *reader, uint32_t half, uint32_t (&bytes)[SCALE_WORDS]) {
#pragma unroll
    for (uint32_t n = 0; n < SCALE_WORDS; n++)
        bytes[n] = mm_exponent_word(reader, reader->last, n, half) + 0x7F7F7F7Fu -
                   mm_exponent_word(reader, reader->at.stage, n, half);
}
#endif

/* A branch that is never taken, and which the compiler moves nothing across. */
MM_DEVICE void mm_pin(uint32_t address) {
    asm volatile("{\n.reg .pred p;\n"
                 "AGAIN_%=:\n"
                 "setp.eq.u32 p, %0, 0xFFFFFFFF;\n"
                 "@p bra AGAIN_%=;\n}" ::"r"(address));
}

/*
 * The loop over K, for the first COLUMNS columns. `p` is what MMAs add to: sums of a block of K
 * where these are promoted to `s`, otherwise `s` itself. SCALED: exponents of tokens may change on
 * the way, or sums are promoted. Begins with the first stage there, and its first chunk fetched if
 * AHEAD; leaves the last MMAs under way.
 */
template <int32_t COLUMNS, bool SCALED>
MM_DEVICE void mm_multiply_columns(mm_reader *reader, int32_t chunks, int32_t kind, uint32_t half,
                                   mm_packed *packed, float (&p)[CHUNKS][MM_N / 2],
                                   float (&s)[CHUNKS][MM_N / 2]) {
    uint32_t a[2][OPERANDS];
    bool change = false; /* of exponents, at the step to come */
    /* Four chunks in the body: going back costs 50 clocks. */
#pragma unroll 4 / CHUNKS
    for (int32_t c = 0; c < chunks; c++) {
        uint64_t tokens[4];
        mm_wgmma_descriptors(tokens, reader->shared + RING + reader->place);
        const uint32_t last = reader->last, stage = reader->at.stage, place = reader->place;
#pragma unroll
        for (uint32_t m = 0; m < CHUNKS; m++) {
            if (!AHEAD)
                mm_fetch(reader, place, m, packed);
            mm_decode_chunk(packed, a[m % 2]);
            if (m + 1 < CHUNKS) {
                if (AHEAD)
                    mm_fetch(reader, place, m + 1, packed);
            } else {
                reader->last = stage;
                reader->place += STAGE_BYTES;
                if (++reader->at.stage == reader->stages) {
                    reader->place = 0;
                    reader->at.stage = 0;
                    reader->at.parity ^= 1;
                }
                if (c + 1 < chunks) {
                    mm_barrier_wait(reader->shared + FULL + 8 * reader->at.stage,
                                    reader->at.parity);
                    if (AHEAD)
                        mm_fetch(reader, reader->place, 0, packed);
                }
            }
            if (SCALED && m == 0 && (MM_PROMOTE || change)) {
                mm_pin(reader->shared); /* the decoding stays before the wait */
#if MM_PROMOTE
                mm_wgmma_wait();
#pragma unroll
                for (uint32_t i = 0; i < CHUNKS; i++)
                    mm_promote(reader, kind, half, p[i], s[i]);
#else
                uint32_t bytes[SCALE_WORDS];
                mm_ratios(reader, half, bytes);
                mm_wgmma_wait();
#pragma unroll
                for (uint32_t n = 0; n < SCALE_WORDS; n++)
#pragma unroll
                    for (uint32_t i = 0; i < CHUNKS; i++)
                        mm_scale_columns(s[i], n, bytes[n]);
#endif
            }
            mm_multiply_chunk<COLUMNS>(tokens, a[m % 2], p[m]);
            mm_wgmma_wait_but_one();
            if (m == 1) {
                /* Nobody reads the stage before any more. */
                __syncwarp();
                if (c > 0 && threadIdx.x % 32 == 0)
                    mm_barrier_arrive(reader->shared + EMPTY + 8 * last);
            }
#if !MM_PROMOTE
            if (SCALED && m + 1 == CHUNKS)
                change = kind == SCALES_EXPONENTS && c + 1 < chunks && mm_exponents_change(reader);
#endif
        }
    }
}

/*
 * The sums of a tile over all of K, of each chunk of this warpgroup, to be zero at the beginning.
 * `valid`: tokens in the tile, the same in all lanes.
 */
MM_DEVICE void mm_multiply(mm_reader *reader, int32_t chunks, int32_t kind, uint32_t half,
                           int32_t valid, float (&s)[CHUNKS][MM_N / 2]) {
#if MM_PROMOTE
    float p[CHUNKS][MM_N / 2];
#pragma unroll
    for (uint32_t m = 0; m < CHUNKS; m++)
        mm_zero(p[m]);
#else
#define p s
#endif
    /* Reductions tell the compiler that all lanes have the same. */
    reader->shared = __reduce_max_sync(~0u, reader->shared);
    reader->at.stage = __reduce_max_sync(~0u, reader->at.stage);
    reader->at.parity = __reduce_max_sync(~0u, reader->at.parity);
    reader->place = reader->at.stage * STAGE_BYTES;
    reader->last = reader->at.stage;
    mm_packed packed;
    mm_barrier_wait(reader->shared + FULL + 8 * reader->at.stage, reader->at.parity);
    if (AHEAD)
        mm_fetch(reader, reader->place, 0, &packed);
    const int32_t columns = kind == SCALES_EXPONENTS ? MM_N : valid;
    if (FEWEST < FEWER && columns <= FEWEST)
        mm_multiply_columns<FEWEST, false>(reader, chunks, kind, half, &packed, p, s);
    else if (FEWER < MM_N && columns <= FEWER)
        mm_multiply_columns<FEWER, false>(reader, chunks, kind, half, &packed, p, s);
    else
        mm_multiply_columns<MM_N, true>(reader, chunks, kind, half, &packed, p, s);
    mm_wgmma_wait();
#if MM_PROMOTE
#pragma unroll
    for (uint32_t i = 0; i < CHUNKS; i++)
        mm_promote(reader, kind, half, p[i], s[i]);
#else
    if (kind != SCALES_NONE) {
#pragma unroll
        for (uint32_t n = 0; n < SCALE_WORDS; n++) {
            const uint32_t power = mm_exponent_word(reader, reader->last, n, half) + 0x4F4F4F4Fu;
#pragma unroll
            for (uint32_t i = 0; i < CHUNKS; i++)
                mm_scale_columns(s[i], n, power);
        }
    }
#endif
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        mm_barrier_arrive(reader->shared + EMPTY + 8 * reader->last);
}

#endif
