/* record.c: appends to the arrays of a colibri_recording, which have room: evaluate.c has seen to that. */
#include "layer.h"

#include <string.h>

void record_choices(const struct chunk *c) {
    colibri_recording *const r = c->profile.recording;
    if (r == NULL) return;
    const size_t used = (size_t)c->config->n_experts_used, n = (size_t)c->n, at = (size_t)r->n_choices;
    const size_t there = (size_t)c->config->n_experts[c->layer], most = (size_t)c->model->info.n_experts;
    memcpy(r->experts + at * used, c->experts, n * used * sizeof *r->experts);
    memcpy(r->weights + at * used, c->expert_weights, n * used * sizeof *r->weights);
    for (size_t row = 0; r->logits != NULL && row < n; row++) {
        float *const logits = memcpy(r->logits + (at + row) * most, c->router_logits + row * there, there * sizeof *logits);
        memset(logits + there, 0xff, (most - there) * sizeof *logits); /* a NaN */
    }
    for (int32_t g = 0; g < c->n_groups && c->groups[g].expert >= 0; g++) r->visit_ns[r->n_visits + g] = 0;
}

void record_visits(const struct chunk *c) {
    colibri_recording *const r = c->profile.recording;
    if (r == NULL) return;
    for (int32_t g = 0; g < c->n_groups && c->groups[g].expert >= 0; g++) r->visit_read[r->n_visits++] = c->groups[g].read;
    r->n_choices += c->n;
}

void record_rows(const struct chunk *c, bool source) {
    colibri_recording *const r = c->profile.recording;
    if (r == NULL) return;
    const size_t bytes = (size_t)c->n * sizeof(int32_t);
    memcpy(r->ids + r->n_rows, c->ids, bytes);
    memcpy(r->positions + r->n_rows, c->positions, bytes);
    memcpy(r->sequences + r->n_rows, c->sequences, bytes);
    r->chunks[2 * r->n_chunks] = c->n;
    r->chunks[2 * r->n_chunks++ + 1] = source;
    r->n_rows += c->n;
}
