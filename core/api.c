/* api.c: the functions of colibri.h. Checks arguments, calls below, nothing else. */
#include "session.h"
#include "topk.h"

const char *colibri_version(void)
{
    return COLIBRI_VERSION;
}

const char *colibri_status_text(int32_t status)
{
    switch (status) {
    case COLIBRI_OK: return "ok";
    case COLIBRI_ERROR_ARGUMENT: return "argument out of range";
    case COLIBRI_ERROR_IO: return "refused by the operating system";
    case COLIBRI_ERROR_FORMAT: return "damaged or foreign model file";
    case COLIBRI_ERROR_UNSUPPORTED: return "not supported by this build or machine";
    case COLIBRI_ERROR_MEMORY: return "not enough memory";
    case COLIBRI_ERROR_CONTEXT: return "context is full";
    case COLIBRI_ERROR_CANCELLED: return "cancelled";
    case COLIBRI_ERROR_NUMERIC: return "NaN or infinite logit";
    default: return "unknown status";
    }
}

const char *colibri_config_schema(void)
{
    return config_schema();
}

int32_t colibri_open(const char *path, colibri_model **model, colibri_error *error)
{
    if (model != NULL) *model = NULL;
    FAIL_IF(path == NULL || model == NULL, error, ARGUMENT, "colibri_open: expected a path and a place for the model");
    return weights_open(path, model, error);
}

const colibri_model_info *colibri_info(const colibri_model *model)
{
    return model == NULL ? NULL : &model->info;
}

int32_t colibri_config_value(const colibri_model *model, const char *field, int32_t layer, double *value)
{
    if (model == NULL || field == NULL || value == NULL) return COLIBRI_ERROR_ARGUMENT;
    return config_value(&model->config, field, layer, value);
}

int32_t colibri_fetch(colibri_model *model, int32_t residency, int32_t (*progress)(void *user, uint64_t done, uint64_t total),
                      void *user, colibri_error *error)
{
    FAIL_IF(model == NULL, error, ARGUMENT, "colibri_fetch: expected a model");
    return weights_fetch(model, residency, progress, user, error);
}

void colibri_close(colibri_model *model)
{
    if (model != NULL) weights_release(model);
}

int32_t colibri_default_params(const colibri_model *model, colibri_params *params)
{
    if (model == NULL || params == NULL) return COLIBRI_ERROR_ARGUMENT;
    const int32_t trained = model->config.context_length, context = trained < 4096 ? trained : 4096;
    *params = (colibri_params){
        .context = context,
        .max_batch = 1,
        .threads = os_core_count(),
        .chunk = 1024,
    };
    return COLIBRI_OK;
}

int32_t colibri_plan(const colibri_model *model, const colibri_params *params, colibri_memory_plan *plan,
                     colibri_error *error)
{
    FAIL_IF(model == NULL || params == NULL || plan == NULL, error, ARGUMENT,
            "colibri_plan: expected a model, parameters and a place for the plan");
    return session_plan(model, params, plan, error);
}

int32_t colibri_init(colibri_model *model, const colibri_params *params, colibri_context **context, colibri_error *error)
{
    colibri_params defaults;
    if (context != NULL) *context = NULL;
    FAIL_IF(model == NULL || context == NULL, error, ARGUMENT, "colibri_init: expected a model and a place for the context");
    if (params == NULL) {
        colibri_default_params(model, &defaults);
        params = &defaults;
    }
    return session_start(model, params, context, error);
}

void colibri_free(colibri_context *context)
{
    if (context != NULL) session_end(context);
}

const colibri_error *colibri_last_error(const colibri_context *context)
{
    return context == NULL ? NULL : &context->error;
}

int32_t colibri_run_inference(colibri_context *context, const int32_t *input_ids, int32_t n_ids, float *logits)
{
    if (context == NULL) return COLIBRI_ERROR_ARGUMENT;
    const colibri_input input = {.sequence = 0, .n_ids = n_ids, .ids = input_ids, .n_logits = 1, .logits = logits};
    return session_evaluate(context, &input, 1, NULL);
}

int32_t colibri_evaluate(colibri_context *context, const colibri_input *inputs, int32_t n_inputs,
                         const colibri_observer *observer)
{
    if (context == NULL) return COLIBRI_ERROR_ARGUMENT;
    return session_evaluate(context, inputs, n_inputs, observer);
}

int32_t colibri_encode(colibri_context *context, int32_t sequence, const int32_t *ids, int32_t n_ids, const colibri_observer *observer)
{
    if (context == NULL) return COLIBRI_ERROR_ARGUMENT;
    return session_encode(context, sequence, ids, n_ids, observer);
}

int32_t colibri_measure(colibri_context *context, const colibri_profile *profile)
{
    if (context == NULL) return COLIBRI_ERROR_ARGUMENT;
    TRY(session_check_idle(context));
    return session_measure(context, profile);
}

const char *colibri_phase_name(int32_t phase)
{
    return profile_phase_name(phase);
}

void colibri_cancel(colibri_context *context)
{
    if (context != NULL) atomic_store(&context->cancelled, true);
}

static int32_t check_sequence(const colibri_context *context, const char *name, int32_t sequence, colibri_error *error)
{
    if (sequence >= 0 && sequence < context->params.max_batch) return COLIBRI_OK;
    return status_fail(error, COLIBRI_ERROR_ARGUMENT, "%s: expected 0 to %d, found %d", name, context->params.max_batch - 1,
                       sequence);
}

int32_t colibri_position(const colibri_context *context, int32_t sequence)
{
    if (context == NULL) return COLIBRI_ERROR_ARGUMENT;
    TRY(check_sequence(context, "sequence", sequence, NULL));
    return context->cache.lengths[sequence];
}

int32_t colibri_rewind(colibri_context *context, int32_t sequence, int32_t position)
{
    if (context == NULL) return COLIBRI_ERROR_ARGUMENT;
    TRY(session_check_idle(context));
    TRY(check_sequence(context, "sequence", sequence, &context->error));
    FAIL_IF(position < 0 || position > context->cache.lengths[sequence], &context->error, ARGUMENT,
            "position: expected 0 to %d (what sequence %d holds), found %d", context->cache.lengths[sequence], sequence,
            position);
    cache_rewind(&context->cache, sequence, position);
    return COLIBRI_OK;
}

int32_t colibri_fork(colibri_context *context, int32_t source, int32_t target)
{
    if (context == NULL) return COLIBRI_ERROR_ARGUMENT;
    TRY(session_check_idle(context));
    TRY(check_sequence(context, "source", source, &context->error));
    TRY(check_sequence(context, "target", target, &context->error));
    cache_fork(&context->cache, source, target);
    return COLIBRI_OK;
}

int32_t colibri_sample(colibri_context *context, const float *logits, const colibri_sampling *sampling,
                       const int32_t *history, int32_t n_history, uint64_t position, int32_t *id)
{
    if (context == NULL) return COLIBRI_ERROR_ARGUMENT;
    TRY(session_check_idle(context));
    colibri_error *const error = &context->error;
    const struct config *const config = &context->model->config;
    FAIL_IF(logits == NULL || sampling == NULL || id == NULL || n_history < 0 || (n_history > 0 && history == NULL),
            error, ARGUMENT,
            "colibri_sample: expected logits, sampling, a place for the id, and history if n_history is not 0");
    TRY(sample_check(sampling, error));
    for (int32_t i = 0; i < n_history; i++) {
        if (history[i] >= 0 && history[i] < config->n_vocab) continue;
        return status_fail(error, COLIBRI_ERROR_ARGUMENT, "history[%d]: expected 0 to %d, found %d", i, config->n_vocab - 1,
                           history[i]);
    }
    return sample_draw(&context->sampler, context->model->kernels, logits, config->n_vocab_used, sampling,
                       history, n_history, position, id, error);
}

int32_t colibri_topk_select(const float *values, int32_t n, int32_t k, int32_t *indices)
{
    if (values == NULL || indices == NULL || k < 1 || k > n) return COLIBRI_ERROR_ARGUMENT;
    topk_select(values, n, k, indices);
    return COLIBRI_OK;
}
