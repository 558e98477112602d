/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Message passing between GPUs as the forward does it, and as it must not be done: a release for
 * less than the system shows on two GPUs only. On one GPU the right ways are tried alone.
 */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/device.h"
#include "cuda/device.h"
#include "cuda/shared.h"
#include "gpu.h"
#include "litmus.h"

enum { MESSAGES = 10000000, DEADLINE_MS = 5000 };

GPU_CUBIN(litmus)

/* The writing GPU and the reading one. */
typedef struct side {
    megamoe_device *device;
    megamoe_comm *comm;
    mm_cuda_shared memory;
    CUdeviceptr memories[2];
    CUmodule module;
    CUfunction function;
    CUstream stream;
} side;

static void enter(const side *s) {
    gpu_check(mm_cu.cuCtxSetCurrent(s->device->cuda->context), "cuCtxSetCurrent");
}

static void open_side(side *s, const char *name, const char *entry, size_t bytes) {
    T_OK(megamoe_device_open(name, NULL, &s->device));
    enter(s);
    gpu_check(mm_cu.cuModuleLoadData(&s->module, litmus_image()), "cuModuleLoadData");
    gpu_check(mm_cu.cuModuleGetFunction(&s->function, s->module, entry), "cuModuleGetFunction");
    gpu_check(mm_cu.cuStreamCreate(&s->stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    T_OK(mm_cuda_shared_open(s->comm, s->device->cuda, bytes, &s->memory));
}

static void open_sides(side sides[2], bool two) {
    megamoe_comm *comms[2];
    T_OK(megamoe_comm_folded(2, comms));
    for (int i = 0; i < 2; i++)
        sides[i] = (side){.comm = comms[i]};
    open_side(&sides[0], "cuda:0", "litmus_write", sizeof(litmus_outbox));
    open_side(&sides[1], two ? "cuda:1" : "cuda:0", "litmus_read", sizeof(litmus_inbox));
    mm_cuda_shared_card cards[2];
    for (int i = 0; i < 2; i++)
        cards[i] = mm_cuda_shared_card_of(&sides[i].memory, sides[i].device->cuda);
    for (int i = 0; i < 2; i++) {
        enter(&sides[i]);
        T_OK(mm_cuda_shared_meet(sides[i].comm, sides[i].device->cuda, &sides[i].memory, cards,
                                 sides[i].memories));
    }
}

static void close_sides(side sides[2]) {
    for (int i = 0; i < 2; i++) {
        enter(&sides[i]);
        gpu_check(mm_cu.cuStreamSynchronize(sides[i].stream), "cuStreamSynchronize");
    }
    for (int i = 0; i < 2; i++) {
        enter(&sides[i]);
        mm_cuda_shared_close(&sides[i].memory);
        gpu_check(mm_cu.cuModuleUnload(sides[i].module), "cuModuleUnload");
        gpu_check(mm_cu.cuStreamDestroy(sides[i].stream), "cuStreamDestroy");
        megamoe_device_close(sides[i].device);
        megamoe_comm_close(sides[i].comm);
    }
}

static void launch(const side *s, litmus_args *args, int32_t blocks) {
    enter(s);
    const CUlaunchConfig config = {.gridDimX = (unsigned)blocks,
                                   .gridDimY = 1,
                                   .gridDimZ = 1,
                                   .blockDimX = LITMUS_THREADS,
                                   .blockDimY = 1,
                                   .blockDimZ = 1,
                                   .hStream = s->stream};
    void *arguments[] = {args};
    gpu_check(mm_cu.cuLaunchKernelEx(&config, s->function, arguments, NULL), "cuLaunchKernelEx");
}

static const char *const names[LITMUS_MODES] = {
    "stores, release.sys",         "bulk copies, release.sys",   "counted blocks, fence.sys",
    "wrong: stores, relaxed",      "wrong: stores, release.cta", "wrong: stores, release.gpu",
    "wrong: bulk copies not done",
};

/* Messages that were not there when the reader was told so. */
static int64_t violations(side sides[2], litmus_mode mode) {
    static const size_t sizes[2] = {sizeof(litmus_outbox), sizeof(litmus_inbox)};
    for (int i = 0; i < 2; i++) {
        enter(&sides[i]);
        gpu_fill((void *)(uintptr_t)sides[i].memory.own, 0, sizes[i]);
    }
    litmus_args args = {.mode = mode,
                        .messages = MESSAGES / LITMUS_GROUPS,
                        .inbox = (void *)(uintptr_t)sides[0].memories[1],
                        .outbox = (void *)(uintptr_t)sides[0].memories[0],
                        .deadline_ns = (uint64_t)DEADLINE_MS * 1000000};
    launch(&sides[1], &args, LITMUS_GROUPS);
    launch(&sides[0], &args, LITMUS_GROUPS * (mode == LITMUS_COUNTED ? LITMUS_TEAM : 1));
    for (int i = 0; i < 2; i++) {
        enter(&sides[i]);
        gpu_check(mm_cu.cuStreamSynchronize(sides[i].stream), "cuStreamSynchronize");
    }
    uint64_t wrong;
    uint32_t stuck[2];
    enter(&sides[1]);
    gpu_read(&wrong, (void *)(uintptr_t)(sides[1].memory.own + offsetof(litmus_inbox, wrong)),
             sizeof wrong);
    gpu_read(&stuck[1], (void *)(uintptr_t)(sides[1].memory.own + offsetof(litmus_inbox, stuck)),
             4);
    enter(&sides[0]);
    gpu_read(&stuck[0], (void *)(uintptr_t)(sides[0].memory.own + offsetof(litmus_outbox, stuck)),
             4);
    T_CHECK_MSG(!stuck[0] && !stuck[1], "%s: somebody waited in vain", names[mode]);
    printf("  %-28s %10d messages, %10d wrong\n", names[mode], MESSAGES, (int)wrong);
    return (int64_t)wrong;
}

static void check_right_ways(bool two) {
    side sides[2];
    open_sides(sides, two);
    for (int mode = 0; mode < LITMUS_WRONG_RELAXED; mode++)
        T_EQ_INT(violations(sides, (litmus_mode)mode), 0);
    close_sides(sides);
}

static void need_gpus(int32_t n) {
    megamoe_device_close(gpu_open(NULL));
    if (!litmus_image())
        T_SKIP("this build has no CUDA kernels");
    megamoe_device *second = NULL;
    if (n > 1 && megamoe_device_open("cuda:1", NULL, &second) != MEGAMOE_OK)
        T_SKIP("this needs two GPUs: %s", megamoe_last_error());
    megamoe_device_close(second);
}

T_CASE(litmus_within_a_gpu) {
    need_gpus(1);
    check_right_ways(false);
}

T_CASE(litmus_between_gpus) {
    need_gpus(2);
    check_right_ways(true);
}

/* What the cases above could not see they would not be worth much for. */
T_CASE(litmus_wrong_ways_show) {
    need_gpus(2);
    side sides[2];
    open_sides(sides, true);
    int64_t wrong = 0;
    for (int mode = LITMUS_WRONG_RELAXED; mode < LITMUS_MODES; mode++)
        wrong += violations(sides, (litmus_mode)mode);
    T_CHECK_MSG(wrong > 0, "no wrong way was seen to be wrong");
    close_sides(sides);
}
