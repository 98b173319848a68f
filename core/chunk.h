/* chunk.h: the rows that are evaluated together and every buffer their evaluation needs. One row is one token of one
 * sequence. Owns the layout of the activations; the mechanisms (attention, router, ffn) read and write them. */
#pragma once

#include "cache.h"
#include "experts.h"
#include "profile.h"

enum { ATTEND_SPLIT = 4 }; /* most rows whose attention is shared out by blocks of the past */

/* Rows as matrices of any type read them: f32, and quantised for q8 and q4. */
struct activation {
    float *f32;          /* [rows][stride]; NULL where no matrix reads it */
    uint8_t *q8;         /* [rows][q8_bytes] */
    int32_t width;
    size_t stride, q8_bytes;
};

/* Rows of another width in the same memory. */
static inline void activation_width(struct activation *a, int32_t width) {
    a->width = width;
    a->stride = (size_t)width;
    a->q8_bytes = q8_row_bytes((size_t)width);
}

struct chunk {
    const colibri_model *model;
    const struct config *config;
    const struct kernels *kernels;
    struct threads *threads;
    struct cache *cache;
    struct experts *residency;            /* of the experts */
    const colibri_observer *observer;     /* of this evaluation */
    _Atomic bool *cancelled;              /* somebody wants it to end */
    uint64_t done, total;                 /* of it, in rows x layers */
    struct profile profile;
    int32_t layer;                        /* that the rows are in */
    int32_t n;                            /* rows in use */
    int32_t *ids, *sequences, *positions; /* [n] */
    float *rope_cosine, *rope_sine;       /* [n][rope_sets][rope_dim / 2] */
    float *x;                             /* [n][n_embd] the residual stream */
    struct activation h;                  /* [n][n_embd] what a layer's matrices read: x normalised */
    struct activation side;               /* [n][n_embd] what a dense feed-forward beside the experts says; f32 only */
    float *q, *k, *v;                     /* [n][heads x key_dim]; v NULL where values are made of a latent in k */
    struct activation attended;           /* [n][n_heads x width of a value of the layer]; takes the place of q, but if values are made of a
                                           * latent: then queries before they enter latent space lie here too */
    struct activation q_latent;           /* [n][q_latent_dim] */
    float *gate;                          /* [n][n_heads x head_dim] whose sigmoid scales `attended` */
    float *delta;                         /* [n][config_channels queries, keys, values | delta_heads betas | as many decays] */
    struct activation delta_out;          /* [n][delta_heads x delta_value_dim] a gate, then what it lets through */
    uint8_t *head_q8;                     /* [n][n_heads] what the matrices of single heads read */
    float *partials;                      /* [ATTEND_SPLIT x n_heads][partial_blocks] of a few rows, attention shared out by
                                           * blocks; NULL where heads alone keep the threads busy */
    int32_t partial_blocks;
    float *router_logits;                 /* [n][n_experts] */
    int32_t *experts;                     /* [n][n_experts_used] best first */
    float *expert_weights;                /* [n][n_experts_used] */
    int32_t n_next;                       /* experts that the next layer may choose, in the place of `experts` */
    float *shared_weights;                /* [n] */
    int32_t *slot_rows;                   /* [slots] the row of a slot: a pair of row and expert, by experts */
    float *slot_weights;                  /* [slots] of routed experts */
    int32_t *expert_slots;                /* [n_experts + 1] first slot of each expert */
    struct ffn_group *groups;             /* [n_experts + 1] those with rows, by experts, the shared one last */
    int32_t n_groups;
    const struct ffn_group *turn;         /* [n_turn] those that the work list at hand is about */
    int32_t n_turn;
    float *said;                          /* [n][n_embd] what a feed-forward says, its groups added up in their order */
    struct activation inner;              /* [slots][widest n_ff] gate and up activated */
    float *scratch;                       /* [threads][scratch_floats] what a worker keeps within an item */
    size_t scratch_floats;                /* at least 2 panels of gate and up of every row */
    struct matmul *products;              /* [4, or n_heads where heads have their own] work list */
    int32_t step;                         /* panels that an item of the work list at hand takes */
    int32_t *output_rows;                 /* [n_outputs] rows whose logits are wanted */
    float **outputs;                      /* [n_outputs] where they go */
    int32_t n_outputs;
};

static inline const struct layer *chunk_layer(const struct chunk *chunk) {
    return &chunk->model->layers[chunk->layer];
}

/* Where cosines and sines of a row begin, if the layer rotates. */
static inline size_t chunk_rope_at(const struct chunk *chunk, int32_t row) {
    const struct config *const c = chunk->config;
    return ((size_t)row * (size_t)c->rope_sets + (size_t)c->rope_set[chunk->layer]) * (size_t)(c->rope_dim / 2);
}

static inline float *chunk_scratch(const struct chunk *chunk, int32_t worker) {
    return chunk->scratch + (size_t)worker * chunk->scratch_floats;
}

/* Parts that attention to one block is shared out in: key/value heads, and tiles of the query heads that read one. */
static inline int32_t chunk_attend_parts(const struct config *config, int32_t layer) {
    const int32_t kv_heads = config_kv_heads(config, layer);
    return kv_heads * ((config->n_heads / kv_heads + ATTEND_TILE - 1) / ATTEND_TILE);
}

/* How many rows from `row` on are of its sequence. */
static inline int32_t chunk_run(const struct chunk *chunk, int32_t row) {
    int32_t n = 1;
    while (row + n < chunk->n && chunk->sequences[row + n] == chunk->sequences[row]) n++;
    return n;
}

/* The buffers of attention, of the delta rule and of the feed-forward share their memory: a layer is in one of them at a time. */
void chunk_layout(struct chunk *chunk, struct arena *arena, const colibri_model *model, const colibri_params *params,
                  int32_t rows);
