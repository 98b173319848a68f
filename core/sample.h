/* sample.h: from logits to the next id. A pure function of logits, parameters, history, seed and position. */
#pragma once

#include "arena.h"
#include "kernels/kernels.h"
#include "status.h"

struct sampler { /* scratch of n_vocab candidates */
    float *weights;
    int32_t *ids;
};

void sample_layout(struct sampler *sampler, struct arena *arena, int32_t n_vocab);
int32_t sample_check(const colibri_sampling *sampling, colibri_error *error);
/* logits [n_used]: the ids that may be drawn; -infinity masks one. Parameters are checked, the history's ids are in range. */
int32_t sample_draw(const struct sampler *sampler, const struct kernels *kernels, const float *logits, int32_t n_used,
                    const colibri_sampling *sampling, const int32_t *history, int32_t n_history,
                    uint64_t position, int32_t *id, colibri_error *error);
