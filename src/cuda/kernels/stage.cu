/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Takes a batch: BF16 rows, or codes that the caller has written into the views, become staged rows
 * in the order of cuda_layout.h. One thread block for each token.
 */
#include "cuda/kernels/abi.h"
#include "cuda/ptx/barrier.cuh"
#include "megamoe/layer.h"
#include "num/exp.h"
#include "num/input.h"

enum { THREADS = 256, WARPS = THREADS / 32, BLOCK_LANES = 16 /* that hold 128 channels */ };

/* Where four codes from channel k on go; k is a multiple of 4. */
MM_DEVICE int64_t place_of(int64_t k) {
    const int64_t in = k % 128;
    return k - in + 32 * (in / 8 % 4) + 16 * (in / 4 % 2) + 4 * (in / 32);
}

/* Eight BF16 from channel k on, zero beyond `hidden`. */
MM_DEVICE void load_eight(const uint16_t *row, int64_t k, int32_t hidden, bool wide, float *x) {
    if (wide && k + 8 <= hidden) {
        const uint4 v = *(const uint4 *)(row + k);
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int32_t i = 0; i < 8; i++)
            x[i] = mm_bf16_to_f32((uint16_t)(words[i / 2] >> 16 * (i % 2)));
        return;
    }
#pragma unroll
    for (int32_t i = 0; i < 8; i++)
        x[i] = k + i < hidden ? mm_bf16_to_f32(row[k + i]) : 0.0f;
}

/* As bits: NaN and infinity are larger than every finite magnitude. */
MM_DEVICE uint32_t largest_of(const float *x) {
    uint32_t largest = 0;
#pragma unroll
    for (int32_t i = 0; i < 8; i++) {
        const uint32_t bits = __float_as_uint(x[i]) & 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

MM_DEVICE uint32_t largest_in(uint32_t value, int32_t lanes) {
    for (int32_t step = 1; step < lanes; step *= 2) {
        const uint32_t other = __shfl_xor_sync(~0u, value, step);
        value = other > value ? other : value;
    }
    return value;
}

/* Codes of eight channels, in two words of four; 0x7F everywhere where the block is not finite. */
MM_DEVICE void store_eight(uint8_t *codes, int64_t k, const float *x, float lift, float inverse,
                           bool finite, int32_t hidden) {
#pragma unroll
    for (int32_t half = 0; half < 2; half++) {
        uint32_t word = 0;
#pragma unroll
        for (int32_t pair = 0; pair < 2; pair++) {
            const int32_t i = 4 * half + 2 * pair;
            uint16_t two;
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
                : "=h"(two)
                : "f"(x[i + 1] * lift * inverse), "f"(x[i] * lift * inverse));
            word |= (uint32_t)two << 16 * pair;
        }
        if (!finite) {
            word = 0;
            for (int32_t i = 0; i < 4; i++)
                word |= k + 4 * half + i < hidden ? 0x7Fu << 8 * i : 0;
        }
        *(uint32_t *)(codes + place_of(k + 4 * half)) = word;
    }
}

MM_DEVICE void quantize_by_token(const mm_cuda_stage_args *args, const uint16_t *row, bool wide,
                                 int64_t token, uint8_t *codes, uint32_t *shared) {
    const int64_t width = (int64_t)args->chunks * 128;
    float x[8];
    uint32_t largest = 0;
    for (int64_t k = threadIdx.x * 8; k < width; k += THREADS * 8) {
        load_eight(row, k, args->hidden, wide, x);
        const uint32_t here = largest_of(x);
        largest = here > largest ? here : largest;
    }
    largest = largest_in(largest, 32);
    __syncthreads(); /* the token before has been read from `shared` */
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int32_t i = 0; i < WARPS; i++)
        largest = shared[i] > largest ? shared[i] : largest;
    const bool finite = largest < 0x7F800000u;
    mm_token_scale scale = {1.0f, 0.0f, 0.0f, 1.0f}; /* of a zero row */
    if (!finite)
        scale.scale = 1.0f;
    else if (largest)
        scale = mm_token_scale_of(__uint_as_float(largest));
    for (int64_t k = threadIdx.x * 8; k < width; k += THREADS * 8) {
        load_eight(row, k, args->hidden, wide, x);
        store_eight(codes, k, x, scale.lift, scale.inverse, finite, args->hidden);
    }
    if (threadIdx.x == 0) {
        args->staged.scales[token] = scale.scale;
        args->staged.tiny[token] = scale.factor != 1.0f;
    }
}

MM_DEVICE void quantize_by_block(const mm_cuda_stage_args *args, const uint16_t *row, bool wide,
                                 int64_t token, uint8_t *codes) {
    const int64_t width = (int64_t)args->chunks * 128;
    float x[8];
    /* All lanes of a warp stay in the loop together: they exchange what they found. */
    for (int64_t k0 = (int64_t)(threadIdx.x & ~31u) * 8; k0 < width; k0 += THREADS * 8) {
        const int64_t k = k0 + threadIdx.x % 32 * 8;
        load_eight(row, k, args->hidden, wide, x);
        const uint32_t largest = largest_in(largest_of(x), BLOCK_LANES);
        const bool finite = largest < 0x7F800000u;
        const int32_t exponent = mm_block_exponent(largest);
        if (k >= width)
            continue;
        store_eight(codes, k, x, 1.0f, mm_exp2i(-exponent), finite, args->hidden);
        if (threadIdx.x % BLOCK_LANES == 0)
            args->staged.blocks[token * args->chunks + k / 128] =
                (uint8_t)(MM_BLOCK_BYTE_ZERO + exponent);
    }
    if (threadIdx.x == 0)
        args->staged.tiny[token] = 0;
}

/* The caller's codes into our order. */
MM_DEVICE void take_codes(const mm_cuda_stage_args *args, int64_t token, uint8_t *codes) {
    const uint8_t *row = args->view_codes + token * args->view_stride;
    const int64_t width = (int64_t)args->chunks * 128;
    for (int64_t k = threadIdx.x * 4; k < width; k += THREADS * 4) {
        uint32_t word = 0;
        if (k + 4 <= args->hidden)
            word = *(const uint32_t *)(row + k);
        else
            for (int32_t i = 0; i < 4; i++)
                word |= k + i < args->hidden ? (uint32_t)row[k + i] << 8 * i : 0;
        *(uint32_t *)(codes + place_of(k)) = word;
    }
    if (threadIdx.x == 0)
        args->staged.tiny[token] = 0;
}

/* Keeps the error of the lowest order. Rare, so a lock will do. */
MM_DEVICE void record_error(mm_cuda_state *state, uint64_t order, int64_t value) {
    while (atomicCAS(&state->lock, 0, 1) != 0)
        __nanosleep(100);
    __threadfence();
    volatile mm_cuda_state *s = state;
    if (order < s->order) {
        s->order = order;
        s->value = value;
    }
    __threadfence();
    atomicExch(&state->lock, 0);
}

MM_DEVICE void take_routes(const mm_cuda_stage_args *args, int64_t token) {
    const int32_t slot = (int32_t)threadIdx.x;
    if (slot >= args->topk)
        return;
    const int64_t at = token * args->topk + slot;
    int64_t id;
    if (!args->ids)
        id = args->staged.ids[at];
    else if (args->ids_are_64)
        id = ((const int64_t *)args->ids)[token * args->ids_stride + slot];
    else
        id = ((const int32_t *)args->ids)[token * args->ids_stride + slot];
    const bool good = id >= -1 && id < args->experts;
    if (!good)
        record_error(args->state, (uint64_t)(token * (args->topk + 1) + slot), id);
    if (args->ids)
        args->staged.ids[at] = good ? (int32_t)id : -1;
    if (!args->weights)
        return;
    if (args->weights_are_bf16)
        args->staged.weights[at] =
            mm_bf16_to_f32(((const uint16_t *)args->weights)[token * args->weights_stride + slot]);
    else
        args->staged.weights[at] =
            ((const float *)args->weights)[token * args->weights_stride + slot];
}

/* The caller's exponent bytes. */
MM_DEVICE void check_blocks(const mm_cuda_stage_args *args, int64_t token) {
    for (int32_t c = threadIdx.x; c < args->chunks; c += THREADS) {
        const int32_t byte = args->staged.blocks[token * args->chunks + c];
        const int32_t exponent = byte - MM_BLOCK_BYTE_ZERO;
        if (exponent < MM_BLOCK_EXPONENT_MIN || exponent > MM_BLOCK_EXPONENT_MAX)
            record_error(args->state, (uint64_t)(token * (args->topk + 1) + args->topk), byte);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    mm_stage(const __grid_constant__ mm_cuda_stage_args args) {
    __shared__ uint32_t shared[WARPS];
    if (blockIdx.x == 0 && threadIdx.x == 0)
        args.state->tokens = args.tokens;
    for (int64_t token = blockIdx.x; token < args.tokens; token += gridDim.x) {
        uint8_t *codes = args.staged.codes + token * args.chunks * 128;
        take_routes(&args, token);
        if (!args.x) {
            take_codes(&args, token, codes);
            if (args.input_scale == MEGAMOE_SCALE_BLOCK)
                check_blocks(&args, token);
            continue;
        }
        const uint16_t *row = args.x + token * args.x_stride;
        const bool wide = (uint64_t)row % 16 == 0;
        if (args.input_scale == MEGAMOE_SCALE_TOKEN)
            quantize_by_token(&args, row, wide, token, codes, shared);
        else
            quantize_by_block(&args, row, wide, token, codes);
    }
}
