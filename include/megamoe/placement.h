/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where experts lie: what each has had to do, a map that spreads this over the ranks, and moving
 * experts between ranks. A token's output does not depend on the map, to the bit.
 *
 *     megamoe_layer_loads(comm, layer, loads, experts)           on all ranks alike
 *     megamoe_placement_balance(loads, experts, ranks, physical, map)
 *     megamoe_layer_place(comm, layer, &placement)               moves packed experts
 *
 * Workspaces stay as they are: their shape.physical_experts is the number of physical experts of
 * every map they are used with.
 *
 * On a CUDA device
 *   - these calls wait for what is enqueued there, so let all ranks enqueue their forwards first,
 *     and end captures.
 *   - Graphs with forwards of a layer that was created with a map (physical = logical, written out,
 *     is one too) follow its placement as long as ranks and number of physical experts stay the
 *     same. Others have to be captured again: a replay is refused on all ranks, an agreed
 *     MEGAMOE_ESTATE that leaves y unwritten.
 */
#ifndef MEGAMOE_PLACEMENT_H
#define MEGAMOE_PLACEMENT_H

#include "comm.h"
#include "layer.h"
#include "types.h"
#include "weights.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Routes that the physical experts of this rank have received from this layer, in their order, in
 * all forwards on all workspaces since the layer was created, placed or last reset; replays of
 * graphs count too. n must be the number of physical experts of this rank. Thread: any, also during
 * a forward. Returns: MEGAMOE_EINVAL, MEGAMOE_EDEVICE.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_layer_receive_counts(const megamoe_layer *layer,
                                                                        int64_t *counts, int32_t n);

/* Sets these counts to zero. */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_layer_reset_counts(megamoe_layer *layer);

/*
 * Collective: the same counts, added up over all ranks and replicas, for each logical expert.
 * `experts` must be their number. The counts stay. Not for folded communicators.
 * Returns: MEGAMOE_EINVAL, MEGAMOE_EDEVICE, or as megamoe_comm_allgather.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_layer_loads(megamoe_comm *comm,
                                                               const megamoe_layer *layer,
                                                               int64_t *loads, int32_t experts);

/*
 * Proposes a map of `physical` experts over `ranks` ranks for these loads (not negative), one for
 * each of `experts` logical ones. The same input gives the same map, on every machine:
 *
 *   1. Each logical expert has one replica. Of the remaining physical experts each goes to the one
 *      whose load per replica is the largest, of equal ones to that with the fewest replicas, then
 *      to the lowest number; a replica for every rank is the most, as long as there are others.
 *   2. Replicas are given to ranks in the order of load per replica, the largest first, then the
 *      lowest number. Each goes to the rank whose load is the smallest so far, of equal ones to the
 *      lowest, among those that have room and, if there are any, do not have this expert yet.
 *   3. A rank's experts are in the order of their numbers.
 *
 * Returns: MEGAMOE_EINVAL (fewer physical than logical experts, a negative load), MEGAMOE_ENOMEM.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_placement_balance(const int64_t *loads,
                                                                     int32_t experts, int32_t ranks,
                                                                     int32_t physical,
                                                                     int32_t *physical_to_logical);

typedef struct megamoe_placement {
    size_t struct_size;
    /* As in megamoe_layer_options. */
    const int32_t *physical_to_logical;
    int32_t physical_experts;
    /*
     * From where experts are taken that this rank's layer does not hold, rather than from another
     * rank: of the same layer, prepared for this kind of device or in checkpoint form. Used during
     * the call only. May be NULL, also on some ranks only.
     */
    const megamoe_weights *weights;
} megamoe_placement;

/*
 * Collective over `comm`, between forwards: places the experts of a layer as a new map says, equal
 * on all ranks; NULL: physical = logical. Experts that a rank has not got come from another rank,
 * packed as they are, their scales in them; the hash of each is compared. A layer that maps
 * its prepared file (map_prepared) has them all there.
 *
 * `comm` may be another communicator than the one for which the layer was created. So the survivors
 * of a fault go on: they create a communicator among themselves, with new numbers and a `job` or a
 * port that a rank which was taken for dead does not have, place their layers over it, and create
 * new workspaces. Every expert must be held by one of them, or be in the weights that one brings.
 *
 * On all ranks it succeeds, or the layer stays as it was; counts are zero after a success. But
 * where a rank is lost in the last step, others may have the new placement already: survivors place
 * theirs again, whatever each holds. A GPU that fails in the last step leaves a layer whose
 * forwards are refused.
 *
 * On the CPU memory is needed for old and new experts together; on a GPU for old ones and those
 * that change places, or for both where the number of physical experts changes. Experts on their
 * way take up to 64 MiB of host memory on each rank, twice that by messages, and at least one
 * expert each. Blocks, between two steps no longer than the creation deadline of `comm`.
 *
 * Not for folded communicators. Layers of folded ranks are placed by as many threads, over
 * megamoe_comm_threads of as many ranks.
 * Returns: MEGAMOE_EINVAL (maps or layers that differ between ranks, weights of another layer),
 * MEGAMOE_ENOTFOUND (experts that no rank holds: they are listed), MEGAMOE_ECHECK (an expert has
 * not arrived as it was sent), MEGAMOE_EINEXACT, MEGAMOE_ENOMEM, MEGAMOE_EDEVICE, MEGAMOE_EPEER,
 * MEGAMOE_ETIMEDOUT.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_layer_place(megamoe_comm *comm,
                                                               megamoe_layer *layer,
                                                               const megamoe_placement *placement);

#ifdef __cplusplus
}
#endif
#endif
