/* weights.c: opens a model: one reservation for struct, layers and experts, then a walk over the directory in step with
 * the config. Owns model memory; refuses a file with a tensor too many, too few, or of another shape. */
#include "weights.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* The walk: the entry that comes next, and what the config says must be there. */
struct binder {
    const struct container *container;
    colibri_error *error;
    uint32_t next;
    uint64_t end;      /* of the data bound so far */
    int32_t layer;     /* -1 outside layers */
    const char *prefix; /* of names in a layer */
    bool ungated;
    bool inner_q8, down_f32; /* of feed-forwards bound so far: gate or up reads quantised rows, down reads floats */
};

static int32_t take(struct binder *b, const char *name, uint8_t kind, uint64_t rows, uint64_t cols,
                    struct container_entry *entry) {
    char expected[CONTAINER_NAME_BYTES];
    if (b->layer < 0) snprintf(expected, sizeof expected, "%s", name);
    else snprintf(expected, sizeof expected, "layers.%d.%s%s", b->layer, b->prefix, name);
    FAIL_IF(b->next >= b->container->n_entries, b->error, FORMAT, "tensor '%s' is missing: the directory ends before it",
            expected);
    TRY(container_entry(b->container, b->next, b->end, entry, b->error));
    FAIL_IF(strcmp(entry->name, expected) != 0, b->error, FORMAT,
            "expected tensor '%s' as entry %u, found '%s'; convert the model again", expected, b->next, entry->name);
    FAIL_IF(entry->kind != kind || entry->rows != rows || entry->cols != cols, b->error, FORMAT,
            "tensor '%s': expected kind %d of shape [%" PRIu64 ", %" PRIu64 "], found kind %d of [%u, %u]", expected, kind,
            rows, cols, entry->kind, entry->rows, entry->cols);
    b->next++;
    b->end = entry->offset + entry->bytes;
    return COLIBRI_OK;
}

static int32_t check_bytes(struct binder *b, const struct container_entry *entry, uint64_t bytes) {
    FAIL_IF(entry->bytes != bytes, b->error, FORMAT, "tensor '%s' (types %d %d %d): expected %" PRIu64 " bytes, found %" PRIu64
            "; the file is damaged or of a newer version", entry->name, entry->types[0], entry->types[1], entry->types[2], bytes, entry->bytes);
    return COLIBRI_OK;
}

static int32_t check_type(struct binder *b, const struct container_entry *entry, int type) {
    FAIL_IF(panel_bytes(type, 1) == 0, b->error, UNSUPPORTED,
            "tensor '%s' has weight type %d, which this version (" COLIBRI_VERSION ") does not know", entry->name, type);
    return COLIBRI_OK;
}

static int32_t bind_vector(struct binder *b, const char *name, int64_t cols, const float **vector) {
    struct container_entry entry;
    TRY(take(b, name, KIND_VECTOR, 1, (uint64_t)cols, &entry));
    if (entry.types[0] != TYPE_F32) return check_type(b, &entry, 0);
    TRY(check_bytes(b, &entry, (uint64_t)cols * 4));
    *vector = (const float *)(const void *)entry.data;
    return COLIBRI_OK;
}

static int32_t bind_matrix(struct binder *b, const char *name, int64_t rows, int64_t cols, struct matrix *matrix) {
    struct container_entry entry;
    TRY(take(b, name, KIND_MATRIX, (uint64_t)rows, (uint64_t)cols, &entry));
    TRY(check_type(b, &entry, entry.types[0]));
    TRY(check_bytes(b, &entry, matrix_bytes(entry.types[0], (uint64_t)rows, (uint64_t)cols)));
    *matrix = (struct matrix){entry.data, (int32_t)rows, (int32_t)cols, entry.types[0]};
    return COLIBRI_OK;
}

static int32_t bind_norm(struct binder *b, const char *name, const struct config *c, const float **weight, const float **bias) {
    char bias_name[CONTAINER_NAME_BYTES];
    snprintf(bias_name, sizeof bias_name, "%s_bias", name);
    TRY(bind_vector(b, name, c->n_embd, weight));
    return c->layer_norm ? bind_vector(b, bias_name, c->n_embd, bias) : COLIBRI_OK;
}

static void note_types(struct binder *b, const struct ffn_weights *ffn) {
    b->inner_q8 = b->inner_q8 || type_reads_q8(ffn->gate.type) || type_reads_q8(ffn->up.type);
    b->down_f32 = b->down_f32 || !type_reads_q8(ffn->down.type);
}

static int32_t bind_ffn(struct binder *b, const char *prefix, int64_t n_ff, int64_t n_embd, struct ffn_weights *ffn) {
    b->prefix = prefix;
    TRY(bind_matrix(b, "gate", n_ff, n_embd, &ffn->gate));
    if (!b->ungated) TRY(bind_matrix(b, "up", n_ff, n_embd, &ffn->up));
    TRY(bind_matrix(b, "down", n_embd, n_ff, &ffn->down));
    b->prefix = "";
    note_types(b, ffn);
    return COLIBRI_OK;
}

/* What gate, up and down of all experts of a layer, or of its dense feed-forward, have added. */
static int32_t bind_ffn_biases(struct binder *b, const char *prefix, int64_t n_inner, int64_t n_outer, struct layer *layer) {
    b->prefix = prefix;
    TRY(bind_vector(b, "gate_bias", n_inner, &layer->gate_bias));
    if (!b->ungated) TRY(bind_vector(b, "up_bias", n_inner, &layer->up_bias));
    TRY(bind_vector(b, "down_bias", n_outer, &layer->down_bias));
    b->prefix = "";
    return COLIBRI_OK;
}

static int32_t bind_expert(struct binder *b, int32_t index, int64_t n_ff, int64_t n_embd, struct ffn_weights *expert) {
    struct container_entry entry;
    char name[32];
    snprintf(name, sizeof name, "experts.%d", index);
    TRY(take(b, name, KIND_EXPERT, (uint64_t)n_ff, (uint64_t)n_embd, &entry));
    struct matrix *const parts[3] = {&expert->gate, &expert->up, &expert->down};
    uint64_t bytes = 0;
    FAIL_IF(b->ungated && entry.types[1] != 0, b->error, FORMAT, "tensor '%s' has an up, of which ffn_ungated says there is none", entry.name);
    for (int i = 0; i < 3; i += 1 + b->ungated) {
        const int64_t rows = i < 2 ? n_ff : n_embd, cols = i < 2 ? n_embd : n_ff;
        TRY(check_type(b, &entry, entry.types[i]));
        *parts[i] = (struct matrix){entry.data + bytes, (int32_t)rows, (int32_t)cols, entry.types[i]};
        bytes += matrix_bytes(entry.types[i], (uint64_t)rows, (uint64_t)cols);
    }
    note_types(b, expert);
    return check_bytes(b, &entry, bytes);
}

static int32_t bind_heads(struct binder *b, const char *prefix, int32_t n, int64_t rows, int64_t cols, struct matrix *heads) {
    char name[CONTAINER_NAME_BYTES];
    for (int32_t h = 0; h < n; h++) {
        snprintf(name, sizeof name, "%s.%d", prefix, h);
        TRY(bind_matrix(b, name, rows, cols, &heads[h]));
    }
    return COLIBRI_OK;
}

static int32_t bind_latent(struct binder *b, const struct config *c, struct attention_weights *w) {
    if (c->q_latent_dim) {
        TRY(bind_matrix(b, "attn_q_latent", c->q_latent_dim, c->n_embd, &w->q_latent));
        TRY(bind_vector(b, "attn_q_latent_norm", c->q_latent_dim, &w->q_norm));
    }
    TRY(bind_matrix(b, "attn_q", (int64_t)c->n_heads * c->head_dim, c->q_latent_dim ? c->q_latent_dim : c->n_embd, &w->q));
    TRY(bind_matrix(b, "attn_kv_latent", config_key_dim(c, b->layer), c->n_embd, &w->k));
    TRY(bind_vector(b, "attn_kv_latent_norm", c->kv_latent_dim, &w->k_norm));
    TRY(bind_heads(b, "attn_k_up", c->n_heads, c->kv_latent_dim, c->head_dim - c->rope_dim, w->heads));
    return bind_heads(b, "attn_v_up", c->n_heads, c->value_dim, c->kv_latent_dim, w->heads + c->n_heads);
}

static int32_t bind_grouped(struct binder *b, const struct config *c, struct attention_weights *w) {
    const int64_t dim = config_head_dim(c, b->layer), q_rows = c->n_heads * dim, kv_rows = config_kv_heads(c, b->layer) * dim;
    TRY(bind_matrix(b, "attn_q", q_rows, c->n_embd, &w->q));
    TRY(bind_matrix(b, "attn_k", kv_rows, c->n_embd, &w->k));
    TRY(bind_matrix(b, "attn_v", kv_rows, c->n_embd, &w->v));
    if (c->attn_gate) TRY(bind_matrix(b, "attn_gate", q_rows, c->n_embd, &w->gate));
    if (c->attn_qkv_bias) {
        TRY(bind_vector(b, "attn_q_bias", q_rows, &w->q_bias));
        TRY(bind_vector(b, "attn_k_bias", kv_rows, &w->k_bias));
        TRY(bind_vector(b, "attn_v_bias", kv_rows, &w->v_bias));
    }
    if (c->qk_norm && (c->qk_norm != 3 || c->rope_set[b->layer] != 2)) {
        TRY(bind_vector(b, "attn_q_norm", c->qk_norm != 2 ? dim : q_rows, &w->q_norm));
        TRY(bind_vector(b, "attn_k_norm", c->qk_norm != 2 ? dim : kv_rows, &w->k_norm));
    }
    return COLIBRI_OK;
}

static int32_t bind_delta(struct binder *b, const struct config *c, struct attention_weights *w) {
    const int64_t channels = config_channels(c), values = (int64_t)c->delta_heads * c->delta_value_dim;
    TRY(bind_matrix(b, "delta_qkv", channels, c->n_embd, &w->q));
    TRY(bind_matrix(b, "delta_gate", values, c->n_embd, &w->gate));
    TRY(bind_matrix(b, "delta_beta", c->delta_heads, c->n_embd, &w->k));
    if (c->delta_key_dim > 0) TRY(bind_matrix(b, "delta_decay", c->delta_heads, c->n_embd, &w->v));
    TRY(bind_vector(b, "delta_conv", channels * c->conv_width, &w->conv));
    if (c->delta_key_dim == 0) return bind_matrix(b, "delta_out", c->n_embd, values, &w->out);
    TRY(bind_vector(b, "delta_log_rate", c->delta_heads, &w->log_rate));
    TRY(bind_vector(b, "delta_decay_bias", c->delta_heads, &w->decay_bias));
    TRY(bind_vector(b, "delta_value_norm", c->delta_value_dim, &w->value_norm));
    return bind_matrix(b, "delta_out", c->n_embd, values, &w->out);
}

static int32_t bind_attention(struct binder *b, const struct config *c, struct attention_weights *w) {
    TRY(bind_norm(b, "attn_norm", c, &w->norm, &w->norm_bias));
    TRY(c->mixer[b->layer] == 1 ? bind_delta(b, c, w) : c->kv_latent_dim ? bind_latent(b, c, w) : bind_grouped(b, c, w));
    w->reads_q8 = type_reads_q8(w->q.type) || type_reads_q8(w->k.type) || type_reads_q8(w->v.type) ||
                  type_reads_q8(w->gate.type) || type_reads_q8(w->q_latent.type);
    if (c->mixer[b->layer] == 1) return COLIBRI_OK;
    TRY(bind_matrix(b, "attn_out", c->n_embd, (int64_t)c->n_heads * config_out_dim(c, b->layer), &w->out));
    if (c->attn_out_bias) TRY(bind_vector(b, "attn_out_bias", c->n_embd, &w->out_bias));
    if (c->post_norm) TRY(bind_vector(b, "attn_post_norm", c->n_embd, &w->post_norm));
    if (c->attn_sinks) TRY(bind_vector(b, "attn_sinks", c->n_heads, &w->sinks));
    return COLIBRI_OK;
}

static int32_t bind_layer(struct binder *b, const struct config *c, int32_t n_experts, struct layer *layer,
                          struct ffn_weights *experts) {
    TRY(bind_attention(b, c, &layer->self));
    b->prefix = "cross_";
    if (c->n_encoder_layers > 0 && b->layer >= c->n_encoder_layers) TRY(bind_attention(b, c, &layer->cross));
    b->prefix = "";
    TRY(bind_norm(b, "ffn_norm", c, &layer->ffn_norm, &layer->ffn_norm_bias));
    if (c->post_norm) TRY(bind_vector(b, "ffn_post_norm", c->n_embd, &layer->ffn_post_norm));
    if (c->layer_scale) TRY(bind_vector(b, "layer_scale", 1, &layer->scale));
    if (n_experts == 0 || c->parallel_dense) TRY(bind_ffn(b, "ffn_", c->n_ff, c->n_embd, &layer->dense));
    if (n_experts == 0) return c->expert_bias ? bind_ffn_biases(b, "ffn_", c->n_ff, c->n_embd, layer) : COLIBRI_OK;
    if (c->parallel_dense) {
        TRY(bind_vector(b, "router_norm", c->n_embd, &layer->router_norm));
        TRY(bind_vector(b, "expert_norm", c->n_embd, &layer->expert_norm));
        TRY(bind_vector(b, "dense_post_norm", c->n_embd, &layer->dense_post_norm));
        TRY(bind_vector(b, "expert_post_norm", c->n_embd, &layer->expert_post_norm));
    }
    TRY(bind_matrix(b, "router", n_experts, c->n_embd, &layer->router));
    FAIL_IF(layer->router.type != TYPE_F32, b->error, FORMAT, "layers.%d.router has weight type %d, expected f32 (1)",
            b->layer, layer->router.type);
    if (c->router_logit_bias) TRY(bind_vector(b, "router_logit_bias", n_experts, &layer->router_logit_bias));
    if (c->router_bias) TRY(bind_vector(b, "router_bias", n_experts, &layer->router_bias));
    if (c->router_expert_scale) TRY(bind_vector(b, "router_expert_scale", n_experts, &layer->expert_scale));
    if (c->n_ff_shared && c->shared_gate) TRY(bind_vector(b, "shared_router", c->n_embd, &layer->shared_router));
    if (c->n_ff_shared) TRY(bind_ffn(b, "shared_", c->n_ff_shared, c->n_embd, &layer->shared));
    layer->experts = experts;
    const int64_t n_inner = (int64_t)n_experts * c->n_ff_expert, n_outer = (int64_t)n_experts * c->n_embd;
    if (c->expert_bias) TRY(bind_ffn_biases(b, "experts_", n_inner, n_outer, layer));
    for (int32_t e = 0; e < n_experts; e++) TRY(bind_expert(b, e, c->n_ff_expert, c->n_embd, &experts[e]));
    return COLIBRI_OK;
}

static int32_t bind_model(colibri_model *model, colibri_error *error) {
    const struct config *const c = &model->config;
    const struct container *const container = &model->container;
    const uint64_t data = (uint64_t)(container->directory - container->file.data) +
                          (uint64_t)container->n_entries * CONTAINER_ENTRY_BYTES;
    struct binder b = {.container = container, .error = error, .end = data, .layer = -1, .prefix = "", .ungated = c->ffn_ungated};
    TRY(bind_matrix(&b, "embedding", c->n_vocab, c->n_embd, &model->embedding));
    model->output = model->embedding;
    if (!c->tied_output) TRY(bind_matrix(&b, "output", c->n_vocab, c->n_embd, &model->output));
    if (c->output_bias) TRY(bind_vector(&b, "output_bias", c->n_vocab, &model->output_bias));
    TRY(bind_norm(&b, "output_norm", c, &model->output_norm, &model->output_norm_bias));
    if (c->rope_dim > 0) TRY(bind_vector(&b, "rope_inv_freq", c->rope_sets * (c->rope_dim / 2), &model->rope_inv_freq));
    const int32_t steps = c->temperature_step > 0 ? c->context_length / c->temperature_step + 1 : 0;
    if (steps > 0) TRY(bind_vector(&b, "attn_temperature", steps, &model->attn_temperature));
    const int64_t biases = (int64_t)c->n_heads * (2 * c->attn_bias_span + 1);
    if (c->sinusoids > 0) TRY(bind_vector(&b, "position_freq", c->n_embd / 2, &model->position_freq));
    if (c->attn_bias_span > 0) TRY(bind_vector(&b, "attn_bias", biases, &model->attn_bias));
    if (c->n_encoder_layers > 0) {
        TRY(bind_norm(&b, "encoder_norm", c, &model->encoder_norm, &model->encoder_norm_bias));
        if (c->attn_bias_span > 0) TRY(bind_vector(&b, "encoder_attn_bias", biases, &model->encoder_attn_bias));
    }
    struct ffn_weights *experts = model->experts;
    for (b.layer = 0; b.layer < c->n_layers; b.layer++) {
        b.inner_q8 = false;
        TRY(bind_layer(&b, c, c->n_experts[b.layer], &model->layers[b.layer], experts));
        model->layers[b.layer].ffn_reads_q8 = b.inner_q8;
        experts += c->n_experts[b.layer];
    }
    model->down_reads_f32 = b.down_f32;
    for (; b.next < container->n_entries; b.next++) {
        struct container_entry entry;
        TRY(container_entry(container, b.next, b.end, &entry, error));
        FAIL_IF(entry.kind != KIND_BLOB, error, FORMAT, "tensor '%s' is not asked for by the config", entry.name);
        b.end = entry.offset + entry.bytes;
    }
    return COLIBRI_OK;
}

static int32_t choose_kernels(const struct kernels **chosen, colibri_error *error) {
    const char *const forced = os_environment("COLIBRI_ISA");
    char names[128] = "";
    bool usable = false;
    for (int i = 0; (*chosen = kernels_list(i, &usable)) != NULL; i++) {
        const bool named = forced == NULL || forced[0] == '\0' || strcmp(forced, (*chosen)->name) == 0;
        if (named && usable) return COLIBRI_OK;
        const size_t used = strlen(names);
        if (usable) snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", (*chosen)->name);
    }
    return status_fail(error, COLIBRI_ERROR_UNSUPPORTED,
                       "COLIBRI_ISA=%.40s is not a kernel set of this machine; expected one of: %s", forced, names);
}

static void take_layers(struct arena *arena, const struct config *config, colibri_model *model) {
    uint64_t n_experts = 0;
    const uint64_t n_heads = config->kv_latent_dim ? 2 * (uint64_t)config->n_heads : 0;
    for (int32_t layer = 0; layer < config->n_layers; layer++) n_experts += (uint64_t)config->n_experts[layer];
    arena_take(arena, 1, sizeof *model);
    struct layer *const layers = arena_take(arena, (uint64_t)config->n_layers, sizeof *layers);
    struct ffn_weights *const experts = arena_take(arena, n_experts, sizeof *experts);
    struct matrix *const heads = arena_take(arena, n_heads * (uint64_t)config->n_layers, sizeof *heads);
    if (model == NULL) return;
    model->layers = layers;
    model->experts = experts;
    model->n_experts = (int32_t)n_experts;
    for (int32_t layer = 0; layer < config->n_layers; layer++) layers[layer].self.heads = heads + (uint64_t)layer * n_heads;
}

static void fill_info(colibri_model *model, uint64_t model_bytes) {
    const struct config *const c = &model->config;
    const struct container *const file = &model->container;
    model->info = (colibri_model_info){
        .n_vocab = c->n_vocab, .n_vocab_used = c->n_vocab_used, .n_layers = c->n_layers, .n_embd = c->n_embd,
        .n_experts_used = c->n_experts_used, .context_length = c->context_length, .file_bytes = file->file.bytes,
        .model_bytes = model_bytes, .isa = model->kernels->name, .config = file->config, .config_bytes = file->config_bytes,
    };
    for (int32_t layer = 0; layer < c->n_layers; layer++) {
        if (c->n_experts[layer] > model->info.n_experts) model->info.n_experts = c->n_experts[layer];
    }
}

int32_t colibri_open(const char *path, colibri_model **out, colibri_error *error) {
    if (out != NULL) *out = NULL;
    FAIL_IF(path == NULL || out == NULL, error, ARGUMENT, "colibri_open: expected a path and a place for the model");
    const struct kernels *kernels;
    struct container container;
    struct config config;
    TRY(choose_kernels(&kernels, error));
    TRY(container_open(path, &container, error));
    int32_t status = config_parse(container.config, container.config_bytes, &config, error);
    struct arena arena = {0};
    colibri_model *model = NULL;
    if (status == COLIBRI_OK) {
        take_layers(&arena, &config, NULL);
        model = os_reserve(arena.used);
        if (model == NULL) status = status_fail(error, COLIBRI_ERROR_MEMORY, "no memory for the model's tables");
    }
    if (status != COLIBRI_OK) {
        os_unmap_file(&container.file);
        return status;
    }
    arena = (struct arena){.base = (uint8_t *)model};
    take_layers(&arena, &config, model);
    atomic_init(&model->references, 1); /* the rest of new memory is 0 */
    model->container = container;
    model->config = config;
    model->kernels = kernels;
    model->files_before = os_resident_bytes(true);
    fill_info(model, arena.used);
    status = bind_model(model, error);
    if (status != COLIBRI_OK) colibri_close(model);
    else *out = model;
    return status;
}

enum { FETCH_STEP = 16 * OS_HUGE_PAGE }; /* between two reports of progress; the extra memory that a copy takes */

/* The next bytes from *from on to be copied, at most a step of them, without routed experts if streamed; 0 at the end. */
static uint64_t next_step(const colibri_model *model, bool streamed, uint64_t *from) {
    const struct container *const file = &model->container;
    uint64_t end = file->file.bytes;
    for (int32_t layer = model->config.n_layers - 1; streamed && layer >= 0; layer--) {
        if (model->config.n_experts[layer] == 0) continue;
        const struct ffn_weights *const first = model->layers[layer].experts, *const last = first + model->config.n_experts[layer] - 1;
        const uint64_t begins = (uint64_t)(first->gate.data - file->file.data);
        const uint64_t ends = ((uint64_t)(last->gate.data - file->file.data) + ffn_bytes(last)) & ~(uint64_t)(OS_PAGE - 1);
        if (*from < begins) end = begins;
        else if (*from < ends) *from = ends;
    }
    const uint64_t cut = (*from / FETCH_STEP + 1) * FETCH_STEP;
    return (end < cut ? end : cut) - *from;
}

uint64_t weights_copied_bytes(const colibri_model *model, bool streamed) {
    uint64_t bytes = 0;
    for (uint64_t from = 0, n; (n = next_step(model, streamed, &from)) > 0; from += n) bytes += n;
    return bytes;
}

static int32_t check_fetch(const colibri_model *model, int32_t residency, uint64_t needed, colibri_error *error) {
    const uint64_t available = os_available_bytes(), copied = atomic_load(&model->private_bytes);
    TRY(status_range(error, "residency", residency, COLIBRI_MAPPED, COLIBRI_STREAMED));
    FAIL_IF(copied > 0 && residency != COLIBRI_MAPPED && residency != (atomic_load(&model->streamed) ? COLIBRI_STREAMED : COLIBRI_RESIDENT), error, ARGUMENT,
            "residency: %" PRIu64 " bytes of the weights have been copied in another way already; open the file once more", copied);
    FAIL_IF(needed > available + copied, error, MEMORY, "the weights take %" PRIu64 " bytes, available are %" PRIu64 "; leave them mapped: "
            "that needs no fetching, or give a memory limit", needed, available);
    return COLIBRI_OK;
}

static int32_t fetch(colibri_model *model, int32_t residency, int32_t (*progress)(void *user, uint64_t done, uint64_t total),
                     void *user, colibri_error *error) {
    const struct os_file *const file = &model->container.file;
    const bool streamed = residency == COLIBRI_STREAMED;
    const uint64_t total = weights_copied_bytes(model, streamed);
    uint64_t done = 0;
    TRY(check_fetch(model, residency, total, error));
    if (residency != COLIBRI_MAPPED) atomic_store(&model->streamed, streamed);
    for (uint64_t from = 0, n; (n = next_step(model, streamed, &from)) > 0; from += n) {
        if (residency == COLIBRI_MAPPED) {
            os_prefetch(file, from, n);
        } else if (done >= atomic_load(&model->private_bytes)) {
            TRY(os_make_private(file, from, n, error));
            atomic_store(&model->private_bytes, done + n);
        }
        done += n;
        FAIL_IF(progress != NULL && progress(user, done, total) != 0, error, CANCELLED,
                "fetching ended after %" PRIu64 " of %" PRIu64 " bytes", done, total);
    }
    return COLIBRI_OK;
}

int32_t colibri_fetch(colibri_model *model, int32_t residency, int32_t (*progress)(void *user, uint64_t done, uint64_t total),
                      void *user, colibri_error *error) {
    FAIL_IF(model == NULL, error, ARGUMENT, "colibri_fetch: expected a model");
    FAIL_IF(atomic_exchange(&model->fetching, true), error, ARGUMENT,
            "colibri_fetch runs already on this model; wait for it");
    atomic_fetch_add(&model->references, 1);
    const int32_t status = fetch(model, residency, progress, user, error);
    atomic_store(&model->fetching, false);
    colibri_close(model);
    return status;
}

void colibri_close(colibri_model *model) {
    if (model == NULL || atomic_fetch_sub(&model->references, 1) > 1) return;
    for (uint64_t from = 0, n, done = 0; done < atomic_load(&model->private_bytes); from += n, done += n) {
        n = next_step(model, atomic_load(&model->streamed), &from);
        os_wipe_private(&model->container.file, from, n);
    }
    const uint64_t bytes = model->info.model_bytes;
    os_unmap_file(&model->container.file);
    os_wipe(model, bytes);
    os_release(model, bytes);
}

const colibri_model_info *colibri_info(const colibri_model *model) {
    return model == NULL ? NULL : &model->info;
}
