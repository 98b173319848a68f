/* cache.c: block tables, sharing and copy-on-write of the KV cache; states and where they belong. Owns positions; knows
 * nothing of attention. */
#include "cache.h"

#include <string.h>

void cache_layout(struct cache *c, struct arena *arena, const struct config *config, int32_t context, int32_t n_sequences,
                  bool half) {
    c->number_bytes = half ? 2 : 4;
    c->first_source = config->n_encoder_layers > 0 ? n_sequences : 0;
    c->n_sequences = n_sequences + c->first_source;
    c->block_positions = context >= KV_BLOCK ? KV_BLOCK : (context + 15) & ~15;
    c->blocks_per_sequence = (int32_t)(((int64_t)context + KV_BLOCK - 1) / KV_BLOCK);
    c->config = config;
    c->block_bytes = c->state_bytes = 0;
    for (int32_t layer = 0; layer < config->n_layers; layer++) {
        size_t *const bytes = config->mixer[layer] == 1 ? &c->state_bytes : &c->block_bytes;
        c->layer_offset[layer] = *bytes;
        if (layer < config->n_encoder_layers) continue;
        *bytes += config->mixer[layer] == 1
                      ? config_state_floats(config) * (size_t)config->delta_key_heads * sizeof(float)
                      : cache_head_bytes(c, layer) * (size_t)config_kv_heads(config, layer);
    }
    const uint64_t held = (uint64_t)c->n_sequences, n_blocks = held * (uint64_t)c->blocks_per_sequence;
    if (n_blocks > INT32_MAX) arena->overflow = true;
    c->n_blocks = (int32_t)(n_blocks & INT32_MAX);
    c->tables = arena_take(arena, n_blocks, sizeof *c->tables);
    c->references = arena_take(arena, n_blocks, sizeof *c->references);
    c->free_blocks = arena_take(arena, n_blocks, sizeof *c->free_blocks);
    c->lengths = arena_take(arena, held, sizeof *c->lengths);
    c->valid = arena_take(arena, held, sizeof *c->valid);
    c->context = context;
    c->ids = arena_take(arena, held * (uint64_t)context, sizeof *c->ids);
    c->marks = arena_take(arena, held, sizeof *c->marks);
    c->states = arena_take(arena, held * STATES, c->state_bytes);
    c->pool = arena_take(arena, n_blocks, c->block_bytes);
}

void cache_reset(struct cache *c) {
    memset(c->lengths, 0, (size_t)c->n_sequences * sizeof *c->lengths);
    memset(c->valid, 0, (size_t)c->n_sequences * sizeof *c->valid);
    memset(c->marks, -1, (size_t)c->n_sequences * sizeof *c->marks);
    memset(c->references, 0, (size_t)c->n_blocks * sizeof *c->references);
    for (int32_t i = 0; i < c->n_blocks; i++) c->free_blocks[i] = c->n_blocks - 1 - i;
    c->n_free = c->n_blocks;
    c->n_touched = 0;
}

static int32_t take_block(struct cache *c) {
    const int32_t block = c->free_blocks[--c->n_free];
    c->references[block] = 1;
    if (block >= c->n_touched) c->n_touched = block + 1;
    return block;
}

static void drop_block(struct cache *c, int32_t block) {
    if (--c->references[block] == 0) c->free_blocks[c->n_free++] = block;
}

static int32_t blocks_of(int32_t length) {
    return (int32_t)(((int64_t)length + KV_BLOCK - 1) / KV_BLOCK);
}

void cache_reserve(struct cache *c, int32_t sequence, int32_t n, int32_t before) {
    int32_t *const table = c->tables + (size_t)sequence * (size_t)c->blocks_per_sequence;
    const int32_t length = c->valid[sequence], held = blocks_of(length);
    if (length % KV_BLOCK != 0 && c->references[table[held - 1]] > 1) { /* a shared block is about to be written */
        const int32_t shared = table[held - 1], own = take_block(c);
        memcpy(c->pool + (size_t)own * c->block_bytes, c->pool + (size_t)shared * c->block_bytes, c->block_bytes);
        drop_block(c, shared);
        table[held - 1] = own;
    }
    for (int32_t i = held; i < blocks_of(length + n); i++) table[i] = take_block(c);
    c->valid[sequence] = length + n;
    if (length + n > c->lengths[sequence]) c->lengths[sequence] = length + n;
    int32_t *const at = c->marks[sequence], kept = n > 1 ? cache_kept(length, n) : 0;
    const bool none = kept == 0 || at[1] == kept || at[2] == kept;
    at[STATE_LEFT] = none ? STATE_NOW : at[1] > before || (at[2] <= before && at[1] <= at[2]) ? 1 : 2;
    at[STATE_NOW] = at[at[STATE_LEFT]] = 0; /* until all layers have been through */
}

void cache_commit(const struct cache *c, int32_t sequence, int32_t first, int32_t n) {
    int32_t *const at = c->marks[sequence];
    if (at[STATE_LEFT] != STATE_NOW) at[at[STATE_LEFT]] = cache_kept(first, n);
    at[STATE_NOW] = first + n;
}

/* Makes the last state at or before `position` the current one and forgets those behind; returns where it is. */
static int32_t rewind_state(struct cache *c, int32_t sequence, int32_t position) {
    int32_t best = STATE_NOW, *const at = c->marks[sequence];
    for (int32_t i = 0; i < STATES; i++) {
        if (at[i] > position) at[i] = 0;
        if (at[i] > at[best]) best = i;
    }
    if (best == STATE_NOW || at[best] <= 0) return at[STATE_NOW] > 0 ? at[STATE_NOW] : 0;
    memcpy(cache_state(c, sequence, STATE_NOW), cache_state(c, sequence, best), c->state_bytes);
    return at[STATE_NOW] = at[best];
}

void cache_rewind(struct cache *c, int32_t sequence, int32_t position) {
    const int32_t *const table = cache_table(c, sequence);
    const int32_t valid = c->state_bytes > 0 ? rewind_state(c, sequence, position) : position;
    for (int32_t i = blocks_of(valid); i < blocks_of(c->valid[sequence]); i++) drop_block(c, table[i]);
    c->valid[sequence] = valid;
    c->lengths[sequence] = position;
}

void cache_fork(struct cache *c, int32_t source, int32_t target) {
    if (source == target) return;
    cache_rewind(c, target, 0);
    const int32_t *const from = cache_table(c, source);
    int32_t *const to = c->tables + (size_t)target * (size_t)c->blocks_per_sequence;
    for (int32_t i = 0; i < blocks_of(c->valid[source]); i++) {
        to[i] = from[i];
        c->references[from[i]]++;
    }
    for (int32_t i = 0; i < STATES; i++) {
        if (c->marks[source][i] <= 0) continue;
        memcpy(cache_state(c, target, i), cache_state(c, source, i), c->state_bytes);
        c->marks[target][i] = c->marks[source][i];
    }
    memcpy(cache_ids(c, target), cache_ids(c, source), (size_t)c->lengths[source] * sizeof *c->ids);
    c->valid[target] = c->valid[source];
    c->lengths[target] = c->lengths[source];
    if (source < c->first_source) cache_fork(c, source + c->first_source, target + c->first_source);
}

/* The nearest f16, ties to even. */
static uint16_t half_of(float x) {
    union { float number; uint32_t bits; } size = {x}, tiny;
    const uint32_t sign = size.bits >> 16 & 0x8000;
    size.bits &= 0x7fffffff;
    tiny.number = size.number + 0.5f; /* whose last bit is that of f16's subnormals */
    if (size.bits < 113u << 23) return (uint16_t)(sign | (tiny.bits - (126u << 23)));
    const uint32_t rounded = ((size.bits + 0xfff + (size.bits >> 13 & 1)) >> 13) - (112u << 10);
    return (uint16_t)(sign | (size.bits > 255u << 23 ? 0x7e00 : rounded < 0x7c00 ? rounded : 0x7c00));
}

static inline void put(const struct cache *c, uint8_t *at, size_t i, float x) {
    const uint16_t half = c->number_bytes == 2 ? half_of(x) : 0;
    if (c->number_bytes == 2) memcpy(at + i * sizeof half, &half, sizeof half);
    else memcpy(at + i * sizeof x, &x, sizeof x);
}

void cache_write(const struct cache *c, int32_t sequence, int32_t layer, int32_t head, int32_t position, const float *key,
                 const float *value) {
    const int32_t block = cache_table(c, sequence)[position / KV_BLOCK], at = position % KV_BLOCK;
    const int32_t key_dim = config_key_dim(c->config, layer), value_dim = config_kv_value_dim(c->config, layer);
    uint8_t *const keys = c->pool + (size_t)block * c->block_bytes + cache_key_offset(c, layer, head);
    uint8_t *const values = keys + cache_key_bytes(c, layer);
    for (int32_t d = 0; d < key_dim; d++) put(c, keys, (size_t)(at / 16 * key_dim + d) * 16 + (size_t)(at % 16), key[d]);
    for (int32_t d = 0; d < ((value_dim + 15) & ~15); d++) {
        put(c, values, (size_t)(d / 16 * c->block_positions + at) * 16 + (size_t)(d % 16), d < value_dim ? value[d] : 0);
    }
}
