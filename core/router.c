/* router.c: gate logits in f32 from the hidden state before quantisation, softmax over all experts, the best k, and the
 * grouping of rows by expert. Owns the order of everything: ties to the lowest expert, rows in row order. */
#include "router.h"

#include "product.h"
#include "topk.h"

#include <string.h>

struct router_work {
    const struct chunk *chunk;
    const struct layer *weights;
};

static void route_item(void *argument, int32_t row, int32_t worker)
{
    (void)worker;
    const struct router_work *const work = argument;
    const struct chunk *const c = work->chunk;
    const int32_t n_experts = work->weights->router.rows, used = c->config->n_experts_used;
    const float *const logits = c->router_logits + (size_t)row * (size_t)n_experts;
    int32_t *const experts = c->experts + (size_t)row * (size_t)used;
    float *const weights = c->expert_weights + (size_t)row * (size_t)used;
    /* exp is monotone only up to rounding, so the choice is made among probabilities, as the references do. */
    float probabilities[CONFIG_MAX_EXPERTS];
    memcpy(probabilities, logits, (size_t)n_experts * sizeof *logits);
    c->kernels->softmax(probabilities, n_experts);
    topk_select(probabilities, n_experts, used, experts);
    float sum = 0;
    for (int32_t i = 0; i < used; i++) sum += weights[i] = probabilities[experts[i]];
    if (c->config->router_norm) {
        for (int32_t i = 0; i < used; i++) weights[i] /= sum;
    }
    if (c->config->n_ff_shared == 0) return;
    float gate = 1;
    if (work->weights->shared_router != NULL) {
        const float logit = c->kernels->dot(work->weights->shared_router,
                                            c->h.f32 + (size_t)row * (size_t)c->config->n_embd, c->config->n_embd);
        gate = 1.0f / (1.0f + c->kernels->exp(-logit));
    }
    c->shared_weights[row] = gate;
}

/* Counting sort of (row, rank) pairs by expert: slots of one expert are neighbours, in row order. */
static void group_rows(struct chunk *c, const struct layer *weights)
{
    const int32_t n_experts = weights->router.rows, pairs = c->n * c->config->n_experts_used;
    int32_t *const first = c->expert_slots;
    memset(first, 0, ((size_t)n_experts + 1) * sizeof *first);
    for (int32_t i = 0; i < pairs; i++) first[c->experts[i] + 1]++;
    for (int32_t e = 0; e < n_experts; e++) first[e + 1] += first[e];
    c->n_groups = 0;
    for (int32_t e = 0; e < n_experts; e++) {
        if (first[e + 1] == first[e]) continue;
        c->groups[c->n_groups++] =
            (struct ffn_group){&weights->experts[e], c->slot_rows + first[e], first[e + 1] - first[e], first[e], e};
    }
    for (int32_t i = 0; i < pairs; i++) {
        const int32_t slot = first[c->experts[i]]++;
        c->slots[i] = slot;
        c->slot_rows[slot] = i / c->config->n_experts_used;
    }
    if (c->config->n_ff_shared > 0) c->groups[c->n_groups++] = (struct ffn_group){&weights->shared, NULL, c->n, pairs, -1};
}

void router_layer(struct chunk *c, int32_t layer)
{
    const struct layer *const weights = &c->model->layers[layer];
    struct router_work work = {c, weights};
    c->products[0] = product(&weights->router, &c->h, NULL, c->n, c->router_logits, (size_t)weights->router.rows);
    product_run(c, 1);
    threads_run(c->threads, route_item, &work, c->n, 8 * row_bytes(c->n, weights->router.rows));
    group_rows(c, weights);
}
