/* SPDX-License-Identifier: Apache-2.0 */
/* Windows of ranks on several GPUs and in several processes, on GPUs that are host memory. */
#include <string.h>

#include "../../comm/crew.h"
#include "cuda/workspace.h"
#include "fake.h"

enum { RANKS = 4 };

static const megamoe_shape shape = {
    .hidden = 128, .intermediate = 128, .experts = 8, .topk = 2, .physical_experts = 8};
static const megamoe_capacity capacity = {.tokens = 16, .pool_rows = 64, .deadline_ms = 1000};

/* Ranks of one process; rank r is on GPU gpus[r]. */
typedef struct fixture {
    int32_t ranks;
    mm_cuda_device devices[RANKS];
    megamoe_comm *comms[RANKS];
    mm_cuda_workspace *workspaces[RANKS];
    mm_cuda_card cards[RANKS];
} fixture;

static void open_ranks(fixture *f, int32_t ranks, const int32_t *gpus) {
    *f = (fixture){.ranks = ranks};
    T_OK(megamoe_comm_folded(ranks, f->comms));
    for (int32_t r = 0; r < ranks; r++) {
        const fake_gpu before = fake;
        f->devices[r] = fake_open(gpus[r]);
        if (r)
            fake = before;
    }
}

static void open_workspaces(fixture *f) {
    for (int32_t r = 0; r < f->ranks; r++) {
        T_OK(mm_cuda_workspace_open(&shape, &capacity, f->comms[r], &f->devices[r],
                                    &f->workspaces[r]));
        f->cards[r] = mm_cuda_workspace_card(f->workspaces[r]);
    }
}

static void close_ranks(fixture *f) {
    for (int32_t r = 0; r < f->ranks; r++) {
        mm_cuda_workspace_close(f->workspaces[r]);
        megamoe_comm_close(f->comms[r]);
    }
    T_EQ_INT(fake.allocations, 0);
    T_EQ_INT(fake.entered, 0);
}

T_CASE(ranks_on_several_gpus_admit_each_other) {
    static const int32_t gpus[RANKS] = {0, 1, 1, 3};
    fixture f;
    open_ranks(&f, RANKS, gpus);
    open_workspaces(&f);
    T_EQ_INT(fake.granted, RANKS); /* each to its own GPU */
    for (int32_t r = 0; r < RANKS; r++)
        T_OK(mm_cuda_workspace_meet(f.workspaces[r], f.comms[r], f.cards));
    T_EQ_INT(fake.granted, 3 * RANKS); /* and to the two others */
    for (int32_t r = 0; r < RANKS; r++)
        for (int32_t peer = 0; peer < RANKS; peer++)
            T_EQ_HEX(f.workspaces[r]->windows[peer], f.workspaces[peer]->window);
    close_ranks(&f);
}

T_CASE(gpus_out_of_reach_are_refused) {
    static const int32_t gpus[2] = {0, 2};
    fixture f;
    open_ranks(&f, 2, gpus);
    open_workspaces(&f);
    fake.unreachable = 1 << 2;
    T_STATUS(mm_cuda_workspace_meet(f.workspaces[0], f.comms[0], f.cards), MEGAMOE_EUNSUPPORTED);
    T_CONTAINS(megamoe_last_error(), "cuda:0 cannot write into the memory of cuda:2, where rank 1");
    f.cards[1].instance = true;
    T_STATUS(mm_cuda_workspace_meet(f.workspaces[0], f.comms[0], f.cards), MEGAMOE_EUNSUPPORTED);
    T_CONTAINS(megamoe_last_error(), "rank 1 is on another MIG instance than cuda:0");
    close_ranks(&f);
}

T_CASE(without_pages_ranks_share_a_gpu) {
    static const int32_t same[2] = {1, 1}, different[2] = {0, 1};
    fixture f;
    open_ranks(&f, 2, same);
    fake.no_pages = true;
    open_workspaces(&f);
    for (int32_t r = 0; r < 2; r++)
        T_OK(mm_cuda_workspace_meet(f.workspaces[r], f.comms[r], f.cards));
    close_ranks(&f);
    open_ranks(&f, 2, different);
    fake.no_pages = true;
    open_workspaces(&f);
    T_STATUS(mm_cuda_workspace_meet(f.workspaces[1], f.comms[1], f.cards), MEGAMOE_EUNSUPPORTED);
    T_CONTAINS(megamoe_last_error(), "without virtual memory management");
    close_ranks(&f);
}

/* ---- processes ---- */

typedef struct member_state {
    mm_cuda_device device;
    megamoe_comm *comm;
    mm_cuda_workspace *ws;
} member_state;

static void open_member(const member *m, member_state *s) {
    s->device = fake_open(m->rank);
    T_OK(crew_meet(m, 0, &s->comm));
    T_OK(mm_cuda_workspace_open(&shape, &capacity, s->comm, &s->device, &s->ws));
}

static megamoe_status meet_member(const member *m, member_state *s, mm_cuda_card card) {
    mm_cuda_card cards[RANKS];
    T_OK(megamoe_comm_allgather(s->comm, &card, cards, sizeof card));
    (void)m;
    return mm_cuda_workspace_meet(s->ws, s->comm, cards);
}

static void close_member(member_state *s) {
    mm_cuda_workspace_close(s->ws);
    megamoe_comm_close(s->comm);
    T_EQ_INT(fake.allocations, 0);
}

/* Every rank writes its number into every window, and finds those of all in its own. */
static void write_to_all(const member *m) {
    member_state s;
    open_member(m, &s);
    T_OK(meet_member(m, &s, mm_cuda_workspace_card(s.ws)));
    T_EQ_INT(s.ws->shared.fd, -1);
    for (int32_t r = 0; r < m->size; r++)
        memset((uint8_t *)fake_memory(s.ws->windows[r]) + m->rank, 10 + m->rank, 1);
    uint8_t mine = 0, all[RANKS];
    T_OK(megamoe_comm_allgather(s.comm, &mine, all, 1));
    for (int32_t r = 0; r < m->size; r++)
        T_EQ_INT(((uint8_t *)fake_memory(s.ws->window))[r], 10 + r);
    T_OK(megamoe_comm_allgather(s.comm, &mine, all, 1));
    close_member(&s);
}

T_CASE(processes_map_each_others_windows) {
    crew_run(2, write_to_all, NULL);
    crew_run(RANKS, write_to_all, NULL);
}

/* In the cell of the forward after its last one, in every other window; the own one stays. */
static void close_in_good_order(const member *m) {
    member_state s;
    open_member(m, &s);
    T_OK(meet_member(m, &s, mm_cuda_workspace_card(s.ws)));
    uint8_t mine = 0, all[RANKS];
    T_OK(mm_cuda_workspace_set_epoch(s.ws, UINT32_MAX - 1 + (uint32_t)m->rank / 2));
    T_OK(megamoe_comm_allgather(s.comm, &mine, all, 1));
    if (m->rank == m->size - 1) {
        mm_cuda_workspace_close(s.ws);
        s.ws = NULL;
    }
    T_OK(megamoe_comm_allgather(s.comm, &mine, all, 1));
    const uint32_t last = UINT32_MAX - 1 + (uint32_t)(m->size - 1) / 2;
    const uint32_t parity = (last + 1) & 1;
    for (int32_t r = 0; s.ws && r < m->size; r++) {
        const mm_cuda_cell *cell =
            (const mm_cuda_cell *)fake_memory(s.ws->window + s.ws->buffers.window.cells) +
            (size_t)parity * (size_t)m->size + r;
        const bool closed = r == m->size - 1;
        T_EQ_INT(cell->status, closed ? MEGAMOE_EPEER : MEGAMOE_OK);
        if (closed)
            T_EQ_INT(cell->epoch, (uint32_t)(last + 1));
    }
    T_OK(megamoe_comm_allgather(s.comm, &mine, all, 1));
    close_member(&s);
}

T_CASE(a_rank_that_closes_tells_the_others) {
    crew_run(2, close_in_good_order, NULL);
    crew_run(RANKS, close_in_good_order, NULL);
}

/* One rank cannot map, another does not see the same pages: each says so and nobody waits. */
static void fail_to_meet(const member *m) {
    member_state s;
    open_member(m, &s);
    mm_cuda_card card = mm_cuda_workspace_card(s.ws);
    if (m->rank == 1)
        card.bytes /= 2;
    if (m->rank == 2)
        fake.allocations_left = 0;
    const megamoe_status status = meet_member(m, &s, card);
    T_EQ_INT(status, m->rank == 0 ? MEGAMOE_EIO : m->rank == 1 ? MEGAMOE_OK : MEGAMOE_ENOMEM);
    T_CONTAINS(megamoe_last_error(), m->rank == 0 ? "rank 1 shares" : "");
    close_member(&s);
}

T_CASE(a_rank_that_cannot_map_keeps_nobody_waiting) {
    crew_run(3, fail_to_meet, NULL);
}

static void cannot_export(const member *m) {
    member_state s = {.device = fake_open(m->rank)};
    fake.no_descriptors = true;
    T_OK(crew_meet(m, 0, &s.comm));
    T_STATUS(mm_cuda_workspace_open(&shape, &capacity, s.comm, &s.device, &s.ws),
             MEGAMOE_EUNSUPPORTED);
    T_CONTAINS(megamoe_last_error(), "shares no memory between processes");
    close_member(&s);
}

T_CASE(a_driver_that_exports_nothing_is_refused) {
    crew_run(2, cannot_export, NULL);
}
