/* colibri_test.c: loads a model from C and checks it and the engine on this machine:
 *   kernels   every matrix type and shape of the model, each usable kernel set against scalar: equal bytes
 *   quantize  colibri_quantize refuses what it cannot search, and writes every byte of what it can
 *   memory    a context in a buffer of exactly the planned size: nothing written outside, all wiped by colibri_free
 *   dispatch  a prompt in one piece and token by token: same logits, same experts, same weights, bit for bit
 *   measure   colibri_measure: what it refuses, what it notes, the same logits with and without
 *   speed     prefill and decode
 *
 *   colibri_test MODEL.colibri [--threads N] [--tokens N] [--dump FILE] [--replay FILE]
 *
 * --dump writes the dispatch trace (a line per row and layer: position, layer, then expert:weight in hex bits; the last
 * one: a hash of the last position's logits);
 * --replay compares this run's trace with such a file, made by another thread count, instruction set or machine. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "../../core/session.h"

#define PROGRAM "colibri_test"
#include "check.h"

#include <time.h>

struct options {
    const char *model, *dump, *replay;
    int32_t threads, tokens;
};

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- kernels -------------------------------------------------------------------------------------------------- */

static void check_matrix(const struct matrix *w, const char *name) {
    struct matrix part = *w; /* a few panels are enough */
    if (part.rows > 64) part.rows = 64;
    const size_t cols = (size_t)part.cols, rows = (size_t)part.rows;
    enum { N = 5 };
    const size_t stride = type_reads_q8(part.type) ? q8_row_bytes(cols) : cols * 4;
    uint8_t *const x = take(stride * N);
    float *const row = take(cols * 4), *const expected = take(rows * N * 4), *const found = take(rows * N * 4);
    uint32_t state = 1;
    for (size_t t = 0; t < N; t++) {
        for (size_t i = 0; i < cols; i++) row[i] = (float)((state = state * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1;
        if (type_reads_q8(part.type)) kernels_scalar.quantize(row, part.cols, 0, (int32_t)q8_groups(cols), x + stride * t);
        else memcpy(x + stride * t, row, cols * 4);
    }
    struct matmul m = {.w = &part, .n_panels = matrix_panels(&part), .x = x, .x_stride = stride, .n = N, .y = expected, .y_stride = rows};
    kernels_scalar.matmul[part.type](&m);
    m.y = found;
    bool usable;
    const struct kernels *kernels;
    for (int i = 0; (kernels = kernels_list(i, &usable)) != NULL; i++) {
        if (!usable || kernels == &kernels_scalar) continue;
        memset(found, 0, rows * N * 4);
        kernels->matmul[part.type](&m);
        check(memcmp(expected, found, rows * N * 4) == 0, "kernels: %s of %s [%d, %d] same bytes as scalar", kernels->name, name,
              w->rows, w->cols);
    }
    free(x);
    free(row);
    free(expected);
    free(found);
}

static void check_kernels(const colibri_model *model) {
    const struct layer *const layer = &model->layers[model->config.n_layers - 1];
    const struct ffn_weights *const ffn = layer->experts != NULL ? &layer->experts[0] : &layer->dense;
    check_matrix(&model->output, "output");
    check_matrix(&layer->self.q, "attn_q");
    check_matrix(&layer->self.out, "attn_out");
    if (layer->router.data != NULL) check_matrix(&layer->router, "router");
    check_matrix(&ffn->gate, layer->experts != NULL ? "experts.0 gate" : "ffn_gate");
    check_matrix(&ffn->down, layer->experts != NULL ? "experts.0 down" : "ffn_down");
}

/* ---- a recorded run -------------------------------------------------------------------------------------------- */

struct trace { /* one entry per (position, layer, rank) */
    const colibri_model *model;
    int32_t *experts;
    float *weights;
    uint64_t logits; /* FNV-1a of the last position's */
};

static size_t trace_at(const struct trace *trace, int32_t position, int32_t layer) {
    const struct config *const c = &trace->model->config;
    return ((size_t)position * (size_t)c->n_layers + (size_t)layer) * (size_t)c->n_experts_used;
}

static int32_t record(void *user, const colibri_routing *routing) {
    struct trace *const trace = user;
    const size_t used = (size_t)routing->n_experts_used;
    for (size_t row = 0; row < (size_t)routing->n_rows; row++) {
        const size_t at = trace_at(trace, routing->positions[row], routing->layer);
        memcpy(trace->experts + at, routing->experts + row * used, used * sizeof(int32_t));
        memcpy(trace->weights + at, routing->weights + row * used, used * sizeof(float));
    }
    return 0;
}

static struct trace new_trace(const colibri_model *model, int32_t positions) {
    struct trace trace = {.model = model};
    const size_t entries = trace_at(&trace, positions, 0) + 1;
    trace.experts = take(entries * sizeof(int32_t));
    trace.weights = take(entries * sizeof(float));
    return trace;
}

static void write_trace(const struct trace *trace, int32_t positions, FILE *file) {
    const struct config *const c = &trace->model->config;
    for (int32_t p = 0; p < positions; p++) {
        for (int32_t layer = 0; layer < c->n_layers; layer++) {
            if (c->n_experts[layer] == 0) continue;
            fprintf(file, "%d %d", p, layer);
            for (int32_t i = 0; i < c->n_experts_used; i++) {
                const size_t at = trace_at(trace, p, layer) + (size_t)i;
                uint32_t bits;
                memcpy(&bits, &trace->weights[at], sizeof bits);
                fprintf(file, " %d:%08x", trace->experts[at], bits);
            }
            fputc('\n', file);
        }
    }
    fprintf(file, "logits %016llx\n", (unsigned long long)trace->logits);
}

static void replay_trace(const struct trace *trace, int32_t positions, const char *path) {
    FILE *const now = tmpfile(), *const then = fopen(path, "r");
    if (now == NULL || then == NULL) stop(path, "cannot be read");
    write_trace(trace, positions, now);
    rewind(now);
    long line = 1;
    int a, b;
    do {
        a = fgetc(now);
        b = fgetc(then);
        line += a == '\n' && a == b;
    } while (a == b && a != EOF);
    check(a == b, a == b ? "dispatch: equal to %s" : "dispatch: differs from %s in line %ld", path, line);
    fclose(now);
    fclose(then);
}

/* A model with an encoder gets something to read. */
static void give_source(colibri_context *context) {
    int32_t source[8];
    if (context->model->config.n_encoder_layers == 0) return;
    for (int32_t i = 0; i < 8; i++) source[i] = i % context->model->info.n_vocab;
    if (colibri_encode(context, 0, source, 8, NULL) != COLIBRI_OK) stop("colibri_encode", colibri_last_error(context)->text);
}

static colibri_context *start(colibri_model *model, const colibri_params *params) {
    colibri_context *context;
    colibri_error error;
    if (colibri_init(model, params, &context, &error) != COLIBRI_OK) stop("colibri_init", error.text);
    give_source(context);
    return context;
}

static void run(colibri_context *context, const int32_t *ids, int32_t n, float *logits, struct trace *trace) {
    const colibri_input input = {.n_ids = n, .ids = ids, .n_logits = 1, .logits = logits};
    const colibri_observer observer = {.routing = record, .user = trace};
    if (colibri_evaluate(context, &input, 1, trace == NULL ? NULL : &observer) != COLIBRI_OK) {
        stop("colibri_evaluate", colibri_last_error(context)->text);
    }
}

/* ---- memory ---------------------------------------------------------------------------------------------------- */

static void check_memory(colibri_model *model, colibri_params params, const int32_t *ids, int32_t n, float *logits) {
    enum { GUARD = OS_PAGE, PATTERN = 0xa5 };
    colibri_memory_plan plan;
    colibri_error error;
    if (colibri_plan(model, &params, &plan, &error) != COLIBRI_OK) stop("colibri_plan", error.text);
    check(plan.context_bytes == plan.control + plan.threads + plan.activations + plan.sampling + plan.kv_cache + plan.expert_cache,
          "memory: the plan's categories add up to %llu bytes", (unsigned long long)plan.context_bytes);
    uint8_t *const buffer = take(plan.context_bytes + 2 * GUARD);
    memset(buffer, PATTERN, plan.context_bytes + 2 * GUARD);
    params.memory = buffer + GUARD;
    params.memory_bytes = plan.context_bytes - 1;
    colibri_context *context;
    check(colibri_init(model, &params, &context, &error) == COLIBRI_ERROR_MEMORY, "memory: one byte too few is refused: %s",
          error.text);
    params.memory_bytes = plan.context_bytes;
    context = start(model, &params);
    run(context, ids, n, logits, NULL);
    const struct cache cache = context->cache;
    const uint64_t states = (uint64_t)(cache.states - (buffer + GUARD)), pool = (uint64_t)(cache.pool - (buffer + GUARD));
    const uint64_t written = pool + (uint64_t)cache.n_touched * cache.block_bytes;
    int32_t(*const marks)[STATE_MARKS] = take((size_t)params.max_batch * sizeof *marks);
    memcpy(marks, cache.marks, (size_t)params.max_batch * sizeof *marks);
    colibri_free(context);
    uint64_t left = 0, outside = 0;
    for (uint64_t i = 0; i < plan.context_bytes; i++) {
        const uint8_t byte = buffer[GUARD + i];
        const uint64_t state = i < states || i >= pool ? 0 : (i - states) / cache.state_bytes;
        const bool touched = i < states || i >= pool ? i < written : marks[state / STATES][state % STATES] >= 0;
        if (touched ? byte != 0 : byte != PATTERN && byte != 0) left++;
    }
    free(marks);
    for (uint64_t i = 0; i < GUARD; i++) outside += buffer[i] != PATTERN || buffer[GUARD + plan.context_bytes + i] != PATTERN;
    check(left == 0, "memory: %llu bytes survive colibri_free", (unsigned long long)left);
    check(outside == 0, "memory: %llu bytes written outside the planned ones", (unsigned long long)outside);
    free(buffer);
}

/* ---- main ------------------------------------------------------------------------------------------------------ */

static void check_dispatch(colibri_model *model, const colibri_params *params, const int32_t *ids, int32_t n,
                           const struct options *options) {
    const size_t n_vocab = (size_t)model->info.n_vocab;
    float *const whole = take(n_vocab * 4), *const single = take(n_vocab * 4);
    struct trace first = new_trace(model, n), second = new_trace(model, n);
    const size_t entries = trace_at(&first, n, 0);
    colibri_context *const context = start(model, params);
    run(context, ids, n, whole, &first);
    colibri_rewind(context, 0, 0);
    for (int32_t i = 0; i < n; i++) run(context, ids + i, 1, single, &second);
    check(memcmp(whole, single, n_vocab * 4) == 0, "dispatch: %d tokens at once and one by one: same logits", n);
    check(memcmp(first.experts, second.experts, entries * 4) == 0 && memcmp(first.weights, second.weights, entries * 4) == 0,
          "dispatch: the same experts and weights");
    first.logits = 14695981039346656037u;
    for (size_t i = 0; i < n_vocab * 4; i++) first.logits = (first.logits ^ ((const uint8_t *)whole)[i]) * 1099511628211u;
    if (options->dump != NULL) {
        FILE *const file = fopen(options->dump, "w");
        if (file == NULL) stop(options->dump, "cannot be written");
        write_trace(&first, n, file);
        if (fclose(file) != 0) stop(options->dump, "cannot be written");
    }
    if (options->replay != NULL) replay_trace(&first, n, options->replay);
    colibri_free(context);
    free(whole);
    free(single);
    free(first.experts);
    free(first.weights);
    free(second.experts);
    free(second.weights);
}

static void measure(colibri_model *model, const colibri_params *params, const int32_t *ids, int32_t n, float *logits) {
    colibri_context *const context = start(model, params);
    const int32_t half = n / 2 > 0 ? n / 2 : 1;
    run(context, ids, half, logits, NULL);
    colibri_rewind(context, 0, 0);
    double start_time = seconds();
    run(context, ids, half, logits, NULL);
    const double prefill = seconds() - start_time;
    start_time = seconds();
    for (int32_t i = half; i < n; i++) run(context, ids + i, 1, logits, NULL);
    const double decode = seconds() - start_time;
    printf("speed   %s, %d threads: prefill %.0f tokens/s (%d), decode %.0f tokens/s (%d)\n", model->info.isa, params->threads,
           half / prefill, half, n > half ? (n - half) / decode : 0, n - half);
    colibri_free(context);
}

/* ---- times ----------------------------------------------------------------------------------------------------- */

static uint64_t sum_of(const uint64_t *values, size_t n) {
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) sum += values[i];
    return sum;
}

static void check_measure(colibri_model *model, const colibri_params *params, const int32_t *ids, int32_t n, float *logits) {
    const int32_t layers = model->info.n_layers, experts = model->info.n_experts;
    const size_t cells = ((size_t)layers + 1) * COLIBRI_PHASES, each = (size_t)layers * (size_t)experts;
    uint64_t *const phase = take(cells * 8), *const wait = take(cells * 8), *const expert = take(each * 8 + 8);
    float *const plain = take((size_t)model->info.n_vocab * 4);
    colibri_context *const context = start(model, params);
    const colibri_profile good = {layers, experts, phase, wait, experts > 0 ? expert : NULL};
    colibri_profile wrong[] = {good, good, good, good, good};
    wrong[0].n_layers++;
    wrong[1].n_experts--;
    wrong[2].phase_ns = NULL;
    wrong[3].wait_ns = NULL;
    wrong[4].expert_ns = NULL;
    for (int i = 0; i < 5 - (experts == 0); i++) {
        const int32_t status = colibri_measure(context, &wrong[i]);
        check(status == COLIBRI_ERROR_ARGUMENT, "measure: refused: %s", colibri_last_error(context)->text);
    }
    check(colibri_measure(NULL, &good) == COLIBRI_ERROR_ARGUMENT, "measure: no context is refused");
    int named = 0;
    while (colibri_phase_name(named) != NULL) named++;
    check(named == COLIBRI_PHASES && colibri_phase_name(-1) == NULL, "measure: %d phases have names", named);
    run(context, ids, n, plain, NULL);
    check(sum_of(phase, cells) == 0, "measure: a refused profile is not written to");
    colibri_rewind(context, 0, 0);
    check(colibri_measure(context, &good) == COLIBRI_OK, "measure: a whole profile is taken");
    run(context, ids, n, logits, NULL);
    const uint64_t total = sum_of(phase, cells);
    check(total > 0 && sum_of(wait, cells) <= total && (experts == 0 || sum_of(expert, each) > 0), "measure: times are noted");
    check(memcmp(plain, logits, (size_t)model->info.n_vocab * 4) == 0, "measure: the same logits with and without");
    check(colibri_measure(context, NULL) == COLIBRI_OK, "measure: NULL ends it");
    colibri_rewind(context, 0, 0);
    run(context, ids, n, logits, NULL);
    check(sum_of(phase, cells) == total, "measure: nothing is added afterwards");
    colibri_free(context);
    free(phase);
    free(wait);
    free(expert);
    free(plain);
}

/* ---- weights of few bits --------------------------------------------------------------------------------------- */

static void check_quantize(void) {
    enum { N = 4, COLS = 256 };
    static float weights[COLS * N], costs[COLS * N], units[2 * N + 1];
    static uint8_t steps[16 * N + 1], quants[COLS * N + 1];
    for (int i = 0; i < COLS * N; i++) weights[i] = (float)(i * 37 % 101) - 60, costs[i] = 1;
    memset(steps, 0xff, sizeof steps);
    const int32_t wrong[][2] = {{4, N}, {7, N}, {5, 3}, {5, -4}};
    int32_t status = colibri_quantize(5, N, NULL, costs, units, steps, quants) & colibri_quantize(5, N, weights, costs, units, steps, NULL);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        status &= colibri_quantize(wrong[i][0], wrong[i][1], weights, costs, units, steps, quants);
    }
    check(status == COLIBRI_ERROR_ARGUMENT && steps[0] == 0xff, "quantize: refuses wrong types, counts and NULL");
    for (int type = 5; type <= 6; type++) {
        memset(quants, 0xff, sizeof quants);
        status = colibri_quantize(type, N, weights, costs, units, steps, quants);
        int least = 255, most = 0;
        for (int i = 0; i < COLS * N; i++) {
            least = quants[i] < least ? quants[i] : least;
            most = quants[i] > most ? quants[i] : most;
        }
        check(status == COLIBRI_OK && least == 0 && most <= (type == 5 ? 15 : 63) && quants[COLS * N] == 0xff &&
                  steps[16 * N] == 0xff && units[2 * N] == 0,
              "quantize: type %d fills its places and nothing behind them", type);
    }
}

static struct options parse(int argc, char **argv) {
    struct options options = {.tokens = 64};
    for (int i = 1; i < argc; i++) {
        const char *const value = i + 1 < argc ? argv[i + 1] : NULL;
        if (argv[i][0] != '-' && options.model == NULL) { options.model = argv[i]; continue; }
        if (value == NULL) stop(argv[i], "unknown option or missing value");
        if (strcmp(argv[i], "--threads") == 0) options.threads = atoi(value);
        else if (strcmp(argv[i], "--tokens") == 0) options.tokens = atoi(value);
        else if (strcmp(argv[i], "--dump") == 0) options.dump = value;
        else if (strcmp(argv[i], "--replay") == 0) options.replay = value;
        else stop(argv[i], "unknown option");
        i++;
    }
    if (options.model == NULL) stop("usage", "colibri_test MODEL.colibri [--threads N] [--tokens N] [--dump FILE] [--replay FILE]");
    return options;
}

int main(int argc, char **argv) {
    const struct options options = parse(argc, argv);
    colibri_model *model;
    colibri_error error;
    colibri_params params;
    setvbuf(stdout, NULL, _IONBF, 0);
    if (colibri_open(options.model, &model, &error) != COLIBRI_OK) stop("colibri_open", error.text);
    colibri_default_params(model, &params);
    if (options.threads != 0) params.threads = options.threads;
    const int32_t n = options.tokens;
    if (n < 2 || n > params.context) stop("--tokens", "expected 2 to the model's context");
    int32_t *const ids = take((size_t)n * 4);
    float *const logits = take((size_t)model->info.n_vocab * 4);
    for (int32_t i = 0; i < n; i++) ids[i] = (int32_t)((uint32_t)i * 2654435761u % (uint32_t)model->info.n_vocab_used);
    check_kernels(model);
    check_quantize();
    check_memory(model, params, ids, n, logits);
    check_dispatch(model, &params, ids, n, &options);
    check_measure(model, &params, ids, n, logits);
    measure(model, &params, ids, n, logits);
    free(ids);
    free(logits);
    colibri_close(model);
    printf(failures == 0 ? "all good\n" : "%d checks failed\n", failures);
    return failures != 0;
}
