/* experts.h: where routed experts are while they are used: where the file is mapped, or in the slots of a cache that reads
 * fill. Each context has a cache of its own, so nothing here is locked. Which slot an expert takes changes no result. */
#pragma once

#include "threads.h"
#include "weights.h"

/* One feed-forward applied to some rows: a routed expert, the shared one, or the dense one of a layer. */
struct ffn_group {
    const struct ffn_weights *weights;
    const int32_t *rows;  /* [n] rows of the chunk; NULL: all of them */
    const float *factors; /* [n] of what it says; NULL: 1 */
    int32_t n, first_slot;
    int32_t expert;       /* -1: dense or shared */
};

enum { EXPERT_LEVELS = 6 };

/* A place for one expert in the ring of LRU, which begins and ends with a place without memory: newer is the one that was used
 * longest ago, older the last one. */
struct place {
    struct ffn_weights weights; /* as they lie here */
    int32_t expert;             /* among those of all layers */
    int32_t older, newer;
};

struct experts {
    const colibri_model *model;
    int32_t n_slots;            /* 0: experts are read where the file is mapped */
    uint64_t slot_bytes;        /* of the largest expert, whole pages */
    uint64_t read_bytes;        /* that one read takes at most */
    uint8_t *memory;            /* [n_slots][slot_bytes] */
    struct place *places;       /* [n_slots + 1] */
    int32_t *slot_of;           /* [experts of all layers] -1: in none */
    bool lru;
    uint8_t *uses;              /* [experts of all layers] LFRU: below 1 << (EXPERT_LEVELS - 1) */
    uint64_t *levels;           /* [EXPERT_LEVELS][n_words] a bit for each expert that has a place and may leave it */
    int32_t n_words, since_halved; /* uses since all were halved: what was liked long ago is forgotten */
    int32_t n_filled, n_written; /* slots in use, and ever used, the first ones */
    struct ffn_group *groups;   /* [n_experts + 1] of a turn, those first that are there */
    int32_t *missing;           /* [n_experts] slots that are being filled in this turn */
    int32_t n_missing;
    struct threads lanes;       /* that read */
    _Atomic int32_t fault;      /* errno of a read that failed; 0: none */
    colibri_traffic *traffic;   /* [n_layers] the caller's; NULL: nobody counts */
};

/* Sizes and tables; then the memory of the slots, behind everything else, since much of it may stay untouched. */
void experts_layout(struct experts *experts, struct arena *arena, const colibri_model *model, const colibri_params *params, void **stacks);
void experts_memory(struct experts *experts, struct arena *arena);
void experts_reset(struct experts *experts);
/* Begins a turn: finds or starts to read the first of n groups of the layer's experts, as many as there are slots. Returns
 * those groups, *n of them, the first *n_there of which may be used now, the others after experts_wait. */
struct ffn_group *experts_take(struct experts *experts, int32_t layer, struct ffn_group *groups, int32_t *n, int32_t *n_there);
int32_t experts_wait(struct experts *experts, int32_t layer, colibri_error *error);
