/* SPDX-License-Identifier: Apache-2.0 */
/* Creating layers and workspaces: what is refused, ranks that disagree, structs of other sizes. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fixture.h"

struct creation {
    megamoe_status expected;
    const char *named;
};

static void create_refused(rank *r, void *argument) {
    const struct creation *c = argument;
    T_STATUS(megamoe_workspace_create(r->comm, r->device, &r->shape, &r->capacity, &r->workspace),
             c->expected);
    T_CHECK(!r->workspace);
    T_CONTAINS(megamoe_last_error(), c->named);
}

static void create_good(rank *r, void *argument) {
    (void)argument;
    T_STATUS(megamoe_workspace_create(r->comm, r->device, &r->shape, &r->capacity, &r->workspace),
             MEGAMOE_OK);
}

/* All ranks of a communicator get the error, which names the field. */
T_CASE(ranks_that_disagree) {
    fixture *x = open_fixture(13);
    const setup s = {.weights = x->m.weights, .ranks = 3};
    for (int field = 0; field < 9; field++) {
        static const char *const names[] = {
            "shape.hidden",    "shape.intermediate", "shape.experts",
            "shape.topk",      "shape.input_scale",  "shape.physical_experts",
            "capacity.tokens", "capacity.pool_rows", "shape.activations"};
        fleet f = fleet_open_comms(&s);
        rank *odd = &f.rank[1 + field % 2];
        odd->shape.hidden += 32 * (field == 0);
        odd->shape.intermediate += 32 * (field == 1);
        odd->shape.experts += field == 2;
        odd->shape.topk += field == 3;
        odd->shape.input_scale = field == 4 ? MEGAMOE_SCALE_BLOCK : MEGAMOE_SCALE_TOKEN;
        odd->shape.physical_experts = field == 5 ? 6 : 0;
        odd->capacity.tokens += field == 6;
        odd->capacity.pool_rows = field == 7 ? 17 : 0;
        odd->shape.activations = field == 8 ? MEGAMOE_ACTIVATIONS_INT8 : MEGAMOE_ACTIVATIONS_E4M3;
        struct creation c = {MEGAMOE_EINVAL, names[field]};
        fleet_each(&f, create_refused, &c);
        /* The communicator lives on. */
        odd->shape = f.rank[0].shape;
        odd->capacity = f.rank[0].capacity;
        fleet_each(&f, create_good, NULL);
        fleet_close(&f);
    }
    close_fixture(x);
}

static void create_any(rank *r, void *argument) {
    megamoe_status *status = argument;
    status[r->rank] = megamoe_workspace_create(r->comm, r->device, r->rank == 1 ? NULL : &r->shape,
                                               &r->capacity, &r->workspace);
}

/* One that cannot create its own keeps nobody waiting, and the communicator stays of use. */
T_CASE(a_rank_that_fails_to_create) {
    fixture *x = open_fixture(14);
    const setup s = {.weights = x->m.weights, .ranks = 3};
    fleet f = fleet_open_comms(&s);
    megamoe_status status[MAX_RANKS];
    fleet_each(&f, create_any, status);
    T_EQ_INT(status[0], MEGAMOE_EPEER);
    T_EQ_INT(status[1], MEGAMOE_EINVAL);
    T_EQ_INT(status[2], MEGAMOE_EPEER);
    fleet_each(&f, create_good, NULL);
    for (int32_t r = 0; r < 3; r++)
        T_OK(megamoe_layer_create(f.rank[r].comm, f.rank[r].device, x->m.weights, NULL,
                                  &f.rank[r].layer));
    check_recovery(&f, x);
    fleet_close(&f);
    close_fixture(x);
}

/* A folded communicator compares at the first group call. */
T_CASE(folded_ranks_that_disagree) {
    fixture *x = open_fixture(15);
    const setup s = {.weights = x->m.weights, .ranks = 2, .folded = true};
    fleet f = fleet_open_comms(&s);
    f.rank[1].capacity.tokens++;
    for (int32_t r = 0; r < 2; r++)
        T_OK(megamoe_layer_create(f.rank[r].comm, f.rank[r].device, x->m.weights, NULL,
                                  &f.rank[r].layer));
    create_good(&f.rank[0], NULL);
    megamoe_status status[MAX_RANKS];
    T_OK(megamoe_stage(f.rank[0].workspace, NULL, NULL, NULL, 0, NULL));
    create_good(&f.rank[1], NULL);
    fleet_stage(&f, &x->b);
    fleet_compute(&f, &x->b, x->y, status);
    T_STATUS(status[0], MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "capacity.tokens");
    fleet_close(&f);
    close_fixture(x);
}

T_CASE(shapes_and_capacities_out_of_range) {
    fixture *x = open_fixture(16);
    const setup s = {.weights = x->m.weights};
    fleet f = fleet_open_comms(&s);
    const megamoe_shape shape = f.rank[0].shape;
    const megamoe_capacity capacity = f.rank[0].capacity;
#define REFUSED(part, member, value)                                                               \
    f.rank[0].part.member = value;                                                                 \
    create_refused(&f.rank[0], &(struct creation){MEGAMOE_EINVAL, #member});                       \
    f.rank[0].part = part
    REFUSED(shape, hidden, 0);
    REFUSED(shape, hidden, -64);
    REFUSED(shape, intermediate, 0);
    REFUSED(shape, experts, 0);
    REFUSED(shape, topk, 0);
    REFUSED(shape, topk, 65);
    REFUSED(shape, input_scale, (megamoe_input_scale)3);
    REFUSED(shape, physical_experts, 3);
    REFUSED(shape, activations, (megamoe_activation_type)2);
    REFUSED(shape, activations, (megamoe_activation_type)-1);
    REFUSED(capacity, tokens, 0);
    REFUSED(capacity, tokens, -1);
    REFUSED(capacity, pool_rows, -1);
    REFUSED(capacity, deadline_ms, -1);
    REFUSED(shape, struct_size, 0);
    REFUSED(capacity, struct_size, 0);
#undef REFUSED
    f.rank[0].shape.activations = MEGAMOE_ACTIVATIONS_INT8;
    f.rank[0].shape.input_scale = MEGAMOE_SCALE_BLOCK;
    create_refused(&f.rank[0], &(struct creation){MEGAMOE_EINVAL, "int8"});
    f.rank[0].shape = shape;
    T_STATUS(
        megamoe_workspace_create(NULL, f.rank[0].device, &shape, &capacity, &f.rank[0].workspace),
        MEGAMOE_EINVAL);
    T_STATUS(
        megamoe_workspace_create(f.rank[0].comm, NULL, &shape, &capacity, &f.rank[0].workspace),
        MEGAMOE_EINVAL);
    T_STATUS(megamoe_workspace_create(f.rank[0].comm, f.rank[0].device, NULL, &capacity,
                                      &f.rank[0].workspace),
             MEGAMOE_EINVAL);
    T_STATUS(megamoe_workspace_create(f.rank[0].comm, f.rank[0].device, &shape, NULL,
                                      &f.rank[0].workspace),
             MEGAMOE_EINVAL);
    T_STATUS(megamoe_workspace_create(f.rank[0].comm, f.rank[0].device, &shape, &capacity, NULL),
             MEGAMOE_EINVAL);
    fleet_close(&f);
    close_fixture(x);
}

T_CASE(layer_options) {
    fixture *x = open_fixture(17);
    const setup s = {.weights = x->m.weights};
    fleet f = fleet_open_comms(&s);
    static const int32_t map[] = {0, 1, 2, 3, 1}, beyond[] = {0, 1, 2, 4, 3},
                         lacking[] = {0, 1, 3, 3};
    const megamoe_layer_options good = MEGAMOE_INIT(megamoe_layer_options);
    megamoe_layer_options o;
    megamoe_layer *layer;
#define REFUSED(assignment, named)                                                                 \
    o = good;                                                                                      \
    assignment;                                                                                    \
    T_STATUS(megamoe_layer_create(f.rank[0].comm, f.rank[0].device, x->m.weights, &o, &layer),     \
             MEGAMOE_EINVAL);                                                                      \
    T_CHECK(!layer);                                                                               \
    T_CONTAINS(megamoe_last_error(), named)
    REFUSED(o.accumulate = (megamoe_accumulate)2, "accumulate");
    REFUSED(o.nvfp4 = (megamoe_nvfp4_mode)2, "nvfp4");
    REFUSED(o.physical_experts = 5, "physical_experts");
    REFUSED(o.physical_to_logical = map, "physical_experts");
    REFUSED(o.physical_to_logical = map; o.physical_experts = 3, "physical_experts");
    REFUSED(o.physical_to_logical = beyond; o.physical_experts = 5, "physical_to_logical[3]");
    REFUSED(o.physical_to_logical = lacking; o.physical_experts = 4, "logical expert 2");
    REFUSED(o.round_outside_window = true, "round_outside_window");
    REFUSED(o.struct_size = 0, "struct_size");
#undef REFUSED
    T_STATUS(megamoe_layer_create(NULL, f.rank[0].device, x->m.weights, NULL, &layer),
             MEGAMOE_EINVAL);
    T_STATUS(megamoe_layer_create(f.rank[0].comm, NULL, x->m.weights, NULL, &layer),
             MEGAMOE_EINVAL);
    T_STATUS(megamoe_layer_create(f.rank[0].comm, f.rank[0].device, NULL, NULL, &layer),
             MEGAMOE_EINVAL);
    T_STATUS(megamoe_layer_create(f.rank[0].comm, f.rank[0].device, x->m.weights, NULL, NULL),
             MEGAMOE_EINVAL);
    fleet_close(&f);
    close_fixture(x);
}

T_CASE(weights_for_another_device) {
    fixture *x = open_fixture(19);
    megamoe_prepare_options options = MEGAMOE_INIT(megamoe_prepare_options);
    options.device = "cuda";
    const char *path = t_path("layer");
    T_OK(megamoe_weights_prepare(x->m.weights, NULL, &options, path));
    megamoe_weights *weights;
    T_OK(megamoe_weights_open(path, &weights));
    const setup s = {.weights = weights};
    fleet f = fleet_open_comms(&s);
    megamoe_layer *layer;
    T_STATUS(megamoe_layer_create(f.rank[0].comm, f.rank[0].device, weights, NULL, &layer),
             MEGAMOE_EUNSUPPORTED);
    T_CHECK(!layer);
    T_CONTAINS(megamoe_last_error(), "prepared for device \"cuda\" and this one is \"cpu\"");
    fleet_close(&f);
    megamoe_weights_close(weights);
    close_fixture(x);
}

static void note_progress(void *user, uint64_t done, uint64_t total) {
    uint64_t *last = user;
    T_CHECK(done >= last[0] && done <= total);
    last[0] = done;
    last[1] = total;
}

/* Packed, or read from a prepared file. */
T_CASE(progress_ends_at_the_total) {
    fixture *x = open_fixture(20);
    const char *path = t_path("layer");
    T_OK(megamoe_weights_prepare(x->m.weights, NULL, NULL, path));
    megamoe_weights *prepared;
    T_OK(megamoe_weights_open(path, &prepared));
    for (int read = 0; read < 2; read++) {
        const megamoe_weights *weights = read ? prepared : x->m.weights;
        const setup s = {.weights = weights, .threads = 2};
        fleet f = fleet_open_comms(&s);
        uint64_t last[2] = {0, 0};
        megamoe_layer_options options = MEGAMOE_INIT(megamoe_layer_options);
        options.progress = (megamoe_progress){note_progress, last};
        T_OK(megamoe_layer_create(f.rank[0].comm, f.rank[0].device, weights, &options,
                                  &f.rank[0].layer));
        T_EQ_HEX(last[0], megamoe_layer_bytes(f.rank[0].layer));
        T_EQ_HEX(last[1], last[0]);
        fleet_close(&f);
    }
    megamoe_weights_close(prepared);
    close_fixture(x);
}

static void cut_to_a_page(void *user, uint64_t done, uint64_t total) {
    (void)done, (void)total;
    T_REQUIRE(truncate(user, 4096) == 0);
}

/* Before, while and after a layer reads it: an error, or no matter. */
T_CASE(prepared_file_that_is_cut) {
    enum { BEFORE, MEANWHILE, AFTER, TIMES };
    fixture *x = open_fixture(21);
    for (int i = 0; i < 2 * TIMES; i++) {
        char *path = strdup(t_path("cut"));
        T_REQUIRE(path);
        T_OK(megamoe_weights_prepare(x->m.weights, NULL, NULL, path));
        megamoe_weights *prepared;
        T_OK(megamoe_weights_open(path, &prepared));
        struct stat st;
        T_REQUIRE(stat(path, &st) == 0);
        setup s = {.weights = prepared, .threads = 1 + i / TIMES};
        if (i % TIMES == AFTER) {
            uint16_t y[TOKENS * HIDDEN];
            fleet f = fleet_open(&s);
            T_REQUIRE(truncate(path, 0) == 0);
            fleet_forward(&f, &x->b, y);
            T_EQ_MEM(y, x->want, sizeof y);
            fleet_close(&f);
        } else {
            megamoe_layer_options options = MEGAMOE_INIT(megamoe_layer_options);
            if (i % TIMES == MEANWHILE) {
                options.progress = (megamoe_progress){cut_to_a_page, path};
                s.threads = 1; /* another could have read all by then */
            } else
                T_REQUIRE(truncate(path, st.st_size - 1) == 0);
            fleet f = fleet_open_comms(&s);
            megamoe_layer *layer;
            T_STATUS(
                megamoe_layer_create(f.rank[0].comm, f.rank[0].device, prepared, &options, &layer),
                MEGAMOE_EIO);
            T_CHECK(!layer);
            T_CONTAINS(megamoe_last_error(), path);
            T_CONTAINS(megamoe_last_error(), "too early");
            fleet_close(&f);
        }
        megamoe_weights_close(prepared);
        free(path);
    }
    close_fixture(x);
}

/* ---- structs of other versions ---- */

/* Row 3 of expert 1's gate holds scales too far apart for sums on the CPU: 2^-127 beside 2^73. */
T_CASE(weights_that_cannot_be_packed) {
    enum { H = 64, I = 32, EXPERTS = 2, GROUPS = H / 32 };
    uint8_t codes[H * I / 2], usual[H * I / 32], apart[H * I / 32];
    memset(codes, 0x22, sizeof codes);
    memset(usual, 127, sizeof usual);
    memset(apart, 127, sizeof apart);
    apart[3 * GROUPS] = 0;
    apart[3 * GROUPS + 1] = 200;
    megamoe_matrix matrices[EXPERTS * 3];
    for (int i = 0; i < EXPERTS * 3; i++) {
        const size_t in = i % 3 == MEGAMOE_DOWN ? I : H;
        matrices[i] = (megamoe_matrix){.codes = codes,
                                       .codes_stride = in / 2,
                                       .scales = i == 3 + MEGAMOE_GATE ? apart : usual,
                                       .scales_stride = in / 32};
    }
    megamoe_layer_desc desc = MEGAMOE_INIT(megamoe_layer_desc);
    desc.hidden = H;
    desc.intermediate = I;
    desc.experts = EXPERTS;
    desc.topk = 1;
    desc.format = MEGAMOE_FORMAT_MXFP4;
    megamoe_weights *weights;
    T_OK(megamoe_weights_from_tensors(&desc, matrices, &weights));
    fixture *x = open_fixture(10);
    const setup s = {.weights = x->m.weights, .threads = 2};
    fleet f = fleet_open_comms(&s);
    megamoe_layer *layer;
    T_STATUS(megamoe_layer_create(f.rank[0].comm, f.rank[0].device, weights, NULL, &layer),
             MEGAMOE_EINEXACT);
    T_CHECK(!layer);
    T_CONTAINS(megamoe_last_error(), "expert 1 gate");
    T_CONTAINS(megamoe_last_error(), "row 3, block 0");
    fleet_close(&f);
    megamoe_weights_close(weights);
    close_fixture(x);
}

T_CASE(structs_of_other_sizes) {
    fixture *x = open_fixture(18);
    const setup s = {.weights = x->m.weights};
    fleet f = fleet_open_comms(&s);
    rank *r = &f.rank[0];
    /* A newer caller whose additions are zero, and one that uses them. */
    struct {
        megamoe_shape shape;
        uint64_t added[2];
    } newer = {r->shape, {0, 0}};
    newer.shape.struct_size = sizeof newer;
    T_OK(megamoe_workspace_create(r->comm, r->device, &newer.shape, &r->capacity, &r->workspace));
    megamoe_workspace_close(r->workspace);
    r->workspace = NULL;
    newer.added[1] = 1;
    T_STATUS(
        megamoe_workspace_create(r->comm, r->device, &newer.shape, &r->capacity, &r->workspace),
        MEGAMOE_EINVAL);
    T_CONTAINS(megamoe_last_error(), "megamoe_shape");
    /* An older caller: what it does not know is zero. */
    megamoe_shape older = r->shape;
    older.struct_size = offsetof(megamoe_shape, input_scale);
    older.input_scale = (megamoe_input_scale)77;
    older.physical_experts = 77;
    older.activations = (megamoe_activation_type)77;
    T_OK(megamoe_workspace_create(r->comm, r->device, &older, &r->capacity, &r->workspace));
    T_OK(megamoe_layer_create(r->comm, r->device, x->m.weights, NULL, &r->layer));
    fleet_forward(&f, &x->b, x->y);
    T_EQ_MEM(x->y, x->want, sizeof x->y);

    megamoe_workspace_detail detail;
    memset(&detail, 0xFF, sizeof detail);
    detail.struct_size = offsetof(megamoe_workspace_detail, token);
    T_OK(megamoe_workspace_status(r->workspace, &detail));
    T_EQ_INT(detail.rank, -1);
    T_EQ_HEX((uint64_t)detail.value, UINT64_MAX); /* beyond the caller's size */
    detail.struct_size = 0;
    T_STATUS(megamoe_workspace_status(r->workspace, &detail), MEGAMOE_EINVAL);
    megamoe_workspace_views views = {.struct_size = 0};
    T_STATUS(megamoe_workspace_get_views(r->workspace, &views), MEGAMOE_EINVAL);
    fleet_close(&f);
    close_fixture(x);
}

T_CASE(what_a_workspace_tells) {
    fixture *x = open_fixture(43);
    const setup s = {.weights = x->m.weights, .ranks = 2, .tokens = 7};
    fleet f = fleet_open(&s);
    megamoe_workspace *workspace = f.rank[1].workspace;
    const char *what = NULL;
    uint64_t sum = 0, bytes;
    int32_t parts = 0;
    for (; megamoe_workspace_part(workspace, parts, &what, &bytes); parts++) {
        T_CHECK_MSG(*what && bytes > 0, "part %d", parts);
        sum += bytes;
    }
    T_CHECK(parts > 1);
    T_EQ_HEX(sum, megamoe_workspace_bytes(workspace));
    T_CHECK(!megamoe_workspace_part(workspace, -1, &what, &bytes));
    T_CHECK(!megamoe_workspace_part(workspace, parts + 1, &what, &bytes));
    megamoe_workspace_times times = MEGAMOE_INIT(megamoe_workspace_times);
    T_STATUS(megamoe_workspace_get_times(workspace, &times), MEGAMOE_EUNSUPPORTED);
    const megamoe_plan plan = MEGAMOE_INIT(megamoe_plan);
    T_STATUS(megamoe_workspace_set_plan(workspace, &plan), MEGAMOE_EUNSUPPORTED);
    int32_t tuned = -1;
    T_OK(megamoe_use_tuned(f.rank[1].layer, workspace, NULL, &tuned));
    T_EQ_INT(tuned, 0);
    megamoe_tuned_key key = MEGAMOE_INIT(megamoe_tuned_key);
    T_STATUS(megamoe_tuned_key_of(f.rank[1].layer, workspace, NULL, &key), MEGAMOE_EUNSUPPORTED);
    T_EQ_INT(megamoe_plan_candidates(f.rank[1].layer, workspace, 1, NULL, 0), 0);
    fleet_close(&f);
    close_fixture(x);
}

T_CASE(closers_take_null) {
    megamoe_layer_close(NULL);
    megamoe_workspace_close(NULL);
    megamoe_comm_close(NULL);
    megamoe_device_close(NULL);
    megamoe_weights_close(NULL);
}
