/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Placing the experts of layers on GPUs, and what these count, on a driver whose device memory is
 * that of the host: fake_cuda.h.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_cuda.h"
#include "layer/layer.h"
#include "weights/cuda_pack.h"
#include "weights/prepared.h"

#include "fixture.h"

enum { EXPERTS = 4, PHYSICAL = 9, RANKS = 3, ROUNDS = 8 };

/* Hashes that come out otherwise than they are. */
static atomic_int spoiled;

mm_hash __real_mm_hash_of(const void *data, size_t bytes);
mm_hash __wrap_mm_hash_of(const void *data, size_t bytes);
mm_hash __wrap_mm_hash_of(const void *data, size_t bytes) {
    mm_hash hash = __real_mm_hash_of(data, bytes);
    if (atomic_load(&spoiled) > 0 && atomic_fetch_sub(&spoiled, 1) > 0)
        hash.bytes[3] ^= 1;
    return hash;
}

static fleet open_fleet(const fixture *x, int32_t ranks, const int32_t *map, int32_t physical) {
    fake_start();
    setup s = {.weights = x->m.weights, .device = "cuda", .ranks = ranks};
    s.options.physical_to_logical = map;
    s.options.physical_experts = map ? physical : 0;
    return fleet_open(&s);
}

static void close_fleet(fleet *f) {
    fleet_close(f);
    T_EQ_INT(fake.layers, 0);
    T_EQ_INT(fake.memories, 0);
}

/* ---- what a layer has in the memory of its GPU ---- */

static mm_cuda_layer_words *words_of(const megamoe_layer *layer) {
    return (mm_cuda_layer_words *)(uintptr_t)layer->cuda.tables;
}

static void check_layer(const megamoe_layer *layer, const megamoe_weights *weights,
                        const int32_t *map, int32_t physical) {
    const mm_placement *p = &layer->placement;
    const mm_cuda_layout *layout = &layer->cuda.layout;
    uint8_t *blob = malloc(layout->blob_bytes);
    T_REQUIRE(blob);
    T_EQ_INT(p->physical, physical);
    for (int32_t e = 0; e < p->local; e++) {
        mm_inexact inexact = {0};
        memset(blob, 0, layout->blob_bytes);
        T_OK(mm_cuda_pack(weights, layout, map ? map[p->first + e] : p->first + e, blob, false,
                          &inexact));
        T_EQ_MEM((const uint8_t *)(uintptr_t)layer->cuda.blobs + (size_t)e * layout->blob_bytes,
                 blob, layout->blob_bytes);
        T_EQ_INT((int64_t)words_of(layer)->received[e], 0);
    }
    free(blob);
    T_EQ_HEX(words_of(layer)->key, layer->cuda.key);
    T_EQ_INT(words_of(layer)->form, layer->cuda.form);
    if (!layer->cuda.mapped) {
        T_CHECK(p->identity && !layer->cuda.replica_starts && !layer->cuda.replicas);
        return;
    }
    T_EQ_MEM((const void *)(uintptr_t)layer->cuda.replica_starts, p->starts,
             (EXPERTS + 1) * sizeof(int32_t));
    T_EQ_MEM((const void *)(uintptr_t)layer->cuda.replicas, p->replicas,
             (size_t)physical * sizeof(int32_t));
}

static void check_all(const fleet *f, const fixture *x, const int32_t *map, int32_t physical) {
    for (int32_t r = 0; r < f->ranks; r++) {
        check_layer(f->rank[r].layer, x->m.weights, map, physical);
        T_EQ_HEX(f->rank[r].layer->cuda.key, f->rank[0].layer->cuda.key);
    }
}

/* ---- placing ---- */

struct placing {
    const int32_t *map;
    int32_t physical;
    megamoe_comm *const *comms;     /* by rank; NULL: the fleet's */
    const megamoe_weights *weights; /* of rank 1 */
    megamoe_status status[MAX_RANKS];
    char message[MAX_RANKS][400];
};

static void place_rank(rank *r, void *argument) {
    struct placing *p = argument;
    megamoe_placement placement = MEGAMOE_INIT(megamoe_placement);
    placement.physical_to_logical = p->map;
    placement.physical_experts = p->map ? p->physical : 0;
    placement.weights = r->rank == 1 ? p->weights : NULL;
    p->status[r->rank] =
        megamoe_layer_place(p->comms ? p->comms[r->rank] : r->comm, r->layer, &placement);
    snprintf(p->message[r->rank], sizeof p->message[0], "%s", megamoe_last_error());
}

static void place_all(fleet *f, struct placing *p) {
    fleet_each(f, place_rank, p);
    for (int32_t r = 0; r < f->ranks; r++)
        T_CHECK_MSG(p->status[r] == MEGAMOE_OK, "rank %d: %s", r, p->message[r]);
}

/* One rank fails with `one`, the others with `other`, and all keep what they have. */
static void check_refused(fleet *f, struct placing *p, megamoe_status one, megamoe_status other,
                          const char *named) {
    int32_t failed = 0;
    fleet_each(f, place_rank, p);
    for (int32_t r = 0; r < f->ranks; r++) {
        failed += p->status[r] == one;
        T_CHECK_MSG(p->status[r] == one || p->status[r] == other, "rank %d: %s", r, p->message[r]);
        T_CONTAINS(p->message[r], named);
    }
    T_EQ_INT(failed, one == other ? f->ranks : 1);
}

/* The same physical experts, so graphs stay; one expert passes at a time, or all. */
T_CASE(place_any_map) {
    fixture *x = open_fixture(40);
    t_random random = t_random_start(41);
    for (int32_t ranks = 1; ranks <= 5; ranks++) {
        int32_t map[PHYSICAL];
        random_map(&random, map, PHYSICAL, EXPERTS);
        fleet f = open_fleet(x, ranks, map, PHYSICAL);
        check_all(&f, x, map, PHYSICAL);
        for (int round = 0; round < ROUNDS; round++) {
            const mm_cuda_layer before = f.rank[ranks - 1].layer->cuda;
            mm_place_window_bytes = round % 2 ? 1 : 64 << 20;
            words_of(f.rank[0].layer)->received[0] = 7;
            random_map(&random, map, PHYSICAL, EXPERTS);
            place_all(&f, &(struct placing){.map = map, .physical = PHYSICAL});
            check_all(&f, x, map, PHYSICAL);
            const mm_cuda_layer *after = &f.rank[ranks - 1].layer->cuda;
            T_EQ_HEX(after->blobs, before.blobs);
            T_EQ_HEX(after->tables, before.tables);
            T_EQ_HEX(after->replica_starts, before.replica_starts);
            T_EQ_INT(after->form, before.form);
        }
        close_fleet(&f);
    }
    close_fixture(x);
}

/* What arguments of captured graphs name is another form: a map, or other physical experts. */
T_CASE(place_into_another_form) {
    static const int32_t turned[EXPERTS] = {1, 2, 3, 0}, identity[EXPERTS] = {0, 1, 2, 3},
                         more[7] = {3, 2, 1, 0, 3, 3, 1};
    fixture *x = open_fixture(42);
    fleet f = open_fleet(x, RANKS, NULL, 0);
    const struct {
        const int32_t *map;
        int32_t physical;
        uint32_t form;
        bool mapped;
    } steps[] = {{NULL, EXPERTS, 1, false},  {identity, EXPERTS, 1, false},
                 {turned, EXPERTS, 2, true}, {identity, EXPERTS, 2, true},
                 {more, 7, 3, true},         {turned, EXPERTS, 4, true},
                 {NULL, EXPERTS, 4, true}};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        place_all(&f, &(struct placing){.map = steps[i].map, .physical = steps[i].physical});
        check_all(&f, x, steps[i].map, steps[i].physical);
        for (int32_t r = 0; r < RANKS; r++) {
            T_EQ_INT(f.rank[r].layer->cuda.form, steps[i].form);
            T_EQ_INT(f.rank[r].layer->cuda.mapped, steps[i].mapped);
        }
    }
    close_fleet(&f);
    close_fixture(x);
}

T_CASE(place_or_stay_as_it_was) {
    fixture *x = open_fixture(43);
    t_random random = t_random_start(44);
    int32_t map[PHYSICAL], other[PHYSICAL], many[1025];
    random_map(&random, map, PHYSICAL, EXPERTS);
    random_map(&random, other, PHYSICAL, EXPERTS);
    for (int32_t p = 0; p < 1025; p++)
        many[p] = p % EXPERTS;
    fleet f = open_fleet(x, RANKS, map, PHYSICAL);

    struct placing large = {.map = many, .physical = 1025};
    check_refused(&f, &large, MEGAMOE_EINVAL, MEGAMOE_EINVAL,
                  "physical_experts is 1025; expected 0 without a map, or 4..1024 with one");

    struct placing p = {.map = other, .physical = PHYSICAL};
    fake.allocations_until_failure = 2;
    check_refused(&f, &p, MEGAMOE_ENOMEM, MEGAMOE_EPEER, "GPU memory for experts that change");
    check_all(&f, x, map, PHYSICAL);

    atomic_store(&spoiled, 1);
    check_refused(&f, &p, MEGAMOE_ECHECK, MEGAMOE_EPEER, "as it was sent");
    atomic_store(&spoiled, 0);
    check_all(&f, x, map, PHYSICAL);

    place_all(&f, &p);
    check_all(&f, x, other, PHYSICAL);
    close_fleet(&f);
    close_fixture(x);
}

/* A GPU that fails while experts move in: its layer computes no more, and all are told. */
T_CASE(place_on_a_gpu_that_fails) {
    static const int32_t map[EXPERTS] = {0, 1, 2, 3}, other[EXPERTS] = {1, 0, 3, 2};
    fixture *x = open_fixture(45);
    fleet f = open_fleet(x, 2, map, EXPERTS);
    struct placing p = {.map = other, .physical = EXPERTS};
    fake.copies_until_failure = 5; /* after two on each rank that gather what it has */
    check_refused(&f, &p, MEGAMOE_EDEVICE, MEGAMOE_EPEER, "copying an expert");
    for (int32_t r = 0; r < 2; r++) {
        const megamoe_layer *layer = f.rank[r].layer;
        T_EQ_INT(layer->cuda.form != words_of(layer)->form, p.status[r] == MEGAMOE_EDEVICE);
    }
    close_fleet(&f);
    close_fixture(x);
}

/* ---- from weights, and over fewer ranks ---- */

static void check_survivors(const fixture *x, const megamoe_weights *brought) {
    fleet f = open_fleet(x, RANKS, NULL, 0);
    fleet left = f;
    left.ranks = RANKS - 1;
    megamoe_comm *comms[RANKS - 1];
    T_OK(megamoe_comm_threads(RANKS - 1, comms));
    struct placing p = {.comms = comms};
    check_refused(&left, &p, MEGAMOE_ENOTFOUND, MEGAMOE_ENOTFOUND,
                  "logical expert 3: held by no rank");
    p.weights = brought;
    place_all(&left, &p);
    check_all(&left, x, NULL, EXPERTS);
    T_EQ_INT(left.rank[0].layer->cuda.form, 2);
    T_EQ_INT(left.rank[0].layer->placement.local, 2);
    for (int32_t r = 0; r < left.ranks; r++)
        megamoe_comm_close(comms[r]);
    close_fleet(&f);
}

T_CASE(place_over_the_survivors) {
    fixture *x = open_fixture(46);
    megamoe_prepare_options preparing = MEGAMOE_INIT(megamoe_prepare_options);
    megamoe_weights *for_gpu, *for_cpu;
    preparing.device = "cuda";
    T_OK(megamoe_weights_prepare(x->m.weights, NULL, &preparing, t_path("cuda")));
    T_OK(megamoe_weights_open(t_path("cuda"), &for_gpu));
    T_OK(megamoe_weights_prepare(x->m.weights, NULL, NULL, t_path("cpu")));
    T_OK(megamoe_weights_open(t_path("cpu"), &for_cpu));
    check_survivors(x, x->m.weights);
    check_survivors(x, for_gpu);
    fleet f = open_fleet(x, 2, NULL, 0);
    struct placing p = {.weights = for_cpu};
    check_refused(&f, &p, MEGAMOE_EINVAL, MEGAMOE_EPEER, "prepared for cpu");
    close_fleet(&f);
    megamoe_weights_close(for_gpu);
    megamoe_weights_close(for_cpu);
    close_fixture(x);
}

/* Folded ranks have one thread; their layers are placed by as many as there are ranks. */
T_CASE(place_folded_ranks_over_threads) {
    static const int32_t map[6] = {0, 1, 2, 3, 0, 1}, other[6] = {3, 3, 1, 0, 2, 2};
    fixture *x = open_fixture(47);
    fake_start();
    setup s = {.weights = x->m.weights, .device = "cuda", .ranks = 2, .folded = true};
    s.options.physical_to_logical = map;
    s.options.physical_experts = 6;
    fleet f = fleet_open(&s);
    megamoe_comm *comms[2];
    T_OK(megamoe_comm_threads(2, comms));
    f.folded = false; /* threads of their own */
    place_all(&f, &(struct placing){.map = other, .physical = 6, .comms = comms});
    check_all(&f, x, other, 6);
    for (int32_t r = 0; r < 2; r++)
        megamoe_comm_close(comms[r]);
    close_fleet(&f);
    close_fixture(x);
}

/* ---- counts ---- */

static void get_loads(rank *r, void *argument) {
    int64_t *loads = argument;
    T_STATUS(megamoe_layer_loads(r->comm, r->layer, loads + (ptrdiff_t)r->rank * EXPERTS, EXPERTS),
             MEGAMOE_OK);
}

T_CASE(loads_are_what_kernels_counted) {
    static const int32_t map[6] = {0, 1, 2, 3, 0, 1};
    fixture *x = open_fixture(48);
    fleet f = open_fleet(x, 2, map, 6);
    for (int32_t r = 0; r < 2; r++)
        for (int32_t e = 0; e < 3; e++)
            words_of(f.rank[r].layer)->received[e] = (uint64_t)(100 * r + 10 * e + 1) << 32;
    int64_t loads[2][EXPERTS], counts[3];
    fleet_each(&f, get_loads, loads);
    for (int32_t r = 0; r < 2; r++) {
        T_EQ_INT(loads[r][0], INT64_C(112) << 32); /* 1 and 111 */
        T_EQ_INT(loads[r][1], INT64_C(132) << 32);
        T_EQ_INT(loads[r][2], INT64_C(21) << 32);
        T_EQ_INT(loads[r][3], INT64_C(101) << 32);
    }
    T_OK(megamoe_layer_receive_counts(f.rank[1].layer, counts, 3));
    T_EQ_INT(counts[2], INT64_C(121) << 32);
    T_OK(megamoe_layer_reset_counts(f.rank[1].layer));
    T_OK(megamoe_layer_receive_counts(f.rank[1].layer, counts, 3));
    T_EQ_INT(counts[2], 0);
    T_OK(megamoe_layer_receive_counts(f.rank[0].layer, counts, 3));
    T_EQ_INT(counts[2], INT64_C(21) << 32);
    T_EQ_INT(words_of(f.rank[1].layer)->form, 1);
    T_STATUS(megamoe_layer_receive_counts(f.rank[0].layer, counts, 2), MEGAMOE_EINVAL);
    close_fleet(&f);
    close_fixture(x);
}

T_CASE(layers_have_1024_physical_experts_at_most) {
    fixture *x = open_fixture(49);
    int32_t many[1025];
    for (int32_t p = 0; p < 1025; p++)
        many[p] = p % EXPERTS;
    fake_start();
    const setup s = {.weights = x->m.weights, .device = "cuda"};
    fleet f = fleet_open_comms(&s);
    megamoe_layer_options o = MEGAMOE_INIT(megamoe_layer_options);
    o.physical_to_logical = many;
    o.physical_experts = 1025;
    T_STATUS(
        megamoe_layer_create(f.rank[0].comm, f.rank[0].device, x->m.weights, &o, &f.rank[0].layer),
        MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "1025 physical experts; on CUDA devices there are 1..1024");
    fleet_close(&f);
    T_EQ_INT(fake.memories, 0);
    close_fixture(x);
}
