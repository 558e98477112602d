/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "base/pool.h"

#include <hwloc.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"

enum {
    MAX_CORES = 1024,
    ROOM_FOR_HWLOC = 16 << 20,
    SPINS_BEFORE_YIELD = 2000,
    SPINS_BEFORE_SLEEP = 4000
};

struct worker {
    struct mm_pool *pool;
    pthread_t thread;
    int32_t index;
    int cpu; /* -1: not bound */
};

/*
 * One run: the caller stores fn and argument, then increments `generation` (release); workers that
 * see it (acquire) run and decrement `running` (release), which the caller awaits (acquire).
 * A worker that has spun for a while sleeps on `generation`; `sleepers` tells the caller to wake.
 */
struct mm_pool {
    mm_pool_fn fn;
    void *argument;
    _Alignas(MM_CACHE_LINE) atomic_uint generation;
    _Alignas(MM_CACHE_LINE) atomic_int running;
    _Alignas(MM_CACHE_LINE) atomic_int sleepers;
    bool stop;
    int32_t threads;
    int caller_cpu;         /* where the caller does not meet a worker; -1: anywhere */
    struct worker *workers; /* threads - 1 */
    int32_t started;
};

/* hwloc does not survive an allocation that fails, so it is asked only where there is room. */
static bool has_room(void) {
    void *volatile room = malloc(ROOM_FOR_HWLOC);
    const bool has = room != NULL;
    free(room);
    return has;
}

/* One processing unit per core that the process may run on, in the machine's order. */
static int32_t list_cores(int cpus[MAX_CORES]) {
    cpu_set_t allowed;
    int32_t n = 0;
    if (!has_room() || sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        return 0;
    hwloc_topology_t topology;
    if (hwloc_topology_init(&topology) != 0)
        return 0;
    if (hwloc_topology_load(topology) == 0) {
        hwloc_obj_t core = NULL;
        while (n < MAX_CORES &&
               (core = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_CORE, core)) != NULL) {
            int cpu = -1;
            while ((cpu = hwloc_bitmap_next(core->cpuset, cpu)) >= 0)
                if (cpu < CPU_SETSIZE && CPU_ISSET(cpu, &allowed))
                    break;
            if (cpu >= 0)
                cpus[n++] = cpu;
        }
    }
    hwloc_topology_destroy(topology);
    return n;
}

static pthread_once_t cores_once = PTHREAD_ONCE_INIT;
static int core_cpus[MAX_CORES];
static int32_t core_count;

static void find_cores(void) {
    core_count = list_cores(core_cpus);
}

int32_t mm_pool_cores(void) {
    pthread_once(&cores_once, find_cores);
    return core_count > 0 ? core_count : 1;
}

static void bind_to(int cpu) {
    if (cpu < 0)
        return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    /* A refusal leaves the thread where it is: slower, not wrong. */
    (void)pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

void mm_relax(uint32_t spins) {
    if (spins >= SPINS_BEFORE_YIELD) {
        sched_yield();
        return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void futex_wait(atomic_uint *word, unsigned seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake_all(atomic_uint *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void *work(void *argument) {
    struct worker *worker = argument;
    mm_pool *pool = worker->pool;
    bind_to(worker->cpu);
    unsigned seen = 0;
    for (;;) {
        uint32_t spins = 0;
        unsigned now;
        while ((now = atomic_load_explicit(&pool->generation, memory_order_acquire)) == seen) {
            if (spins < SPINS_BEFORE_SLEEP) {
                mm_relax(spins++);
                continue;
            }
            /* seq_cst pairs with the caller's increment and its look at `sleepers`. */
            atomic_fetch_add(&pool->sleepers, 1);
            if (atomic_load(&pool->generation) == seen)
                futex_wait(&pool->generation, seen);
            atomic_fetch_sub(&pool->sleepers, 1);
        }
        seen = now;
        if (pool->stop)
            return NULL;
        pool->fn(pool->argument, worker->index, pool->threads);
        atomic_fetch_sub_explicit(&pool->running, 1, memory_order_release);
    }
}

static void start_run(mm_pool *pool) {
    atomic_store_explicit(&pool->running, pool->started, memory_order_relaxed);
    atomic_fetch_add(&pool->generation, 1);
    if (atomic_load(&pool->sleepers) > 0)
        futex_wake_all(&pool->generation);
}

/*
 * A caller that shares a core with one of its workers would stay there for long: the system moves
 * waiting threads, not running ones. Its own set of allowed cores is left as it was.
 */
static void leave_workers(int cpu) {
    if (cpu < 0 || sched_getcpu() == cpu)
        return;
    cpu_set_t allowed;
    if (pthread_getaffinity_np(pthread_self(), sizeof allowed, &allowed) != 0 ||
        !CPU_ISSET(cpu, &allowed))
        return;
    bind_to(cpu);
    (void)pthread_setaffinity_np(pthread_self(), sizeof allowed, &allowed);
}

void mm_pool_run(mm_pool *pool, mm_pool_fn fn, void *argument) {
    if (!pool || pool->threads == 1) {
        fn(argument, 0, 1);
        return;
    }
    leave_workers(pool->caller_cpu);
    pool->fn = fn;
    pool->argument = argument;
    start_run(pool);
    fn(argument, 0, pool->threads);
    uint32_t spins = 0;
    while (atomic_load_explicit(&pool->running, memory_order_acquire) > 0)
        mm_relax(spins++);
}

int32_t mm_pool_threads(const mm_pool *pool) {
    return pool ? pool->threads : 1;
}

megamoe_status mm_pool_open(int32_t threads, int32_t first_core, bool pin, mm_pool **pool) {
    *pool = NULL;
    if (threads < 0 || threads > MAX_CORES || first_core < 0 || first_core >= MAX_CORES)
        return mm_fail(MEGAMOE_EINVAL, "threads %d, first core %d: expected 0..%d and 0..%d",
                       threads, first_core, MAX_CORES, MAX_CORES - 1);
    const int32_t cores = mm_pool_cores();
    if (threads == 0)
        threads = cores;
    mm_pool *p = mm_alloc(sizeof *p);
    if (!p)
        return mm_fail(MEGAMOE_ENOMEM, "a pool of %d threads: out of memory", threads);
    p->threads = threads;
    p->caller_cpu = -1;
    p->workers = mm_alloc((size_t)threads * sizeof *p->workers);
    if (!p->workers) {
        mm_pool_close(p);
        return mm_fail(MEGAMOE_ENOMEM, "a pool of %d threads: out of memory", threads);
    }
    /* More threads than cores share them as the system likes. */
    const bool bind = pin && core_count > 0 && first_core + threads <= core_count;
    for (int32_t i = 1; i < threads; i++) {
        struct worker *worker = &p->workers[i - 1];
        *worker = (struct worker){.pool = p, .index = i};
        worker->cpu = bind ? core_cpus[first_core + i] : -1;
        if (pthread_create(&worker->thread, NULL, work, worker) != 0) {
            mm_pool_close(p);
            return mm_fail(MEGAMOE_ENOMEM, "thread %d of %d cannot be started", i, threads);
        }
        p->started++;
    }
    p->caller_cpu = bind ? core_cpus[first_core] : -1;
    *pool = p;
    return MEGAMOE_OK;
}

void mm_pool_close(mm_pool *pool) {
    if (!pool)
        return;
    if (pool->started) {
        pool->stop = true;
        start_run(pool);
        for (int32_t i = 0; i < pool->started; i++)
            pthread_join(pool->workers[i].thread, NULL);
    }
    free(pool->workers);
    free(pool);
}
