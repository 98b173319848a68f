/* sample.c: repetition penalty, temperature, top-k, top-p, min-p, and the draw, in this order (that of Transformers).
 * Sums run in double in index or rank order: the same id on every machine. */
#include "sample.h"

#include "topk.h"

#include <float.h>
#include <math.h>
#include <string.h>

void sample_layout(struct sampler *sampler, struct arena *arena, int32_t n_vocab) {
    sampler->weights = arena_take(arena, (uint64_t)n_vocab, sizeof *sampler->weights);
    sampler->ids = arena_take(arena, (uint64_t)n_vocab, sizeof *sampler->ids);
}

int32_t sample_check(const colibri_sampling *s, colibri_error *error) {
    const double temperature = (double)s->temperature, penalty = (double)s->repetition_penalty, top_p = (double)s->top_p, min_p = (double)s->min_p;
    FAIL_IF(!(temperature >= 0 && isfinite(temperature)), error, ARGUMENT, "temperature: expected a finite number, 0 or more, found %g", temperature);
    FAIL_IF(s->top_k < 0, error, ARGUMENT, "top_k: expected 0 (off) or more, found %d", s->top_k);
    FAIL_IF(!(top_p >= 0 && top_p <= 1), error, ARGUMENT, "top_p: expected more than 0, at most 1, found %g", top_p);
    FAIL_IF(!(min_p >= 0 && min_p <= 1), error, ARGUMENT, "min_p: expected 0 to 1, found %g", min_p);
    FAIL_IF(!(penalty >= 0 && isfinite(penalty)), error, ARGUMENT, "repetition_penalty: expected a finite number above 0, found %g", penalty);
    return COLIBRI_OK;
}

/* Uniform in [0, 1) from (seed, position): two rounds of the finaliser of SplitMix64 (Steele, Lea, Flood, 2014). */
static double uniform(uint64_t seed, uint64_t position) {
    uint64_t z = seed + 0x9e3779b97f4a7c15u * (position + 1);
    for (int round = 0; round < 2; round++) {
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        z = (z ^ z >> 31) + seed;
    }
    return (double)(z >> 11) * 0x1p-53;
}

/* Copies logits to scratch with the penalty on every id of the history, once each. */
static void penalise(float *weights, const float *logits, int32_t n, float penalty, const int32_t *history, int32_t n_history) {
    memcpy(weights, logits, (size_t)n * sizeof *weights);
    if (penalty == 1) return;
    for (int32_t i = 0; i < n_history; i++) {
        const int32_t id = history[i];
        if (id < n) weights[id] = logits[id] > 0 ? logits[id] / penalty : logits[id] * penalty;
    }
}

/* Keeps the candidates that weigh at least `least`, in their order; returns how many. */
static int32_t keep(const float *weights, int32_t *ids, int32_t n, double least) {
    int32_t kept = 0;
    for (int32_t i = 0; i < n; i++) {
        if ((double)weights[ids[i]] >= least) ids[kept++] = ids[i];
    }
    return kept;
}

/* Cuts the candidates, sorted or not, to the smallest set of best ones that holds top_p of the mass; returns how many
 * stay, sorted. weights are unnormalised, `sum` is theirs over all candidates. */
static int32_t cut_top_p(const float *weights, int32_t *ids, int32_t n, bool sorted, double sum, double top_p) {
    if (!sorted) {
        /* Candidates below (1 - top_p) / n of the mass cannot be needed: all of them together hold less than the rest. */
        n = keep(weights, ids, n, sum * (1 - top_p) / n);
        topk_sort(weights, ids, n);
    }
    double mass = 0;
    for (int32_t i = 0; i < n; i++) {
        mass += (double)weights[ids[i]];
        if (mass >= top_p * sum) return i + 1;
    }
    return n;
}

static double sum_of(const float *weights, const int32_t *ids, int32_t n) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += (double)weights[ids[i]];
    return sum;
}

/* -infinity masks an id; NaN, +infinity, or nothing left to draw are errors. */
static int32_t check_logits(const struct kernels *kernels, const float *logits, int32_t n, colibri_error *error) {
    if (kernels->all_finite(logits, n)) return COLIBRI_OK;
    bool some = false;
    for (int32_t i = 0; i < n; i++) {
        FAIL_IF(!(logits[i] <= FLT_MAX), error, NUMERIC, "logits[%d]: expected a number or -infinity, found %g", i,
                (double)logits[i]);
        some = some || logits[i] >= -FLT_MAX;
    }
    return some ? COLIBRI_OK : status_fail(error, COLIBRI_ERROR_NUMERIC, "logits: every id is masked by -infinity");
}

int32_t sample_draw(const struct sampler *sampler, const struct kernels *kernels, const float *logits, int32_t n_used,
                    const colibri_sampling *s, const int32_t *history, int32_t n_history,
                    uint64_t position, int32_t *id, colibri_error *error) {
    float *const weights = sampler->weights;
    int32_t *const ids = sampler->ids;
    TRY(check_logits(kernels, logits, n_used, error));
    penalise(weights, logits, n_used, s->repetition_penalty == 0 ? 1 : s->repetition_penalty, history, n_history);
    const int32_t best = kernels->argmax(weights, n_used);
    *id = best;
    if (s->temperature == 0) return COLIBRI_OK;

    const float top = weights[best];
    int32_t n = n_used;
    const bool sorted = s->top_k > 0 && s->top_k < n_used;
    if (sorted) topk_select(weights, n_used, n = s->top_k, ids);
    else for (int32_t i = 0; i < n; i++) ids[i] = i;
    for (int32_t i = 0; i < n; i++) {
        float *const weight = &weights[ids[i]];
        *weight = *weight < -FLT_MAX ? 0 : kernels->exp((*weight - top) / s->temperature);
    }
    if (s->top_p > 0 && s->top_p < 1) {
        n = cut_top_p(weights, ids, n, sorted, sum_of(weights, ids, n), (double)s->top_p);
    }
    if (s->min_p > 0) n = keep(weights, ids, n, (double)s->min_p); /* the best weight is exp(0) = 1 */
    double left = uniform(s->seed, position) * sum_of(weights, ids, n);
    for (int32_t i = 0; i < n; i++) {
        left -= (double)weights[ids[i]];
        *id = ids[i];
        if (left < 0) break;
    }
    return COLIBRI_OK;
}
