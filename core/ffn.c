/* ffn.c: the feed-forward of a layer in two work lists and two barriers. First gate, up, activation and quantisation of
 * all groups; then, for a few columns of the output at a time, down of all groups, added up in their order: by expert, the
 * shared one last, so that groups may come in portions. Tokens are read where they lie, never gathered, and what lies
 * between two matrices of a group stays in the worker's scratch. */
#include "layer.h"
#include "product.h"

#include <math.h>
#include <string.h>

/* As product_step, but `rows` rows of an item's panels must fit into the scratch; at least 2 do. */
static int32_t fitting_step(const struct chunk *c, int64_t panels, int64_t rows) {
    const int64_t room = (int64_t)c->scratch_floats / (rows * PANEL_ROWS) & ~(int64_t)1;
    const int32_t step = product_step(c, panels);
    return step < room ? step : (int32_t)room;
}

/* The biases of a group's matrix of `rows` rows; NULL: none. The shared expert has none. */
static const float *biases_of(const struct layer *layer, const struct ffn_group *group, const float *biases, int32_t rows) {
    if (biases == NULL || group->weights == &layer->shared) return NULL;
    return biases + (size_t)(group->expert < 0 ? 0 : group->expert) * (size_t)rows;
}

/* Biases and activation of gate and up of one row from a column on, as the type of down reads it. */
static void activate(const struct chunk *c, const struct ffn_group *group, int32_t row, float *gate, float *up, int32_t from,
                     int32_t count) {
    const struct layer *const layer = chunk_layer(c);
    const size_t slot = (size_t)(group->first_slot + row);
    const float *const gate_bias = biases_of(layer, group, layer->gate_bias, group->weights->gate.rows);
    const float *const up_bias = biases_of(layer, group, layer->up_bias, group->weights->gate.rows);
    if (gate_bias != NULL) c->kernels->add_scaled(gate, gate_bias + from, 1, count);
    if (up_bias != NULL) c->kernels->add_scaled(up, up_bias + from, 1, count);
    /* An input times w makes gate and up w times as large: their product is w^2 gate up sigmoid(w alpha gate). */
    const float scale = group->expert >= 0 && c->config->router_on_input ? group->factors[row] : 1;
    if (c->config->ffn_ungated) c->kernels->clamp(gate, 0, INFINITY, count);
    else c->kernels->silu_mul(gate, up, count, c->config->ffn_limit, scale * c->config->ffn_alpha, c->config->ffn_cubic, c->config->ffn_up_offset);
    if (type_reads_q8(group->weights->down.type)) {
        c->kernels->quantize(gate, group->weights->gate.rows, from / Q8_GROUP, (count + Q8_GROUP - 1) / Q8_GROUP,
                             c->inner.q8 + slot * c->inner.q8_bytes);
    } else {
        memcpy(c->inner.f32 + slot * c->inner.stride + from, gate, (size_t)count * sizeof *gate);
    }
}

/* A few panels of gate and up of one group. Steps are even, so a q8 group of 32 never spans two items. */
static void inner_item(void *argument, int32_t item, int32_t worker) {
    const struct chunk *const c = argument;
    const struct ffn_group *group = c->turn;
    for (int32_t items; item >= (items = (matrix_panels(&group->weights->gate) + c->step - 1) / c->step); group++) item -= items;
    const uint64_t start = profile_clock(&c->profile);
    const struct ffn_weights *const w = group->weights;
    const int32_t panels = matrix_panels(&w->gate), first = item * c->step, width = c->step * PANEL_ROWS;
    float *const scratch = chunk_scratch(c, worker);
    struct matmul gate = product(&w->gate, &c->h, group->rows, group->n, scratch, (size_t)width);
    struct matmul up = product(&w->up, &c->h, group->rows, group->n, scratch + (size_t)group->n * (size_t)width, (size_t)width);
    gate.y_panel = up.y_panel = gate.first_panel = up.first_panel = first;
    gate.n_panels = up.n_panels = panels - first < c->step ? panels - first : c->step;
    c->kernels->matmul[w->gate.type](&gate);
    if (w->up.data != NULL) c->kernels->matmul[w->up.type](&up);
    const int32_t from = first * PANEL_ROWS, left = w->gate.rows - from, count = left < width ? left : width;
    for (int32_t i = 0; i < group->n; i++) {
        activate(c, group, i, gate.y + (size_t)i * (size_t)width, up.y + (size_t)i * (size_t)width, from, count);
    }
    if (group->expert >= 0) profile_expert(&c->profile, c->layer, group->expert, group->visit, start);
}

/* A few panels of down of every group. */
static void down_item(void *argument, int32_t item, int32_t worker) {
    const struct chunk *const c = argument;
    const int32_t n_embd = c->config->n_embd, panels = (n_embd + PANEL_ROWS - 1) / PANEL_ROWS;
    const int32_t first = item * c->step, width = c->step * PANEL_ROWS, from = first * PANEL_ROWS;
    const int32_t count = n_embd - from < width ? n_embd - from : width;
    for (int32_t g = 0; g < c->n_turn; g++) {
        const struct ffn_group *const group = &c->turn[g];
        const uint64_t start = profile_clock(&c->profile);
        const size_t slot = (size_t)group->first_slot;
        struct activation inner = c->inner;
        inner.q8 += slot * inner.q8_bytes;
        if (inner.f32 != NULL) inner.f32 += slot * inner.stride;
        const bool shown = c->observer->expert != NULL && group->expert >= 0;
        struct matmul m = product(&group->weights->down, &inner, NULL, group->n, shown ? c->observer->outputs + from : chunk_scratch(c, worker),
                                  (size_t)(shown ? n_embd : width));
        m.y_panel = m.first_panel = first;
        m.n_panels = panels - first < c->step ? panels - first : c->step;
        c->kernels->matmul[m.w->type](&m);
        const float *const bias = biases_of(chunk_layer(c), group, chunk_layer(c)->down_bias, n_embd);
        for (int32_t i = 0; slot == 0 && i < c->n; i++) memset(c->said + (size_t)i * (size_t)n_embd + from, 0, (size_t)count * sizeof(float));
        for (int32_t i = 0; i < group->n; i++) {
            float *const out = m.y + (size_t)i * m.y_stride, factor = group->factors == NULL ? 1 : group->factors[i];
            if (bias != NULL) c->kernels->add_scaled(out, bias + from, 1, count);
            c->kernels->add_scaled(c->said + (size_t)(group->rows == NULL ? i : group->rows[i]) * (size_t)n_embd + from, out,
                                   c->config->router_on_input && group->expert >= 0 ? factor * factor : factor, count);
            if (shown && c->config->router_on_input) c->kernels->add_scaled(out, out, factor - 1, count);
        }
        if (group->expert >= 0) profile_expert(&c->profile, c->layer, group->expert, group->visit, start);
    }
}

/* A work list over n groups: their gate and up, or their down. */
static void run(struct chunk *c, const struct ffn_group *groups, int32_t n, bool down) {
    int64_t panels = 0, most_rows = 1;
    int32_t items = 0;
    uint64_t bytes = 0;
    for (int32_t g = 0; g < n; g++) {
        const struct matrix *const w = down ? &groups[g].weights->down : &groups[g].weights->gate;
        panels = matrix_panels(w) + (down ? 0 : panels);
        most_rows = groups[g].n > most_rows ? groups[g].n : most_rows;
        bytes += product_bytes(w, down ? groups[g].n : 2 * groups[g].n);
    }
    c->turn = groups;
    c->n_turn = n;
    c->step = fitting_step(c, panels, down ? most_rows : 2 * most_rows);
    for (int32_t g = 0; !down && g < n; g++) items += (matrix_panels(&groups[g].weights->gate) + c->step - 1) / c->step;
    threads_run(c->threads, down ? down_item : inner_item, c, down ? (int32_t)(panels + c->step - 1) / c->step : items, bytes);
}

/* Shows what an expert says of its rows, before its weights, to who wants to see it. */
static int32_t show(struct chunk *c, const struct ffn_group *group) {
    const colibri_observer *const o = c->observer;
    if (o->expert == NULL || group->expert < 0) return COLIBRI_OK;
    const colibri_expert expert = {c->layer, group->expert, group->n, c->config->n_embd, group->rows,
                                   c->sequences, c->positions, group->factors, o->outputs};
    profile_mark(&c->profile, c->layer, COLIBRI_PHASE_DOWN);
    const int32_t answer = o->expert(o->user, &expert);
    profile_mark(&c->profile, c->layer, COLIBRI_PHASE_OBSERVER);
    return answer == 0 ? COLIBRI_OK : COLIBRI_ERROR_CANCELLED;
}

int32_t ffn_experts(struct chunk *c, colibri_error *error) {
    for (int32_t first = 0, n, n_there; first < c->n_groups; first += n) {
        n = c->n_groups - first;
        const struct ffn_group *const turn = experts_take(c->residency, c->layer, c->groups + first, &n, &n_there);
        run(c, turn, n_there, false);
        TRY(experts_wait(c->residency, c->layer, error));
        if (first + n == c->n_groups) experts_ahead(c->residency, c->layer + 1, c->experts, c->n_next);
        run(c, turn + n_there, n - n_there, false);
        profile_mark(&c->profile, c->layer, COLIBRI_PHASE_GATE_UP);
        const int32_t each = c->observer->expert == NULL ? n : 1; /* together, unless somebody looks at what each says */
        for (int32_t g = first; g < first + n; g += each) {
            run(c, c->groups + g, each, true);
            TRY(show(c, &c->groups[g]));
        }
        profile_mark(&c->profile, c->layer, COLIBRI_PHASE_DOWN);
    }
    return COLIBRI_OK;
}

int32_t ffn_dense(struct chunk *c, colibri_error *error) {
    c->groups[0] = (struct ffn_group){&chunk_layer(c)->dense, NULL, NULL, c->n, 0, -1, 0, false};
    c->n_groups = 1;
    return ffn_experts(c, error);
}
