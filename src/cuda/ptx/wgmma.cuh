/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wgmma.mma_async.m64nNk32, E4M3 times E4M3 into FP32: A from registers, B from shared memory in
 * the 128-byte swizzle. N is MM_N. Lane (g, c) of warp w of the warpgroup holds
 *   d[4 j + b], d[4 j + 2 + b]   rows 16 w + g and 16 w + g + 8 of column 8 j + 2 c + b
 */
#ifndef MM_CUDA_PTX_WGMMA_CUH
#define MM_CUDA_PTX_WGMMA_CUH

#include "cuda/ptx/barrier.cuh"

/* Registers are out before they are read, and accumulators are stable between groups. */
MM_DEVICE void mm_wgmma_fence(void) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

MM_DEVICE void mm_wgmma_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

MM_DEVICE void mm_wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

/* Until at most the last group is under way. */
MM_DEVICE void mm_wgmma_wait_but_one(void) {
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

/*
 * Where B of a k32 step lies in rows of 128 bytes, of which it has the 32 from 32 `step` on: groups
 * of eight rows are 1024 bytes apart. Addresses of shared memory need not be masked. Assembly, so
 * that a descriptor stays where it is made, in a pair of uniform registers: what the compiler
 * derives from another one it makes anew, and moves, for every instruction.
 */
#define MM_WGMMA_DESCRIPTOR(descriptor, address, step)                                             \
    asm volatile("{\n.reg .b32 low;\n"                                                             \
                 "shr.u32 low, %1, 4;\n"                                                           \
                 "add.u32 low, low, 1 << 16 | 2 * " #step ";\n"                                    \
                 "mov.b64 %0, {low, 1 << 30 | 1 << 6};\n}" /* 128-byte swizzle, 1024 bytes */      \
                 : "=l"(descriptor)                                                                \
                 : "r"(address))

/* Of all steps of a chunk of K. */
MM_DEVICE void mm_wgmma_descriptors(uint64_t (&d)[4], uint32_t address) {
    MM_WGMMA_DESCRIPTOR(d[0], address, 0);
    MM_WGMMA_DESCRIPTOR(d[1], address, 1);
    MM_WGMMA_DESCRIPTOR(d[2], address, 2);
    MM_WGMMA_DESCRIPTOR(d[3], address, 3);
}

/* Names and operands of accumulators, eight columns (four registers) a piece. */
#define MM_NAMES_1 "%0, %1, %2, %3"
#define MM_NAMES_2 MM_NAMES_1 ", %4, %5, %6, %7"
#define MM_NAMES_3 MM_NAMES_2 ", %8, %9, %10, %11"
#define MM_NAMES_4 MM_NAMES_3 ", %12, %13, %14, %15"
#define MM_NAMES_5 MM_NAMES_4 ", %16, %17, %18, %19"
#define MM_NAMES_6 MM_NAMES_5 ", %20, %21, %22, %23"
#define MM_NAMES_7 MM_NAMES_6 ", %24, %25, %26, %27"
#define MM_NAMES_8 MM_NAMES_7 ", %28, %29, %30, %31"
#define MM_NAMES_9 MM_NAMES_8 ", %32, %33, %34, %35"
#define MM_NAMES_10 MM_NAMES_9 ", %36, %37, %38, %39"
#define MM_NAMES_11 MM_NAMES_10 ", %40, %41, %42, %43"
#define MM_NAMES_12 MM_NAMES_11 ", %44, %45, %46, %47"
#define MM_NAMES_13 MM_NAMES_12 ", %48, %49, %50, %51"
#define MM_NAMES_14 MM_NAMES_13 ", %52, %53, %54, %55"
#define MM_NAMES_15 MM_NAMES_14 ", %56, %57, %58, %59"
#define MM_NAMES_16 MM_NAMES_15 ", %60, %61, %62, %63"
#define MM_NAMES_17 MM_NAMES_16 ", %64, %65, %66, %67"
#define MM_NAMES_18 MM_NAMES_17 ", %68, %69, %70, %71"
#define MM_OPERANDS_1 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define MM_OPERANDS_2 MM_OPERANDS_1, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define MM_OPERANDS_3 MM_OPERANDS_2, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define MM_OPERANDS_4 MM_OPERANDS_3, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define MM_OPERANDS_5 MM_OPERANDS_4, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define MM_OPERANDS_6 MM_OPERANDS_5, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define MM_OPERANDS_7 MM_OPERANDS_6, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define MM_OPERANDS_8 MM_OPERANDS_7, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define MM_OPERANDS_9 MM_OPERANDS_8, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define MM_OPERANDS_10 MM_OPERANDS_9, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define MM_OPERANDS_11 MM_OPERANDS_10, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define MM_OPERANDS_12 MM_OPERANDS_11, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define MM_OPERANDS_13 MM_OPERANDS_12, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define MM_OPERANDS_14 MM_OPERANDS_13, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define MM_OPERANDS_15 MM_OPERANDS_14, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define MM_OPERANDS_16 MM_OPERANDS_15, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define MM_OPERANDS_17 MM_OPERANDS_16, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define MM_OPERANDS_18 MM_OPERANDS_17, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])

/* The numbers of `a` and of what follows it, behind `pieces` accumulators. */
#define MM_WGMMA(columns, pieces, a0, a1, a2, a3, b, add)                                          \
    asm volatile("{\n.reg .pred p;\n"                                                              \
                 "setp.ne.b32 p, %" #add ", 0;\n"                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3 "                 \
                 "{" MM_NAMES_##pieces "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b         \
                                       ", p, 1, 1;\n}"                                             \
                 : MM_OPERANDS_##pieces                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "r"(add_to))

/* d = A B + (add_to ? d : 0), of the first `COLUMNS` columns. `a`: four registers. */
template <int32_t COLUMNS>
MM_DEVICE void mm_wgmma(float *d, const uint32_t *a, uint64_t descriptor, uint32_t add_to) {
    if constexpr (COLUMNS == 8)
        MM_WGMMA(8, 1, 4, 5, 6, 7, 8, 9);
    else if constexpr (COLUMNS == 16)
        MM_WGMMA(16, 2, 8, 9, 10, 11, 12, 13);
    else if constexpr (COLUMNS == 24)
        MM_WGMMA(24, 3, 12, 13, 14, 15, 16, 17);
    else if constexpr (COLUMNS == 32)
        MM_WGMMA(32, 4, 16, 17, 18, 19, 20, 21);
    else if constexpr (COLUMNS == 40)
        MM_WGMMA(40, 5, 20, 21, 22, 23, 24, 25);
    else if constexpr (COLUMNS == 48)
        MM_WGMMA(48, 6, 24, 25, 26, 27, 28, 29);
    else if constexpr (COLUMNS == 64)
        MM_WGMMA(64, 8, 32, 33, 34, 35, 36, 37);
    else if constexpr (COLUMNS == 80)
        MM_WGMMA(80, 10, 40, 41, 42, 43, 44, 45);
    else if constexpr (COLUMNS == 96)
        MM_WGMMA(96, 12, 48, 49, 50, 51, 52, 53);
    else if constexpr (COLUMNS == 112)
        MM_WGMMA(112, 14, 56, 57, 58, 59, 60, 61);
    else if constexpr (COLUMNS == 128)
        MM_WGMMA(128, 16, 64, 65, 66, 67, 68, 69);
    else if constexpr (COLUMNS == 144)
        MM_WGMMA(144, 18, 72, 73, 74, 75, 76, 77);
    else
        static_assert(COLUMNS < 0, "MMAs of this width are not written down here");
}

#endif
