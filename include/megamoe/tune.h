/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans that were measured. `megamoe tune` finds out which plan of a forward on a CUDA device is
 * the fastest and stores it; a program that calls megamoe_use_tuned after megamoe_prewarm takes it.
 * A plan shows in no result, only in time.
 *
 * The plans lie in a JSON file (docs/tuning.md): $MEGAMOE_CACHE_DIR/plans.json, else
 * $XDG_CACHE_HOME/megamoe/plans.json, else $HOME/.cache/megamoe/plans.json. Any number of processes
 * may read and store at once. Entries that are malformed or of another version of the file are
 * ignored, with a warning to the log (log.h), and so is a file that is no JSON.
 *
 * Thread: any, for functions without a workspace. None of them waits for a device.
 */
#ifndef MEGAMOE_TUNE_H
#define MEGAMOE_TUNE_H

#include "layer.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MEGAMOE_ROUTING_BYTES = 128 };

/* What a plan was measured for: properties of device, layer and workspace, no names of models. */
typedef struct megamoe_tuned_key {
    size_t struct_size;
    char library[16]; /* version of the library */
    int32_t layout;   /* version of the layout of packed weights */
    int32_t capability_major, capability_minor;
    int32_t multiprocessors, max_ctas;
    int32_t l2_bytes;
    int32_t clock_khz; /* the highest, of the multiprocessors */
    int32_t memory_clock_khz, memory_bus_bits;
    int32_t hidden, intermediate;
    int32_t experts; /* physical, of a rank; the most that one has */
    int32_t topk;
    megamoe_format format;
    megamoe_nvfp4_mode nvfp4; /* of NVFP4 */
    megamoe_accumulate accumulate;
    megamoe_input_scale input_scale;
    int32_t ranks;
    int64_t capacity;                    /* tokens of a rank */
    char routing[MEGAMOE_ROUTING_BYTES]; /* name of the routing profile */
} megamoe_tuned_key;

/* The fastest plan for a number of tokens. */
typedef struct megamoe_tuned_plan {
    int64_t tokens;          /* of each rank, at least 1 */
    int32_t token_tile, lag; /* as in megamoe_plan; both 0: nothing beats the built-in choice */
    double default_us, us;   /* a forward with the built-in choice, and with this plan; medians */
    double gain;             /* median of the paired ratios default / this; 1 for the built-in */
} megamoe_tuned_plan;

/*
 * What the forwards of these two would be looked up by. `routing` NULL: "random".
 * Returns: MEGAMOE_EINVAL, MEGAMOE_EUNSUPPORTED (on the CPU, whose forwards have no plan; folded
 * ranks, which run in one launch).
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_tuned_key_of(const megamoe_layer *layer,
                                                                const megamoe_workspace *workspace,
                                                                const char *routing,
                                                                megamoe_tuned_key *key);

typedef struct megamoe_tuned_options {
    size_t struct_size;
    const char *path;    /* NULL: the file above */
    const char *routing; /* NULL: "random" */
} megamoe_tuned_options;

/*
 * Looks for plans of this layer's kind, tuned at the workspace's capacity or the next larger one.
 * Later forwards of such layers in this workspace take them: a batch of n tokens that of the
 * nearest number of tokens that was measured, at most half as many again or as few. For other
 * batches, and where nothing is found, the built-in choice stays. What megamoe_workspace_set_plan
 * sets comes before both. Each rank does it by itself: their plans may differ, and a rank without
 * the file runs as before. Under capture the plan becomes part of the graph.
 * Sets *found, unless that is NULL, to the plans found: 0 also on the CPU, with folded ranks, and
 * where the environment says MEGAMOE_TUNED=0.
 * Returns: MEGAMOE_EINVAL, MEGAMOE_ENOMEM. Whatever is wrong with the file is a warning.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_use_tuned(megamoe_layer *layer,
                                                             megamoe_workspace *workspace,
                                                             const megamoe_tuned_options *options,
                                                             int32_t *found);

/*
 * The plans that are worth measuring for a batch of `tokens` on each rank: the built-in choice in
 * numbers, then the others. Fills in at most n of them and returns how many there are; 0 on the
 * CPU.
 */
MEGAMOE_API int32_t megamoe_plan_candidates(const megamoe_layer *layer,
                                            const megamoe_workspace *workspace, int64_t tokens,
                                            megamoe_plan *plans, int32_t n);

/*
 * The tokens of a tile that a GPU takes, where no plan says otherwise, for a batch of `tokens` on
 * each of `ranks` ranks. Of `desc` format, experts and top-k count; `nvfp4` counts for NVFP4. Needs
 * no GPU. Returns 0 if an argument cannot be.
 */
MEGAMOE_API int32_t megamoe_plan_token_tile(const megamoe_layer_desc *desc,
                                            megamoe_nvfp4_mode nvfp4, megamoe_accumulate accumulate,
                                            int32_t ranks, int64_t tokens);

/*
 * The tiles that a plan may name for such a layer, in tokens, ascending. Fills in at most n of them
 * and returns how many there are; 0 if `desc` is NULL. Needs no GPU.
 */
MEGAMOE_API int32_t megamoe_plan_token_tiles(const megamoe_layer_desc *desc,
                                             megamoe_nvfp4_mode nvfp4,
                                             megamoe_accumulate accumulate, int32_t *tiles,
                                             int32_t n);

/* ---- The file ---- */

/*
 * Where it is: `path` has room for so many bytes.
 * Returns: MEGAMOE_ENOTFOUND (none of the three variables is set), MEGAMOE_EINVAL (no room).
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_tuned_path(char *path, size_t bytes);

/*
 * Adds `n` plans, or takes the place of those for the same key and tokens. `path` NULL: the file
 * above, whose directory is made. What else the file holds stays, also what this version does not
 * know, but a file that is no JSON is replaced, with a warning.
 * Returns: MEGAMOE_EINVAL, MEGAMOE_ENOTFOUND (no path), MEGAMOE_EIO, MEGAMOE_ENOMEM.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_tuned_store(const char *path,
                                                               const megamoe_tuned_key *key,
                                                               const megamoe_tuned_plan *plans,
                                                               int32_t n);

/* One entry, for the duration of the call: plans in ascending order of tokens. */
typedef void (*megamoe_tuned_fn)(void *user, const megamoe_tuned_key *key,
                                 const megamoe_tuned_plan *plans, int32_t n);

/* Calls fn for each entry. Where there is no file there is none. Returns: MEGAMOE_ENOMEM. */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_tuned_each(const char *path, megamoe_tuned_fn fn,
                                                              void *user);

typedef bool (*megamoe_tuned_match_fn)(void *user, const megamoe_tuned_key *key);

/*
 * Removes the entries for which `match` is true; with NULL all of them, also those that cannot be
 * read. *removed, unless NULL, is how many they were.
 * Returns: MEGAMOE_EIO, MEGAMOE_ENOMEM.
 */
MEGAMOE_API MEGAMOE_CHECKED megamoe_status megamoe_tuned_forget(const char *path,
                                                                megamoe_tuned_match_fn match,
                                                                void *user, int32_t *removed);

#ifdef __cplusplus
}
#endif
#endif
