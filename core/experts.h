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
    int32_t visit;        /* which of the chunk's groups it is */
    bool read;            /* its expert had to be read from the file */
};

enum { MOST_USES = 31, LEVELS = 6 }; /* that LFRU counts, and how many numbers of digits that are */
/* Experts that are read ahead at a time; rows of a decoding evaluation; evaluations of a trial, and from its begin to the next one's. */
enum { AHEAD = 2, AHEAD_ROWS = 4, TRIAL = 64, TRIAL_EVERY = 1024 };

/* A slot and who has it, in the ring of LRU, which begins and ends with one without memory: newer is the one that was used longest ago. */
struct place {
    struct ffn_weights weights; /* as they lie here */
    int32_t expert;             /* among those of all layers; -1: free */
    int32_t buffer;             /* of `memory` that they lie in */
    int32_t older, newer;
};

struct experts {
    const colibri_model *model;
    const colibri_params *params; /* of the context */
    int32_t n_slots;            /* 0: experts are read where the file is mapped */
    uint64_t slot_bytes;        /* of the largest expert, whole pages */
    uint64_t read_bytes;        /* that one read takes at most */
    int32_t n_ahead, n_pieces;  /* buffers for experts read ahead; reads that an expert takes */
    uint8_t *memory;            /* [n_ahead + n_slots][slot_bytes] */
    _Atomic int32_t *pieces;    /* [n_ahead + n_slots][n_pieces] the expert of which this is in a buffer; -1: of none */
    struct place *places;       /* [n_slots + 1] */
    int32_t *slot_of;           /* [experts of all layers] -1: in none */
    uint8_t *uses;              /* [experts of all layers] LFRU: up to MOST_USES */
    uint64_t *levels;           /* [LEVELS][n_words] a bit for each expert that has a slot and may leave it */
    int32_t since_halved;       /* uses since all counts were halved: what was liked long ago is forgotten */
    int32_t n_words, n_filled, n_written; /* slots in use, and ever used, the first ones */
    struct ffn_group *groups;   /* [n_experts + 1] of a turn, those first that are there */
    int32_t *missing;           /* [n_experts] slots that are being filled in this turn */
    int32_t n_missing;
    struct asked { int32_t expert, buffer; } asked[AHEAD]; /* of the next layer, by scouts */
    int32_t n_asked, spare[AHEAD]; /* buffers that belong to no slot */
    struct threads lanes, scouts; /* that read what is missing, and ahead */
    _Atomic int32_t fault;      /* errno of a read that failed; 0: none */
    _Atomic bool late;          /* to read ahead: what has not begun is left to the lanes */
    bool decodes, tries, asks;  /* this evaluation is of a few rows; of a trial; asks ahead */
    bool reads_ahead;           /* scouts have work */
    int32_t n_decoded;          /* evaluations of a few rows since the last trial began */
    uint64_t since;             /* the clock as this evaluation began */
    float times[2][TRIAL / 2];  /* -nanoseconds, in this trial: off, on */
    colibri_gate *gate, own_gate; /* the caller's, or ours */
};

/* Sizes and tables; then the memory of the slots, behind everything else, since much of it may stay untouched. */
void experts_layout(struct experts *experts, struct arena *arena, const colibri_model *model, const colibri_params *params);
void experts_memory(struct experts *experts, struct arena *arena);
void experts_reset(struct experts *experts);
/* Begins a turn: finds or starts to read the first of n groups of the layer's experts, as many as there are slots. Returns
 * those groups, *n of them, the first *n_there of which may be used now, the others after experts_wait. */
struct ffn_group *experts_take(struct experts *experts, int32_t layer, struct ffn_group *groups, int32_t *n, int32_t *n_there);
int32_t experts_wait(struct experts *experts, int32_t layer, colibri_error *error);
/* Starts to read up to AHEAD of n experts of a layer, those that have no slot, the first ones first, until experts_settle or the
 * layer's turn. Slots and who leaves them stay what they would be without. */
void experts_ahead(struct experts *experts, int32_t layer, const int32_t *chosen, int32_t n);
void experts_settle(struct experts *experts);
/* Around an evaluation of so many rows: whether it asks ahead, and what that took. */
void experts_begin(struct experts *experts, int32_t n_rows);
void experts_end(struct experts *experts);
