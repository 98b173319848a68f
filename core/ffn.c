/* ffn.c: gate, up, activation, down of all groups of a layer in two work lists, then the combination in fixed order:
 * an expert's rank for the row, best first, the shared expert last. Tokens are read where they lie, never gathered. */
#include "ffn.h"

#include "product.h"

#include <string.h>

struct inner_list {
    const struct chunk *chunk;
    int32_t layer, step;
};

/* A few panels of gate and up of one group, the activation, and the quantisation that down will read. Steps are even, so
 * a q8 group of 32 never spans two items. */
static void inner_item(void *argument, int32_t item)
{
    const struct inner_list *const list = argument;
    const struct chunk *const c = list->chunk;
    const struct ffn_group *group = c->groups;
    int32_t items;
    while (item >= (items = (matrix_panels(&group->weights->gate) + list->step - 1) / list->step)) {
        item -= items;
        group++;
    }
    const struct ffn_weights *const w = group->weights;
    const uint64_t start = profile_ticks(&c->profile);
    const int32_t panels = matrix_panels(&w->gate), first = item * list->step, n_ff = w->gate.rows;
    const size_t stride = (size_t)c->inner.width, slot = (size_t)group->first_slot;
    struct matmul gate = product(&w->gate, &c->h, group->rows, group->n, c->inner.f32 + slot * stride, stride);
    struct matmul up = product(&w->up, &c->h, group->rows, group->n, c->up + slot * stride, stride);
    gate.first_panel = up.first_panel = first;
    gate.n_panels = up.n_panels = panels - first < list->step ? panels - first : list->step;
    c->kernels->matmul[w->gate.type](&gate);
    c->kernels->matmul[w->up.type](&up);

    const int32_t from = first * PANEL_ROWS, end = from + gate.n_panels * PANEL_ROWS, to = end < n_ff ? end : n_ff;
    for (int32_t i = 0; i < group->n; i++) {
        float *const inner = gate.y + (size_t)i * stride;
        c->kernels->silu_mul(inner + from, up.y + (size_t)i * stride + from, to - from);
        if (!type_reads_q8(w->down.type)) continue;
        c->kernels->quantize(inner, n_ff, from / Q8_GROUP, (to - from + Q8_GROUP - 1) / Q8_GROUP,
                             c->inner.q8 + (slot + (size_t)i) * c->inner.q8_bytes);
    }
    if (group->expert >= 0) profile_expert(&c->profile, list->layer, group->expert, start);
}

/* All groups of the chunk: slot_out[slot] = down(silu(gate h) * up h). */
static void run_groups(struct chunk *c, int32_t layer)
{
    int64_t panels = 0;
    int32_t items = 0;
    uint64_t bytes = 0;
    for (int32_t g = 0; g < c->n_groups; g++) {
        panels += matrix_panels(&c->groups[g].weights->gate);
        bytes += 2 * product_bytes(&c->groups[g].weights->gate, c->groups[g].n);
    }
    struct inner_list list = {c, layer, product_step(c, panels)};
    for (int32_t g = 0; g < c->n_groups; g++) {
        const struct ffn_group *const group = &c->groups[g];
        const struct matrix *const down = &group->weights->down;
        const size_t slot = (size_t)group->first_slot, n_embd = (size_t)c->config->n_embd;
        const struct activation inner = {
            .f32 = c->inner.f32 + slot * (size_t)c->inner.width,
            .q8 = c->inner.q8 + slot * c->inner.q8_bytes,
            .width = c->inner.width,
            .q8_bytes = c->inner.q8_bytes,
        };
        items += (matrix_panels(&group->weights->gate) + list.step - 1) / list.step;
        c->products[g] = product(down, &inner, NULL, group->n, c->slot_out + slot * n_embd, n_embd);
    }
    threads_run(c->threads, inner_item, &list, items, bytes);
    profile_mark(&c->profile, layer, COLIBRI_PHASE_GATE_UP);
    product_run_experts(c, layer);
    profile_mark(&c->profile, layer, COLIBRI_PHASE_DOWN);
}

static void dense_item(void *argument, int32_t row)
{
    const struct chunk *const c = argument;
    const size_t at = (size_t)row * (size_t)c->config->n_embd;
    c->kernels->add(c->x + at, c->slot_out + at, c->config->n_embd);
}

void ffn_dense(struct chunk *c, int32_t layer)
{
    c->groups[0] = (struct ffn_group){&c->model->layers[layer].dense, NULL, c->n, 0, -1};
    c->n_groups = 1;
    run_groups(c, layer);
    threads_run(c->threads, dense_item, c, c->n, 2 * row_bytes(c->n, c->config->n_embd));
    profile_mark(&c->profile, layer, COLIBRI_PHASE_COMBINE);
}

static void combine_item(void *argument, int32_t row)
{
    const struct chunk *const c = argument;
    const int32_t n_embd = c->config->n_embd, used = c->config->n_experts_used;
    const size_t width = (size_t)n_embd, pair = (size_t)row * (size_t)used;
    float *const sum = c->h.f32 + (size_t)row * width;
    memset(sum, 0, width * sizeof *sum);
    for (int32_t i = 0; i < used; i++) {
        c->kernels->add_scaled(sum, c->slot_out + (size_t)c->slots[pair + (size_t)i] * width,
                               c->expert_weights[pair + (size_t)i], n_embd);
    }
    if (c->config->n_ff_shared > 0) {
        const size_t slot = (size_t)c->n * (size_t)used + (size_t)row;
        c->kernels->add_scaled(sum, c->slot_out + slot * width, c->shared_weights[row], n_embd);
    }
    c->kernels->add(c->x + (size_t)row * width, sum, n_embd);
}

void ffn_experts(struct chunk *c, int32_t layer)
{
    run_groups(c, layer);
    const int64_t read = (int64_t)(c->config->n_experts_used + 2) * c->config->n_embd;
    threads_run(c->threads, combine_item, c, c->n, row_bytes(c->n, read));
    profile_mark(&c->profile, layer, COLIBRI_PHASE_COMBINE);
}
