/* cache.h: what sequences remember: ids, the KV cache, states. Positions of a sequence lie in blocks of KV_BLOCK, aligned to
 * absolute positions; a table per sequence names its blocks; sequences forked from one another share whole blocks until one
 * of them writes. A sequence has three states, if layers do: the current one and two that rows which came several at once left
 * behind, in front of the last multiple of KV_BLOCK among them; an evaluation replaces one of them. A sequence rewound to
 * where no state is holds its positions (`lengths`), but is evaluated again from the state in front of them (`valid`).
 *
 * The source of a sequence lies in such blocks too. Layers of an encoder keep nothing: each uses the first layer's place.
 *
 *   block: for each layer behind an encoder, for each kv head:
 *            keys   [positions / 16][key_dim][16]   (element d of 16 neighbouring positions side by side)
 *            values [roundup16(value_dim) / 16][positions][16]   (zeros behind the last element)
 *   state: for each layer that has one, for each key head: for each head that reads it [roundup16(delta_value_dim) / 16]
 *            [delta_key_dim][16]; last inputs of the convolution [conv_width - 1][dim] of query, key, values; up to a
 *            multiple of 16 floats
 */
#pragma once

#include "arena.h"
#include "config.h"
#include "kernels/kernels.h"

enum { STATE_NOW, STATES = 3, STATE_LEFT = 3, STATE_MARKS };

struct cache {
    int32_t n_sequences, n_blocks;      /* blocks in the pool */
    int32_t first_source;               /* the source of sequence s is held as sequence first_source + s; 0: there are none */
    int32_t blocks_per_sequence;
    int32_t block_positions;            /* KV_BLOCK, or less if the context is shorter */
    const struct config *config;
    size_t number_bytes;                /* of keys and values: 4, or 2 of f16 */
    size_t block_bytes, state_bytes;    /* state_bytes 0: no layer has one */
    size_t layer_offset[CONFIG_MAX_LAYERS]; /* in a block, or in a state */
    uint8_t *pool;                      /* [n_blocks][block_bytes] */
    int32_t *tables;                    /* [n_sequences][blocks_per_sequence] */
    int32_t context, *ids;              /* [n_sequences][context] */
    int32_t *lengths, *valid;           /* [n_sequences] positions held; of these evaluated, the others once more when next used */
    int32_t (*marks)[STATE_MARKS];      /* [n_sequences] positions in front of each state (0: useless, -1: never written); at
                                         * STATE_LEFT the one that the rows reserved last leave behind (STATE_NOW: none) */
    uint8_t *states;                    /* [n_sequences][STATES][state_bytes] */
    int32_t *references;                /* [n_blocks] sequences that use the block */
    int32_t *free_blocks;               /* stack of unused blocks */
    int32_t n_free;
    int32_t n_touched;                  /* blocks 0 … n_touched - 1 have been written at some time */
};

/* Sizes, then memory; `context` and `n_sequences`, sources not counted, are checked by the caller. */
void cache_layout(struct cache *cache, struct arena *arena, const struct config *config, int32_t context,
                  int32_t n_sequences, bool half);
void cache_reset(struct cache *cache);
/* Makes positions valid … valid + n - 1 writable, unshared, for an evaluation that found `before` positions. Never fails: the
 * pool holds full sequences. */
void cache_reserve(struct cache *cache, int32_t sequence, int32_t n, int32_t before);
/* The n positions from `first` on that were reserved are evaluated. */
void cache_commit(const struct cache *cache, int32_t sequence, int32_t first, int32_t n);
void cache_rewind(struct cache *cache, int32_t sequence, int32_t position);
/* target becomes a copy of source, with the text that it is made from, if there is one. */
void cache_fork(struct cache *cache, int32_t source, int32_t target);
/* Writes key and value of one layer, head and reserved position. */
void cache_write(const struct cache *cache, int32_t sequence, int32_t layer, int32_t head, int32_t position,
                 const float *key, const float *value);

/* Bytes of a block's keys of one head, and with its values. */
static inline size_t cache_key_bytes(const struct cache *cache, int32_t layer) {
    return (size_t)cache->block_positions * (size_t)config_key_dim(cache->config, layer) * cache->number_bytes;
}

static inline size_t cache_head_bytes(const struct cache *cache, int32_t layer) {
    const size_t value_stride = ((size_t)config_kv_value_dim(cache->config, layer) + 15) & ~(size_t)15;
    return cache_key_bytes(cache, layer) + (size_t)cache->block_positions * value_stride * cache->number_bytes;
}

static inline size_t cache_key_offset(const struct cache *cache, int32_t layer, int32_t head) {
    return cache->layer_offset[layer] + (size_t)head * cache_head_bytes(cache, layer);
}

static inline const int32_t *cache_table(const struct cache *cache, int32_t sequence) {
    return cache->tables + (size_t)sequence * (size_t)cache->blocks_per_sequence;
}

static inline int32_t *cache_ids(const struct cache *cache, int32_t sequence) {
    return cache->ids + (size_t)sequence * (size_t)cache->context;
}

/* Of n positions from `first` on, the one in front of which the state may be kept; 0: none. */
static inline int32_t cache_kept(int32_t first, int32_t n) {
    const int32_t at = (first + n - 1) / KV_BLOCK * KV_BLOCK;
    return at >= first ? at : 0;
}

/* Of all layers: see layer_offset. */
static inline uint8_t *cache_state(const struct cache *cache, int32_t sequence, int32_t which) {
    return cache->states + ((size_t)sequence * STATES + (size_t)which) * cache->state_bytes;
}
