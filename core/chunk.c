/* chunk.c: sizes of the activation buffers. Nothing is reserved for a mechanism that the model leaves off. */
#include "chunk.h"

static void activation_layout(struct activation *a, struct arena *arena, uint64_t rows, int32_t width, bool f32) {
    activation_width(a, width);
    a->f32 = f32 ? arena_take(arena, rows, (uint64_t)width * sizeof *a->f32) : NULL;
    a->q8 = arena_take(arena, rows, a->q8_bytes);
}

static int32_t larger(int32_t a, int32_t b) {
    return a > b ? a : b;
}

static void attention_buffers(struct chunk *k, struct arena *arena, const struct config *c, const colibri_params *p, uint64_t rows) {
    int32_t key_dim = 0, value_dim = 0, out_dim = 0, kv_width = 0, parts = INT32_MAX;
    for (int32_t layer = 0; layer < c->n_layers; layer++) {
        key_dim = larger(key_dim, config_key_dim(c, layer));
        value_dim = larger(value_dim, config_kv_value_dim(c, layer));
        out_dim = larger(out_dim, config_out_dim(c, layer));
        kv_width = larger(kv_width, config_kv_heads(c, layer) * config_key_dim(c, layer));
        if (chunk_attend_parts(c, layer) < parts) parts = chunk_attend_parts(c, layer);
    }
    const uint64_t heads = (uint64_t)c->n_heads, key_bytes = (uint64_t)key_dim * sizeof(float);
    const bool latent = c->kv_latent_dim > 0;
    k->q = arena_take(arena, rows, heads * key_bytes);
    k->k = arena_take(arena, rows, (uint64_t)kv_width * sizeof(float));
    k->v = latent ? NULL : arena_take(arena, rows, (uint64_t)kv_width * sizeof(float));
    k->gate = arena_take(arena, c->attn_gate ? rows : 0, heads * key_bytes);
    activation_layout(&k->attended, arena, rows, c->n_heads * out_dim, false);
    k->attended.f32 = k->q;
    if (latent) {
        k->attended.f32 = arena_take(arena, rows, heads * (uint64_t)larger(c->head_dim, c->value_dim) * sizeof(float));
        activation_layout(&k->q_latent, arena, rows, c->q_latent_dim, true);
        k->head_q8 = arena_take(arena, rows * heads, q8_row_bytes((size_t)larger(c->head_dim - c->rope_dim, c->kv_latent_dim)));
    }
    k->partials = NULL;
    k->partial_blocks = (p->context - 1) / KV_BLOCK + 1;
    if (p->threads == 1 || parts >= 2 * p->threads || k->partial_blocks == 1) return;
    const uint64_t split = (uint64_t)(rows < ATTEND_SPLIT ? rows : ATTEND_SPLIT) * heads;
    k->partials = arena_take(arena, split * (uint64_t)k->partial_blocks, attend_partial_floats(value_dim) * sizeof(float));
}

static void ffn_buffers(struct chunk *k, struct arena *arena, const colibri_model *model, uint64_t rows, uint64_t threads) {
    const struct config *const c = &model->config;
    const uint64_t n_experts = (uint64_t)model->info.n_experts;
    const uint64_t used = n_experts == 0 ? 0 : (uint64_t)c->n_experts_used;
    const uint64_t slots = rows * (n_experts == 0 ? 1 : used + (c->n_ff_shared > 0 ? 1 : 0));
    const int32_t widest = larger(c->n_ff, larger(n_experts == 0 ? 0 : c->n_ff_expert, c->n_ff_shared));
    k->router_logits = arena_take(arena, rows, n_experts * sizeof(float));
    k->experts = arena_take(arena, rows, used * sizeof(int32_t));
    k->expert_weights = arena_take(arena, rows, used * sizeof(float));
    k->shared_weights = arena_take(arena, c->n_ff_shared > 0 ? rows : 0, sizeof(float));
    k->slot_rows = arena_take(arena, rows, used * sizeof(int32_t));
    k->slot_weights = arena_take(arena, rows, used * sizeof(float));
    k->expert_slots = arena_take(arena, n_experts + 1, sizeof(int32_t));
    k->groups = arena_take(arena, n_experts + 1, sizeof *k->groups);
    activation_layout(&k->inner, arena, slots, widest, model->down_reads_f32);
    k->said = arena_take(arena, rows, (uint64_t)c->n_embd * sizeof(float));
    k->scratch_floats = (size_t)(rows < 512 ? 512 : rows) * 4 * PANEL_ROWS;
    k->scratch = arena_take(arena, threads, k->scratch_floats * sizeof(float));
}

void chunk_layout(struct chunk *k, struct arena *arena, const colibri_model *model, const colibri_params *p, int32_t n) {
    const struct config *const c = &model->config;
    const uint64_t rows = (uint64_t)n, half = (uint64_t)c->rope_sets * (uint64_t)c->rope_dim / 2;
    k->ids = arena_take(arena, rows, sizeof *k->ids);
    k->sequences = arena_take(arena, rows, sizeof *k->sequences);
    k->positions = arena_take(arena, rows, sizeof *k->positions);
    k->rope_cosine = arena_take(arena, rows, half * sizeof(float));
    k->rope_sine = arena_take(arena, rows, half * sizeof(float));
    k->x = arena_take(arena, rows, (uint64_t)c->n_embd * sizeof(float));
    activation_layout(&k->h, arena, rows, c->n_embd, true);
    k->side = (struct activation){.width = c->n_embd, .stride = (size_t)c->n_embd};
    k->side.f32 = arena_take(arena, c->parallel_dense ? rows : 0, (uint64_t)c->n_embd * sizeof(float));
    k->products = arena_take(arena, (uint64_t)larger(4, c->kv_latent_dim ? c->n_heads : 0), sizeof *k->products);
    k->output_rows = arena_take(arena, rows, sizeof *k->output_rows);
    k->outputs = arena_take(arena, rows, sizeof *k->outputs);
    const uint64_t start = arena->used;
    attention_buffers(k, arena, c, p, rows);
    uint64_t end = arena->used;
    arena->used = start;
    k->delta = arena_take(arena, rows, ((uint64_t)config_channels(c) + 2 * (uint64_t)c->delta_heads) * sizeof(float));
    activation_layout(&k->delta_out, arena, rows, c->delta_heads * c->delta_value_dim, true);
    if (arena->used > end) end = arena->used;
    arena->used = start;
    ffn_buffers(k, arena, model, rows, (uint64_t)p->threads);
    if (arena->used < end) arena->used = end;
}
