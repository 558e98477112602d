/* SPDX-License-Identifier: Apache-2.0 */
/* The producer: claims tiles in order, waits for what they depend on, feeds the ring. One thread.
 */
#ifndef MM_CUDA_KERNELS_PRODUCE_CUH
#define MM_CUDA_KERNELS_PRODUCE_CUH

#include "cuda/kernels/dispatch.cuh"
#include "cuda/kernels/trace.cuh"

/* The local expert of a token tile. */
MM_DEVICE int32_t mm_expert_of(const int32_t *tiles, int32_t local, int32_t unit) {
    int32_t low = 0, high = local; /* tiles[low] <= unit < tiles[high] */
    while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        if (tiles[middle] <= unit)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/*
 * The order of work: FC1 of all token tiles in turn, each tile's FC2 `lag` token tiles behind. FC1
 * always stands before the FC2 that needs it, so that no claim waits for a later one. False beyond
 * the last.
 */
MM_DEVICE bool mm_task_of(const mm_block *b, const mm_team *team, uint32_t claim, mm_task *task) {
    const mm_cuda_forward_args *args = team->args;
    const uint32_t units = (uint32_t)b->words->units;
    const uint32_t fc1 = (uint32_t)args->fc1_tiles, fc2 = (uint32_t)args->fc2_tiles;
    const uint32_t lag = (uint32_t)args->lag < units ? (uint32_t)args->lag : units;
    uint32_t unit, tile;
    bool second = false;
    if (claim < lag * fc1) {
        unit = claim / fc1;
        tile = claim % fc1;
    } else if ((claim -= lag * fc1) < (units - lag) * (fc1 + fc2)) {
        unit = claim / (fc1 + fc2);
        tile = claim % (fc1 + fc2);
        second = tile >= fc1;
        if (second)
            tile -= fc1;
        else
            unit += lag;
    } else if ((claim -= (units - lag) * (fc1 + fc2)) < lag * fc2) {
        unit = units - lag + claim / fc2;
        tile = claim % fc2;
        second = true;
    } else {
        return false;
    }
    const int32_t e = mm_expert_of(b->tiles, team->rank->local, (int32_t)unit);
    const int32_t skipped = ((int32_t)unit - b->tiles[e]) * MM_N;
    const int32_t left = b->total[b->first + e] - skipped;
    task->kind = second ? TASK_FC2 : TASK_FC1;
    task->expert = e;
    task->tile = (int32_t)tile;
    task->chunks = second ? args->intermediate_chunks : args->hidden_chunks;
    task->row = b->start[b->first + e] + skipped;
    task->valid = left < MM_N ? left : MM_N;
    task->unit = (int32_t)unit;
    return true;
}

/* How the scales of FC1's input enter its sums. */
MM_DEVICE int32_t mm_input_scales(const mm_cuda_forward_args *args) {
    if (args->input_scale == MEGAMOE_SCALE_TOKEN)
        return SCALES_NONE;
    return args->input_scale == MEGAMOE_SCALE_BLOCK ? SCALES_EXPONENTS : SCALES_FLOATS;
}

/* What a task waits for: one counter of this rank, or words of all sources. */
typedef struct mm_awaited {
    const uint32_t *counter; /* NULL: words */
    uint32_t full;           /* what it counts to */
    uint32_t seen;           /* what it said */
    int32_t source;          /* whose word is to come next */
} mm_awaited;

MM_DEVICE mm_awaited mm_awaited_of(const mm_block *b, const mm_team *team, const mm_task *task) {
    const mm_cuda_forward_args *args = team->args;
    mm_awaited awaited = {NULL, 0, 0, 0};
    const int32_t p = b->first + task->expert;
    if (task->kind == TASK_FC2) {
        awaited.counter = team->rank->fc1_done + b->parity * args->units + task->unit;
        awaited.full = (uint32_t)args->fc1_tiles;
    } else if (args->ranks == 1) {
        awaited.counter = team->rank->dispatched + b->parity * args->physical + p;
        awaited.full = (uint32_t)b->total[p];
    }
    return awaited;
}

/* Whether a task's tokens are there. `first`: it is of FC1. */
MM_DEVICE bool mm_ready(const mm_block *b, const mm_team *team, int32_t expert, bool first,
                        mm_awaited *awaited) {
    if (awaited->counter) {
        awaited->seen = mm_load_acquire_gpu(awaited->counter);
        return (first ? awaited->seen : awaited->seen % FC1_UNUSUAL) == awaited->full;
    }
    const mm_cuda_forward_args *args = team->args;
    uint8_t *window = team->rank->windows[team->rank->rank];
    const uint32_t *words =
        (const uint32_t *)(window + args->window.arrivals) + (int64_t)expert * args->ranks;
    for (; awaited->source < args->ranks; ++awaited->source) {
        const bool sends = __ldcg(mm_counts(b, window, awaited->source) + b->first + expert) != 0;
        if (sends && mm_load_acquire_sys(words + awaited->source) != b->epoch)
            return false;
    }
    return true;
}

/* How the scales of FC2's input enter its sums, when it is there. */
MM_DEVICE int32_t mm_hidden_scales(const mm_awaited *awaited) {
    return MM_PROMOTE || awaited->seen >= FC1_UNUSUAL ? SCALES_EXPONENTS : SCALES_ONE;
}

/* What a tile's next loads read from. */
typedef struct mm_sources {
    const uint8_t *weights;
    const uint8_t *codes;
    const uint8_t *scales;
    uint32_t codes_stride; /* of a chunk */
    uint32_t codes_bytes;  /* of a stage */
    uint32_t scales_stride;
    uint32_t scale_bytes; /* of a stage; 0: there are none */
    uint64_t policy;      /* of the weights */
} mm_sources;

/* Of a tile's tokens and those beyond that the activation takes with them: what an older tile has
 * left in their place need not be finite, and would take the slow way. */
MM_DEVICE int32_t mm_rows_loaded(int32_t valid) {
    const int32_t at_once = 8 * AT_ONCE;
    return (valid + at_once - 1) / at_once * at_once;
}

/* `window`: this rank's. */
MM_DEVICE mm_sources mm_sources_of(const mm_block *b, const mm_team *team, const uint8_t *window,
                                   const mm_task *task) {
    const mm_cuda_forward_args *args = team->args;
    const uint8_t *blob = team->rank->blobs + (uint64_t)task->expert * args->blob_bytes;
    const int64_t from = (int64_t)task->tile * task->chunks * WEIGHT_BYTES;
    const int64_t scale_row =
        task->row & ~(int64_t)15; /* tiles of 8, 24 and 40 may begin in the middle */
    mm_sources s;
    s.codes_stride = (uint32_t)args->rows * 128;
    s.codes_bytes = (uint32_t)mm_rows_loaded(task->valid) * 128;
    if (task->kind == TASK_FC2) {
        s.weights = blob + args->fc2_offset + from;
        s.codes = team->rank->hidden_codes + (int64_t)task->row * 128;
        s.scales = team->rank->hidden_scales + scale_row;
        s.scales_stride = (uint32_t)args->rows;
        s.scale_bytes = SCALE_ROWS;
    } else {
        const uint32_t bytes = mm_scale_bytes(args);
        s.weights = blob + args->fc1_offset + from;
        s.codes = window + args->window.codes + (int64_t)task->row * 128;
        s.scales = window + args->window.scales + scale_row * bytes;
        s.scales_stride = (uint32_t)args->rows * bytes;
        s.scale_bytes = args->input_scale == MEGAMOE_SCALE_TOKEN ? 0 : SCALE_ROWS * bytes;
    }
    /* Weights that several token tiles share come from L2 after the first. */
    const bool once = b->tiles[task->expert + 1] - b->tiles[task->expert] == 1;
    s.policy = once ? mm_policy_stream() : mm_policy_keep();
    return s;
}

/* Where the producer stands in the ring. */
typedef struct mm_ring {
    uint32_t stage;
    uint32_t parity; /* of the phase that fills it */
} mm_ring;

MM_DEVICE void mm_ring_next(mm_ring *ring, uint32_t stages) {
    if (++ring->stage == stages) {
        ring->stage = 0;
        ring->parity ^= 1;
    }
}

/* Where the ring was `steps` ago, at most `stages`. */
MM_DEVICE mm_ring mm_ring_before(const mm_ring *ring, uint32_t steps, uint32_t stages) {
    mm_ring before = *ring;
    if (before.stage < steps) {
        before.stage += stages;
        before.parity ^= 1;
    }
    before.stage -= steps;
    return before;
}

/* The next chunk's weights, and how many bytes the stage will have. */
MM_DEVICE void mm_load_weights(const mm_team *team, mm_sources *s, uint32_t stage) {
    const uint32_t full = team->shared + FULL + 8 * stage;
    mm_barrier_arrive_expect(full, WEIGHT_BYTES + s->codes_bytes + s->scale_bytes);
    mm_bulk_load(team->shared + RING + stage * STAGE_BYTES + TOKEN_BYTES, s->weights, WEIGHT_BYTES,
                 full, s->policy);
    s->weights += WEIGHT_BYTES;
}

/* The next chunk's tokens, into a stage that has been told what to expect. */
MM_DEVICE void mm_load_tokens(const mm_team *team, mm_sources *s, uint32_t stage) {
    const uint64_t policy = mm_policy_keep();
    const uint32_t full = team->shared + FULL + 8 * stage;
    mm_bulk_load(team->shared + RING + stage * STAGE_BYTES, s->codes, s->codes_bytes, full, policy);
    s->codes += s->codes_stride;
    if (s->scale_bytes) {
        mm_bulk_load(team->shared + mm_stage_scales(team->args) +
                         stage * SCALE_ROWS * mm_scale_bytes(team->args),
                     s->scales, s->scale_bytes, full, policy);
        s->scales += s->scales_stride;
    }
}

/* Where a task stands among those that math and finisher take from the producer. */
typedef struct mm_post_place {
    uint32_t slot, parity;
} mm_post_place;

MM_DEVICE mm_task *mm_posted(const mm_team *team, const mm_post_place *place) {
    return (mm_task *)(team->smem + TASKS) + place->slot;
}

/* What a tile needs of its weights' rows, by bytes. */
MM_DEVICE uint32_t mm_row_data_bytes(const mm_cuda_forward_args *args) {
    return MM_CUDA_TILE_ROWS + (args->has_bias ? MM_CUDA_TILE_ROWS * 4 : 0) + 16;
}

/* All of a task that does not depend on its tokens, before these are waited for. Copies may end
 * before mm_post or mm_post_end announces their bytes: the barrier's phase waits for that arrival.
 */
MM_DEVICE void mm_prepare_post(const mm_team *team, const mm_task *task,
                               const mm_post_place *place) {
    mm_barrier_wait(team->shared + TASK_EMPTY + 8 * place->slot, place->parity ^ 1);
    mm_task *to = mm_posted(team, place);
    to->kind = task->kind;
    to->expert = task->expert;
    to->tile = task->tile;
    to->chunks = task->chunks;
    to->row = task->row;
    to->valid = task->valid;
    to->unit = task->unit;
    to->stamps = task->stamps;
    const mm_cuda_forward_args *args = team->args;
    const uint8_t *blob = team->rank->blobs + (uint64_t)task->expert * args->blob_bytes;
    const bool fc2 = task->kind == TASK_FC2;
    const int64_t rows = (int64_t)task->tile * MM_CUDA_TILE_ROWS;
    const uint32_t full = team->shared + TASK_FULL + 8 * place->slot;
    const uint32_t data = team->shared + ROW_DATA + place->slot * MM_CUDA_ROW_DATA_BYTES;
    const uint64_t keep = mm_policy_keep();
    mm_bulk_load(data,
                 blob + (fc2 ? args->fc2_exponents_offset : args->fc1_exponents_offset) + rows,
                 MM_CUDA_TILE_ROWS, full, keep);
    if (args->has_bias)
        mm_bulk_load(data + ROW_BIASES,
                     blob + (fc2 ? args->fc2_bias_offset : args->fc1_bias_offset) + rows * 4,
                     MM_CUDA_TILE_ROWS * 4, full, keep);
    mm_bulk_load(data + ROW_GLOBALS, blob + args->globals_offset, 16, full, keep);
}

/* Hands a task that has been prepared to math and finisher. */
MM_DEVICE void mm_post(const mm_team *team, const uint8_t *window, const mm_post_place *place,
                       int32_t scales) {
    mm_posted(team, place)->scales = scales;
    const uint32_t full = team->shared + TASK_FULL + 8 * place->slot;
    const uint8_t *records =
        window + team->args->window.records + (int64_t)mm_posted(team, place)->row * RECORD_BYTES;
    mm_barrier_arrive_expect(full, mm_row_data_bytes(team->args) + MM_N * RECORD_BYTES);
    mm_bulk_load(team->shared + RECORDS + place->slot * MM_N * RECORD_BYTES, records,
                 MM_N * RECORD_BYTES, full, mm_policy_keep());
}

/* No task comes any more. `prepared`: one was that will not be done. */
MM_DEVICE void mm_post_end(const mm_team *team, bool prepared, const mm_post_place *place) {
    if (!prepared)
        mm_barrier_wait(team->shared + TASK_EMPTY + 8 * place->slot, place->parity ^ 1);
    mm_posted(team, place)->kind = TASK_END;
    mm_barrier_arrive_expect(team->shared + TASK_FULL + 8 * place->slot,
                             prepared ? mm_row_data_bytes(team->args) : 0);
}

/* The next tile's number. */
MM_DEVICE uint32_t mm_claim(const mm_block *b, const mm_team *team) {
    return (uint32_t)(TEAMS * team->args->blocks) +
           mm_add_relaxed_gpu(&team->rank->state->claims[b->parity], 1);
}

/* Claims a tile and prepares its task; false: there is none. */
MM_DEVICE bool mm_prepare(const mm_block *b, const mm_team *team, uint32_t claim,
                          const mm_post_place *place) {
    mm_task task;
    if (!mm_task_of(b, team, claim, &task))
        return false;
    task.stamps = mm_trace_claim(b, team, &task);
    mm_stamp(task.stamps, MM_CUDA_STAMP_CLAIMED);
    mm_prepare_post(team, &task, place);
    return true;
}

/* Asks for the weights of a tile's first `most` chunks, as far as there is room; the chunk that is
 * next. A look at what a tile waits for is a way to L2 and back: weights come before it. */
MM_DEVICE int32_t mm_load_ahead(const mm_team *team, mm_sources *s, int32_t most, int32_t chunk,
                                mm_ring *ring) {
    const int32_t stages = team->args->stages;
    while (chunk < most && chunk < stages &&
           mm_barrier_test(team->shared + EMPTY + 8 * ring->stage, ring->parity ^ 1)) {
        mm_load_weights(team, s, ring->stage);
        mm_ring_next(ring, (uint32_t)stages);
        chunk++;
    }
    return chunk;
}

enum {
    /*
     * Chunks that a tile still has to load when the next one is claimed. To claim a tile and to
     * find where it is takes as long as a few chunks, for which the ring has enough. Not much
     * earlier: a tile that is claimed waits for this team.
     */
    CLAIM_AHEAD = 3,
    /* Stages whose weights a team asks for before its first tokens are there, which come later
     * where memory is busy with the weights of all blocks. Tokens of other GPUs take longer anyway.
     */
    FIRST_STAGES = 2
};

MM_DEVICE void mm_produce(const mm_block *b, const mm_team *given) {
    mm_team own = *given;
    const mm_team *team = &own;
    const uint8_t *window = team->rank->windows[team->rank->rank];
    const uint32_t stages = (uint32_t)team->args->stages;
    mm_ring ring = {0, 0};
    mm_post_place place = {0, 0};
    bool going = true;
    int32_t arrived = -1; /* the last expert whose tokens are known to be here */
    /* The first ones are dealt out: a few tiles go to as many blocks. */
    bool more =
        mm_prepare(b, team, (uint32_t)(team->index * team->args->blocks + b->block), &place);
    while (more) {
        /* Addresses of barriers are found anew for each task: kept, each would take a register. */
        asm volatile("" : "+r"(own.shared));
        const mm_task *task = mm_posted(team, &place);
        const int32_t expert = task->expert, chunks = task->chunks;
        const bool first = task->kind == TASK_FC1;
        mm_sources s = mm_sources_of(b, team, window, task);
        mm_awaited awaited = mm_awaited_of(b, team, task);
        uint64_t *const stamps = task->stamps;
        uint32_t polls = 0;
        uint64_t start = 0;
        const bool limited = team->args->ranks == 1 && arrived < 0 && chunks > FIRST_STAGES;
        const int32_t ahead = limited ? FIRST_STAGES : chunks;
        bool ready = first && expert <= arrived;
        int32_t chunk = ready ? 0 : mm_load_ahead(team, &s, ahead, 0, &ring);
        while (!ready && going) {
            ready = mm_ready(b, team, expert, first, &awaited);
            if (ready)
                break;
            going = mm_keep_waiting(b, &polls, &start, MEGAMOE_PHASE_EXPERTS, awaited.source);
            chunk = mm_load_ahead(team, &s, ahead, chunk, &ring);
        }
        if (first)
            arrived = expert;
        if (team->index == 0 && mm_times(b)[MM_CUDA_TIME_FIRST] == 0)
            mm_times(b)[MM_CUDA_TIME_FIRST] = mm_globaltimer_ns();
        mm_stamp(stamps, MM_CUDA_STAMP_READY);
        mm_fence_proxy_async_global();
        if (going)
            mm_post(team, window, &place,
                    first ? mm_input_scales(team->args) : mm_hidden_scales(&awaited));
        /* Weights that have been asked for get their tokens also when nobody will use them. */
        mm_ring behind = mm_ring_before(&ring, (uint32_t)chunk, stages);
#pragma unroll 1
        for (int32_t c = 0; c < chunk; c++) {
            mm_load_tokens(team, &s, behind.stage);
            if (!going)
                mm_barrier_wait(team->shared + FULL + 8 * behind.stage, behind.parity);
            mm_ring_next(&behind, stages);
        }
        if (!going)
            break;
        if (++place.slot == MM_CUDA_TASK_SLOTS) {
            place.slot = 0;
            place.parity ^= 1;
        }
        const int32_t late = chunks - CLAIM_AHEAD, claim = late > chunk ? late : chunk;
#pragma unroll 1
        for (;; chunk++) {
            if (chunk == claim)
                more = mm_prepare(b, team, mm_claim(b, team), &place);
            if (chunk == chunks)
                break;
            mm_barrier_wait(team->shared + EMPTY + 8 * ring.stage, ring.parity ^ 1);
            mm_load_weights(team, &s, ring.stage);
            mm_load_tokens(team, &s, ring.stage);
            mm_ring_next(&ring, stages);
        }
        mm_stamp(stamps, MM_CUDA_STAMP_LOADED);
    }
    mm_post_end(team, !going, &place);
}

#endif
