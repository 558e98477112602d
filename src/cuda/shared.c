/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/shared.h"

#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "base/memory.h"

/* ---- one range of pages ---- */

static CUmemAccessDesc access_of(CUdevice device) {
    return (CUmemAccessDesc){.location = {CU_MEM_LOCATION_TYPE_DEVICE, device},
                             .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
}

/* Accepts a range that is reserved only. */
static void unmap(CUdeviceptr address, size_t bytes) {
    (void)mm_cu.cuMemUnmap(address, bytes);
    (void)mm_cu.cuMemAddressFree(address, bytes);
}

/* The pages of `handle`, for one GPU. The handle may be released afterwards. */
static megamoe_status map(CUmemGenericAllocationHandle handle, size_t bytes, CUdevice device,
                          CUdeviceptr *address) {
    const CUmemAccessDesc access = access_of(device);
    CUdeviceptr range = 0;
    megamoe_status status;
    MM_CUDA_TRY(mm_cu.cuMemAddressReserve(&range, bytes, 0, 0, 0), "%zu bytes of address space",
                bytes);
    MM_CUDA_TRY_GOTO(mm_cu.cuMemMap(range, bytes, 0, handle, 0), fail, "mapping %zu bytes", bytes);
    MM_CUDA_TRY_GOTO(mm_cu.cuMemSetAccess(range, bytes, &access, 1), fail,
                     "access to %zu bytes for cuda:%d", bytes, device);
    *address = range;
    return MEGAMOE_OK;
fail:
    unmap(range, bytes);
    return status;
}

/* ---- this rank's ---- */

static megamoe_status has(const mm_cuda_device *device, CUdevice_attribute attribute, bool *yes) {
    int value = 0;
    MM_CUDA_TRY(mm_cu.cuDeviceGetAttribute(&value, attribute, device->device),
                "cuda:%" PRId32 ": attribute %d", device->ordinal, attribute);
    *yes = value != 0;
    return MEGAMOE_OK;
}

static megamoe_status export_pages(CUmemGenericAllocationHandle handle, int *fd) {
    MM_CUDA_TRY(
        mm_cu.cuMemExportToShareableHandle(fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "sharing GPU memory with other processes");
    (void)fcntl(*fd, F_SETFD, FD_CLOEXEC);
    return MEGAMOE_OK;
}

static megamoe_status open_pages(const mm_cuda_device *device, size_t bytes, bool exported,
                                 mm_cuda_shared *s) {
    const CUmemAllocationProp prop = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes =
            exported ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE,
        .location = {CU_MEM_LOCATION_TYPE_DEVICE, device->device},
    };
    size_t page = 0;
    MM_CUDA_TRY(
        mm_cu.cuMemGetAllocationGranularity(&page, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuda:%" PRId32 ": its page size", device->ordinal);
    s->bytes = mm_round_up(bytes, page);
    CUmemGenericAllocationHandle handle;
    MM_CUDA_TRY(mm_cu.cuMemCreate(&handle, s->bytes, &prop, 0), "%zu bytes of GPU memory",
                s->bytes);
    megamoe_status status = exported ? export_pages(handle, &s->fd) : MEGAMOE_OK;
    if (status == MEGAMOE_OK)
        status = map(handle, s->bytes, device->device, &s->own);
    (void)mm_cu.cuMemRelease(handle);
    return status;
}

megamoe_status mm_cuda_shared_open(const megamoe_comm *comm, const mm_cuda_device *device,
                                   size_t bytes, mm_cuda_shared *shared) {
    *shared = (mm_cuda_shared){.bytes = bytes, .fd = -1};
    const bool several = megamoe_comm_size(comm) > 1;
    const bool exported = several && mm_comm_in_processes(comm);
    bool pages = false, descriptors = false;
    if (several)
        MM_TRY(has(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, &pages));
    if (exported)
        MM_TRY(has(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                   &descriptors));
    if (exported && !(pages && descriptors))
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "cuda:%" PRId32 " is a %s whose driver shares no memory between processes "
                       "by file descriptors; ranks that are processes need that",
                       device->ordinal, device->model);
    shared->paged = pages;
    if (pages)
        return open_pages(device, bytes, exported, shared);
    MM_CUDA_TRY(mm_cu.cuMemAlloc(&shared->own, bytes), "%zu bytes of GPU memory", bytes);
    return MEGAMOE_OK;
}

mm_cuda_shared_card mm_cuda_shared_card_of(const mm_cuda_shared *shared,
                                           const mm_cuda_device *device) {
    return (mm_cuda_shared_card){.address = shared->own,
                                 .bytes = shared->bytes,
                                 .uuid = device->uuid,
                                 .ordinal = device->ordinal,
                                 .paged = shared->paged,
                                 .instance = strstr(device->model, "MIG ") != NULL};
}

/* ---- those of others ---- */

static bool same_gpu(const CUuuid *a, const CUuuid *b) {
    return memcmp(a, b, sizeof *a) == 0;
}

/* The GPU as this process numbers it, or -1 where it does not see it. */
static CUdevice find_gpu(const CUuuid *uuid) {
    int count = 0;
    if (mm_cu.cuDeviceGetCount(&count) != CUDA_SUCCESS)
        return -1;
    for (int i = 0; i < count; i++) {
        CUdevice device;
        CUuuid found;
        if (mm_cu.cuDeviceGet(&device, i) == CUDA_SUCCESS &&
            mm_cu.cuDeviceGetUuid(&found, device) == CUDA_SUCCESS && same_gpu(&found, uuid))
            return device;
    }
    return -1;
}

/* A GPU that this process does not see may be in reach all the same: mapping its memory tells. */
static megamoe_status check_reach(const mm_cuda_device *device, const mm_cuda_shared *shared,
                                  int32_t rank, const mm_cuda_shared_card *card) {
    if (same_gpu(&card->uuid, &device->uuid))
        return MEGAMOE_OK;
    if (card->instance || strstr(device->model, "MIG "))
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "rank %d is on another MIG instance than cuda:%" PRId32
                       " (%s); instances cannot write into each other's memory",
                       rank, device->ordinal, device->model);
    if (!shared->paged || !card->paged)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "rank %d is on another GPU than cuda:%" PRId32
                       ", and a driver without virtual memory management cannot map its memory",
                       rank, device->ordinal);
    const CUdevice peer = find_gpu(&card->uuid);
    int can = 1;
    if (peer >= 0)
        MM_CUDA_TRY(mm_cu.cuDeviceCanAccessPeer(&can, device->device, peer),
                    "access from cuda:%" PRId32 " to cuda:%d", device->ordinal, peer);
    if (!can)
        return mm_fail(MEGAMOE_EUNSUPPORTED,
                       "cuda:%" PRId32 " cannot write into the memory of cuda:%d, where rank %d "
                       "is; the ranks of a communicator need GPUs with peer access, as NVLink "
                       "gives it",
                       device->ordinal, peer, rank);
    return MEGAMOE_OK;
}

/* Lets the other GPUs of this process write into this rank's memory. */
static megamoe_status admit(const mm_cuda_device *device, const mm_cuda_shared *s,
                            const mm_cuda_shared_card *cards, int32_t ranks) {
    CUmemAccessDesc access[MM_CUDA_RANKS_MAX];
    size_t count = 0;
    for (int32_t r = 0; r < ranks; r++) {
        const CUdevice peer = find_gpu(&cards[r].uuid);
        bool known = same_gpu(&cards[r].uuid, &device->uuid);
        for (size_t i = 0; i < count; i++)
            known = known || access[i].location.id == peer;
        if (!known)
            access[count++] = access_of(peer);
    }
    if (count)
        MM_CUDA_TRY(mm_cu.cuMemSetAccess(s->own, s->bytes, access, count),
                    "access to the memory of cuda:%" PRId32 " for %zu other GPUs", device->ordinal,
                    count);
    return MEGAMOE_OK;
}

static megamoe_status meet_in_process(const megamoe_comm *comm, const mm_cuda_device *device,
                                      const mm_cuda_shared *s, const mm_cuda_shared_card *cards,
                                      CUdeviceptr *addresses) {
    const int32_t ranks = megamoe_comm_size(comm);
    for (int32_t r = 0; r < ranks; r++) {
        MM_TRY(check_reach(device, s, r, &cards[r]));
        addresses[r] = cards[r].address;
    }
    return admit(device, s, cards, ranks);
}

/* The memory of another process, whose size is not taken on trust: mapping more than is there
 * fails. */
static megamoe_status import(const mm_cuda_device *device, mm_cuda_shared *s, int32_t rank, int fd,
                             const mm_cuda_shared_card *card) {
    MM_TRY(check_reach(device, s, rank, card));
    if (fd < 0 || card->bytes != s->bytes)
        return mm_fail(MEGAMOE_EIO,
                       "rank %d shares %" PRIu64 " bytes of memory; expected %zu, as on this rank",
                       rank, fd < 0 ? 0 : card->bytes, s->bytes);
    CUmemGenericAllocationHandle handle;
    MM_CUDA_TRY(mm_cu.cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)fd,
                                                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                "importing the memory of rank %d", rank);
    const megamoe_status status = map(handle, s->bytes, device->device, &s->peers[rank]);
    (void)mm_cu.cuMemRelease(handle);
    return status;
}

/* Descriptors are exchanged whatever this rank will find, or the others would wait for it. */
static megamoe_status meet_processes(megamoe_comm *comm, const mm_cuda_device *device,
                                     mm_cuda_shared *s, const mm_cuda_shared_card *cards,
                                     CUdeviceptr *addresses) {
    int fds[MM_CUDA_RANKS_MAX];
    megamoe_status status = mm_comm_share_fds(comm, s->fd, fds);
    const bool shared = status == MEGAMOE_OK;
    for (int32_t r = 0; shared && r < megamoe_comm_size(comm); r++) {
        const bool own = r == megamoe_comm_rank(comm);
        if (status == MEGAMOE_OK && !own)
            status = import(device, s, r, fds[r], &cards[r]);
        addresses[r] = own ? s->own : s->peers[r];
        if (fds[r] >= 0)
            close(fds[r]);
    }
    close(s->fd);
    s->fd = -1;
    return status;
}

megamoe_status mm_cuda_shared_meet(megamoe_comm *comm, const mm_cuda_device *device,
                                   mm_cuda_shared *shared, const mm_cuda_shared_card *cards,
                                   CUdeviceptr *addresses) {
    if (shared->fd >= 0)
        return meet_processes(comm, device, shared, cards, addresses);
    return meet_in_process(comm, device, shared, cards, addresses);
}

void mm_cuda_shared_close(mm_cuda_shared *shared) {
    for (int32_t r = 0; r < MM_CUDA_RANKS_MAX; r++)
        if (shared->peers[r])
            unmap(shared->peers[r], shared->bytes);
    if (shared->own && shared->paged)
        unmap(shared->own, shared->bytes);
    else if (shared->own)
        (void)mm_cu.cuMemFree(shared->own);
    if (shared->fd >= 0)
        close(shared->fd);
    *shared = (mm_cuda_shared){.fd = -1};
}
