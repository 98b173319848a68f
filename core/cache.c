/* cache.c: block tables, sharing and copy-on-write of the KV cache. Owns positions; knows nothing of attention. */
#include "cache.h"

#include <string.h>

void cache_layout(struct cache *c, struct arena *arena, const struct config *config, int32_t context, int32_t n_sequences)
{
    c->first_source = config->n_encoder_layers > 0 ? n_sequences : 0;
    c->n_sequences = n_sequences + c->first_source;
    c->block_positions = context >= KV_BLOCK ? KV_BLOCK : (context + 15) & ~15;
    c->blocks_per_sequence = (int32_t)(((int64_t)context + KV_BLOCK - 1) / KV_BLOCK);
    c->key_dim = config_key_dim(config);
    c->value_dim = config_kv_value_dim(config);
    c->value_stride = (c->value_dim + 15) & ~15;
    c->head_bytes = (size_t)c->block_positions * (size_t)(c->key_dim + c->value_stride) * sizeof(float);
    c->layer_bytes = c->head_bytes * (size_t)config->n_kv_heads;
    c->block_bytes = c->layer_bytes * (size_t)(config->n_layers - config->n_encoder_layers);
    const uint64_t n_blocks = (uint64_t)c->n_sequences * (uint64_t)c->blocks_per_sequence;
    if (n_blocks > INT32_MAX) arena->overflow = true;
    c->n_blocks = (int32_t)(n_blocks & INT32_MAX);
    c->tables = arena_take(arena, n_blocks, sizeof *c->tables);
    c->references = arena_take(arena, n_blocks, sizeof *c->references);
    c->free_blocks = arena_take(arena, n_blocks, sizeof *c->free_blocks);
    c->lengths = arena_take(arena, (uint64_t)c->n_sequences, sizeof *c->lengths);
    c->pool = arena_take(arena, n_blocks, c->block_bytes);
}

void cache_reset(struct cache *c)
{
    memset(c->lengths, 0, (size_t)c->n_sequences * sizeof *c->lengths);
    memset(c->references, 0, (size_t)c->n_blocks * sizeof *c->references);
    for (int32_t i = 0; i < c->n_blocks; i++) c->free_blocks[i] = c->n_blocks - 1 - i;
    c->n_free = c->n_blocks;
    c->n_touched = 0;
}

static int32_t take_block(struct cache *c)
{
    const int32_t block = c->free_blocks[--c->n_free];
    c->references[block] = 1;
    if (block >= c->n_touched) c->n_touched = block + 1;
    return block;
}

static void drop_block(struct cache *c, int32_t block)
{
    if (--c->references[block] == 0) c->free_blocks[c->n_free++] = block;
}

static int32_t blocks_of(int32_t length)
{
    return (int32_t)(((int64_t)length + KV_BLOCK - 1) / KV_BLOCK);
}

void cache_reserve(struct cache *c, int32_t sequence, int32_t n)
{
    int32_t *const table = c->tables + (size_t)sequence * (size_t)c->blocks_per_sequence;
    const int32_t length = c->lengths[sequence], held = blocks_of(length);
    if (length % KV_BLOCK != 0 && c->references[table[held - 1]] > 1) { /* a shared block is about to be written */
        const int32_t shared = table[held - 1], own = take_block(c);
        memcpy(c->pool + (size_t)own * c->block_bytes, c->pool + (size_t)shared * c->block_bytes, c->block_bytes);
        drop_block(c, shared);
        table[held - 1] = own;
    }
    for (int32_t i = held; i < blocks_of(length + n); i++) table[i] = take_block(c);
    c->lengths[sequence] = length + n;
}

void cache_rewind(struct cache *c, int32_t sequence, int32_t position)
{
    const int32_t *const table = cache_table(c, sequence);
    for (int32_t i = blocks_of(position); i < blocks_of(c->lengths[sequence]); i++) drop_block(c, table[i]);
    c->lengths[sequence] = position;
}

void cache_fork(struct cache *c, int32_t source, int32_t target)
{
    if (source == target) return;
    cache_rewind(c, target, 0);
    const int32_t *const from = cache_table(c, source);
    int32_t *const to = c->tables + (size_t)target * (size_t)c->blocks_per_sequence;
    for (int32_t i = 0; i < blocks_of(c->lengths[source]); i++) {
        to[i] = from[i];
        c->references[from[i]]++;
    }
    c->lengths[target] = c->lengths[source];
    if (source < c->first_source) cache_fork(c, source + c->first_source, target + c->first_source);
}

void cache_write(const struct cache *c, int32_t sequence, int32_t layer, int32_t head, int32_t position, const float *key,
                 const float *value)
{
    const int32_t block = cache_table(c, sequence)[position / KV_BLOCK], at = position % KV_BLOCK;
    uint8_t *const base = c->pool + (size_t)block * c->block_bytes;
    float *const keys = (float *)(void *)(base + cache_key_offset(c, layer, head)) +
                        (size_t)(at / 16) * (size_t)c->key_dim * 16 + at % 16;
    float *const values = (float *)(void *)(base + cache_value_offset(c, layer, head)) + (size_t)at * 16;
    for (int32_t d = 0; d < c->key_dim; d++) keys[(size_t)d * 16] = key[d];
    for (int32_t d = 0; d < c->value_stride; d++) {
        values[(size_t)(d / 16 * c->block_positions) * 16 + (size_t)(d % 16)] = d < c->value_dim ? value[d] : 0;
    }
}
