/* session.c: the life of a context: parameters, its layout in one reservation, start and end. Owns the context's memory. */
#include "session.h"

#include <inttypes.h>
#include <string.h>

enum { MAX_BATCH = 4096, MAX_CHUNK = 4096, MAX_CONTEXT = 1 << 30, MAX_LANES = 16 };

static int32_t check_params(const colibri_model *model, const colibri_params *p, colibri_error *error) {
    TRY(status_range(error, "context", p->context, 1, MAX_CONTEXT));
    TRY(status_range(error, "max_batch", p->max_batch, 1, MAX_BATCH));
    TRY(status_range(error, "threads", p->threads, 1, THREADS_MAX));
    TRY(status_range(error, "chunk", p->chunk, 1, MAX_CHUNK));
    TRY(status_range(error, "pin", p->pin, 0, 1));
    TRY(status_range(error, "expert_slots", p->expert_slots, 0, model->n_experts));
    TRY(status_range(error, "expert_policy", p->expert_policy, COLIBRI_LFRU, COLIBRI_LRU));
    TRY(status_range(error, "lanes", p->lanes, 1, MAX_LANES));
    TRY(status_range(error, "kv_type", p->kv_type, COLIBRI_KV_F32, COLIBRI_KV_F16));
    TRY(status_range(error, "prefetch", p->prefetch, COLIBRI_PREFETCH_AUTO, COLIBRI_PREFETCH_OFF));
    FAIL_IF(p->memory != NULL && (uintptr_t)p->memory % OS_PAGE != 0, error, ARGUMENT,
            "memory: expected an address aligned to %d bytes, found %p", OS_PAGE, p->memory);
    return COLIBRI_OK;
}

/* Rows that a chunk can hold at most: buffers for more would never be used. */
static int32_t usable_chunk(const colibri_params *p) {
    const int64_t rows = (int64_t)p->context * p->max_batch;
    return rows < p->chunk ? (int32_t)rows : p->chunk;
}

/* The one layout of a context. Counting fills the plan; with a base it hands the pieces out. */
static void layout(const colibri_model *model, const colibri_params *p, colibri_context *context, struct arena *arena,
                   colibri_memory_plan *plan) {
    uint64_t mark = arena->used;
    arena_take(arena, 1, sizeof *context);
    context->lengths_before = arena_take(arena, (uint64_t)p->max_batch, sizeof(int32_t));
    context->in_batch = arena_take(arena, (uint64_t)p->max_batch, sizeof(bool));
    plan->control = arena->used - mark;
    mark = arena->used;
    threads_layout(&context->threads, arena, p->threads);
    plan->threads = arena->used - mark;
    mark = arena->used;
    experts_layout(&context->experts, arena, model, p);
    plan->expert_cache = arena->used - mark;
    mark = arena->used;
    chunk_layout(&context->chunk, arena, model, p, usable_chunk(p));
    plan->activations = arena->used - mark;
    mark = arena->used;
    sample_layout(&context->sampler, arena, model->config.n_vocab);
    plan->sampling = arena->used - mark;
    mark = arena->used;
    cache_layout(&context->cache, arena, &model->config, p->context, p->max_batch, p->kv_type == COLIBRI_KV_F16); /* its tail may stay untouched */
    plan->kv_cache = arena->used - mark;
    mark = arena->used;
    experts_memory(&context->experts, arena); /* so may this */
    plan->expert_cache += arena->used - mark;
    plan->context_bytes = arena->used;
    plan->slot_bytes = context->experts.slot_bytes;
    plan->expert_slots = p->expert_slots;
    const uint64_t shared = weights_copied_bytes(model, p->expert_slots > 0), private = atomic_load(&model->private_bytes);
    plan->weights_resident = private;
    plan->weights_mapped = shared > private ? shared - private : 0;
    /* Pages of files that have come since may be those of the weights: then they are counted already. */
    const uint64_t files = os_resident_bytes(true), since = files > model->files_before ? files - model->files_before : 0;
    const uint64_t of_weights = since < plan->weights_mapped ? since : plan->weights_mapped;
    const uint64_t held = os_resident_bytes(false), counted = private + model->info.model_bytes + (p->expert_slots > 0 ? 0 : of_weights);
    plan->process = held > counted ? held - counted : 0;
    plan->model = model->info.model_bytes;
    plan->total_bytes = plan->process + plan->weights_mapped + plan->weights_resident + plan->model + plan->context_bytes;
}

static int32_t count(const colibri_model *model, const colibri_params *p, colibri_memory_plan *plan, colibri_error *error) {
    struct arena arena = {0};
    colibri_context scratch;
    layout(model, p, &scratch, &arena, plan);
    FAIL_IF(p->kv_type != COLIBRI_KV_F32 && scratch.cache.block_bytes == 0, error, ARGUMENT,
            "kv_type: no layer of the model has keys and values, only states, which stay f32; leave it out");
    FAIL_IF(arena.overflow || arena.used > (uint64_t)1 << 62, error, MEMORY,
            "context %d x max_batch %d, chunk %d: sizes that cannot be counted; ask for less", p->context, p->max_batch, p->chunk);
    return COLIBRI_OK;
}

int32_t colibri_plan(const colibri_model *model, const colibri_params *given, colibri_memory_plan *plan, colibri_error *error) {
    FAIL_IF(model == NULL || given == NULL || plan == NULL, error, ARGUMENT,
            "colibri_plan: expected a model, parameters and a place for the plan");
    colibri_params p = *given;
    const uint64_t limit = p.memory_limit > 0 ? p.memory_limit : UINT64_MAX, n_experts = (uint64_t)model->n_experts;
    TRY(check_params(model, &p, error));
    TRY(count(model, &p, plan, error));
    if (plan->total_bytes > limit && p.expert_slots == 0 && n_experts > 0) {
        p.expert_slots = 1;
        TRY(count(model, &p, plan, error));
        const uint64_t room = limit > plan->total_bytes ? limit - plan->total_bytes : 0;
        const uint64_t more = room / (plan->slot_bytes + sizeof(struct place) + sizeof(int32_t));
        p.expert_slots = (int32_t)(more < n_experts ? more + 1 : n_experts);
        do TRY(count(model, &p, plan, error)); /* tables are rounded up: one less may fit */
        while (plan->total_bytes > limit && --p.expert_slots > 0);
    }
    FAIL_IF(plan->total_bytes > limit, error, MEMORY, "memory_limit: %" PRIu64 " bytes, needed are at least %" PRIu64 "; raise it, or ask "
            "for a smaller context, chunk or max_batch, or fewer expert_slots", limit, plan->total_bytes);
    return COLIBRI_OK;
}

/* The memory a context will live in: the caller's or a new reservation, refused early if it cannot become real. */
static int32_t find_memory(const colibri_params *p, uint64_t bytes, void **memory, colibri_error *error) {
    if (p->memory != NULL) {
        *memory = p->memory;
        FAIL_IF(p->memory_bytes < bytes, error, MEMORY, "memory_bytes: expected at least %" PRIu64 ", found %" PRIu64, bytes, p->memory_bytes);
        return COLIBRI_OK;
    }
    const uint64_t available = os_available_bytes();
    *memory = bytes <= available ? os_reserve(bytes) : NULL;
    FAIL_IF(*memory == NULL, error, MEMORY, "the context needs %" PRIu64 " bytes (context %d x max_batch %d, chunk %d, %d expert slots), available "
            "are %" PRIu64 "%s; ask for less", bytes, p->context, p->max_batch, p->chunk, p->expert_slots, available,
            bytes <= available ? ", but a limit of this process (ulimit -v) is lower" : "");
    return COLIBRI_OK;
}

int32_t colibri_default_params(const colibri_model *model, colibri_params *params) {
    if (model == NULL || params == NULL) return COLIBRI_ERROR_ARGUMENT;
    const int32_t trained = model->config.context_length, context = trained < 4096 ? trained : 4096;
    *params = (colibri_params){
        .context = context,
        .max_batch = 1,
        .threads = os_core_count(),
        .chunk = 1024,
        .lanes = 4,
    };
    return COLIBRI_OK;
}

int32_t colibri_init(colibri_model *model, const colibri_params *p, colibri_context **out, colibri_error *error) {
    if (out != NULL) *out = NULL;
    FAIL_IF(model == NULL || out == NULL, error, ARGUMENT, "colibri_init: expected a model and a place for the context");
    colibri_params defaults;
    if (p == NULL) {
        colibri_default_params(model, &defaults);
        p = &defaults;
    }
    colibri_memory_plan plan;
    void *memory;
    TRY(colibri_plan(model, p, &plan, error));
    TRY(find_memory(p, plan.context_bytes, &memory, error));
    struct arena arena = {.base = memory};
    colibri_context *const context = memory;
    memset(context, 0, sizeof *context);
    context->params = *p;
    context->params.expert_slots = plan.expert_slots;
    layout(model, &context->params, context, &arena, &plan);
    context->model = model;
    context->params.chunk = usable_chunk(p);
    context->bytes = plan.context_bytes;
    context->owns_memory = p->memory == NULL;
    context->chunk.model = model;
    context->chunk.config = &model->config;
    context->chunk.kernels = model->kernels;
    context->chunk.threads = &context->threads;
    context->chunk.cache = &context->cache;
    context->chunk.residency = &context->experts;
    atomic_init(&context->cancelled, false);
    cache_reset(&context->cache);
    experts_reset(&context->experts);
    *context->experts.gate = (colibri_gate){.state = p->prefetch};
    atomic_fetch_add(&model->references, 1);
    int32_t status = threads_start(&context->threads, p->pin != 0, true, error);
    if (status == COLIBRI_OK) status = threads_start(&context->experts.lanes, false, false, error);
    if (status == COLIBRI_OK) status = threads_start(&context->experts.scouts, false, false, error);
    if (status != COLIBRI_OK) colibri_free(context);
    else *out = context;
    return status;
}

void colibri_free(colibri_context *context) {
    if (context == NULL) return;
    colibri_model *const model = context->model;
    const struct cache *const cache = &context->cache;
    const struct experts *const experts = &context->experts;
    const uint64_t bytes = context->bytes;
    const bool owned = context->owns_memory;
    threads_stop(&context->threads);
    threads_stop(&context->experts.lanes);
    threads_stop(&context->experts.scouts);
    /* Slots, states and blocks that were ever written, then all before them: untouched pages stay untouched. */
    os_wipe(experts->memory, (uint64_t)(experts->n_ahead + experts->n_written) * experts->slot_bytes);
    os_wipe(cache->pool, (uint64_t)cache->n_touched * cache->block_bytes);
    for (int32_t i = 0; cache->state_bytes > 0 && i < cache->n_sequences * STATES; i++) {
        if (cache->marks[i / STATES][i % STATES] >= 0) os_wipe(cache->states + (size_t)i * cache->state_bytes, cache->state_bytes);
    }
    os_wipe(context, (uint64_t)(cache->states - (uint8_t *)context));
    if (owned) os_release(context, bytes);
    colibri_close(model);
}
