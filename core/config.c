/* config.c: parses and checks the config section from the one list in config.h. Refuses unknown fields: they could
 * change the mathematics. */
#include "config.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

enum field_type { FIELD_INT = 1, FIELD_FLOAT = 2 };

struct field {
    const char *name;
    enum field_type type;
    bool per_layer, required;
    size_t offset; /* in struct config */
    double min, max, fallback;
};

#define REQUIRED NAN
#define FIELD(name, type, layer, min, max, def) \
    {#name, type, layer, isnan((double)(def)), offsetof(struct config, name), min, max, def},
#define FIELD_OF_INT(name, min, max, def, doc) FIELD(name, FIELD_INT, false, min, max, def)
#define FIELD_OF_LAYER(name, min, max, def, doc) FIELD(name, FIELD_INT, true, min, max, def)
#define FIELD_OF_FLOAT(name, min, max, def, doc) FIELD(name, FIELD_FLOAT, false, min, max, def)

static const struct field FIELDS[] = {CONFIG_FIELDS(FIELD_OF_INT, FIELD_OF_LAYER, FIELD_OF_FLOAT)};
enum { N_FIELDS = sizeof FIELDS / sizeof FIELDS[0] };

static const struct field *find_field(const char *name, size_t length) {
    for (int i = 0; i < N_FIELDS; i++) {
        if (strlen(FIELDS[i].name) == length && memcmp(FIELDS[i].name, name, length) == 0) return &FIELDS[i];
    }
    return NULL;
}

struct record { /* one config record as it lies in the file */
    const char *name;
    const uint8_t *values;
    uint16_t name_bytes;
    uint8_t type;
    uint32_t count;
};

/* Reads the record at *at and moves *at behind it. */
static int32_t read_record(const uint8_t *data, uint64_t bytes, uint64_t *at, struct record *record,
                           colibri_error *error) {
    const uint64_t start = *at;
    if (bytes - start < 8) goto damaged;
    memcpy(&record->name_bytes, data + start, 2);
    record->type = data[start + 2];
    memcpy(&record->count, data + start + 4, 4);
    const uint64_t name_end = start + 8 + (((uint64_t)record->name_bytes + 7) & ~(uint64_t)7);
    const uint64_t value_bytes = ((uint64_t)record->count * 4 + 7) & ~(uint64_t)7;
    if (data[start + 3] != 0 || name_end > bytes || value_bytes > bytes - name_end) goto damaged;
    record->name = (const char *)data + start + 8;
    record->values = data + name_end;
    *at = name_end + value_bytes;
    return COLIBRI_OK;
damaged:
    return status_fail(error, COLIBRI_ERROR_FORMAT,
                       "config record at byte %llu runs past the config's end (%llu bytes); the file is damaged",
                       (unsigned long long)start, (unsigned long long)bytes);
}

static int32_t store_record(const struct record *record, const struct field *field, int32_t n_layers,
                            struct config *config, colibri_error *error) {
    FAIL_IF(record->type != (uint8_t)field->type, error, FORMAT, "config field '%s': expected type %d, found %d",
            field->name, field->type, record->type);
    const uint32_t expected = field->per_layer ? (uint32_t)n_layers : 1;
    FAIL_IF(record->count != expected, error, FORMAT, "config field '%s': expected %u values, found %u", field->name,
            expected, record->count);
    for (uint32_t i = 0; i < record->count; i++) {
        int32_t integer;
        float real;
        memcpy(&integer, record->values + i * 4, 4);
        memcpy(&real, record->values + i * 4, 4);
        const double value = field->type == FIELD_FLOAT ? (double)real : integer;
        FAIL_IF(!(value >= field->min && value <= field->max), error, FORMAT,
                "config field '%s': expected %g to %g, found %g", field->name, field->min, field->max, value);
    }
    memcpy((uint8_t *)config + field->offset, record->values, record->count * 4);
    return COLIBRI_OK;
}

/* One pass over the records; with `only` set, just that field is stored (n_layers is needed before the others). */
static int32_t read_fields(const uint8_t *data, uint64_t bytes, const struct field *only, struct config *config,
                           bool *seen, colibri_error *error) {
    for (uint64_t at = 0; at < bytes;) {
        struct record record = {0};
        TRY(read_record(data, bytes, &at, &record, error));
        const struct field *const field = find_field(record.name, record.name_bytes);
        FAIL_IF(field == NULL, error, UNSUPPORTED,
                "config field '%.*s' is not known to this version (" COLIBRI_VERSION "); install a newer colibri or convert "
                "the model again", record.name_bytes > 100 ? 100 : record.name_bytes, record.name);
        if (only != NULL && field != only) continue;
        FAIL_IF(seen[field - FIELDS], error, FORMAT, "config field '%s' appears twice", field->name);
        seen[field - FIELDS] = true;
        TRY(store_record(&record, field, config->n_layers, config, error));
    }
    return COLIBRI_OK;
}

/* How the groups of experts fit the rest: the groups in use must hold enough experts to choose from. */
static const char *group_fault(const struct config *c) {
    if (c->n_expert_groups == 0) return c->n_groups_used || c->group_score ? "n_expert_groups is 0 but groups are in use" : NULL;
    if (c->n_groups_used < 1 || c->n_groups_used >= c->n_expert_groups) return "n_groups_used is not below n_expert_groups";
    if (c->router_bias && c->group_score == 0) return "router_bias needs group_score 1";
    for (int32_t layer = 0; layer < c->n_layers; layer++) {
        const int32_t size = c->n_experts[layer] / c->n_expert_groups;
        if (c->n_experts[layer] == 0) continue;
        if (size * c->n_expert_groups != c->n_experts[layer]) return "n_experts is not a multiple of n_expert_groups";
        if (size * c->n_groups_used < c->n_experts_used) return "the groups used hold fewer experts than n_experts_used";
        if (size == 1 && c->group_score == 1) return "group_score 1 needs groups of two experts or more";
    }
    return NULL;
}

static const char *router_fault(const struct config *c) {
    const bool biased = c->router_bias || c->n_expert_groups;
    const bool linear = !c->expert_bias && !c->ffn_ungated && !(c->ffn_limit > 0) && !(c->ffn_cubic > 0) && c->ffn_up_offset == 0;
    if (c->router_near > 0 && (c->router_score || biased)) return "router_near goes without router_score, router_bias and n_expert_groups";
    if (c->router_score == 2 && biased) return "router_score 2 goes without router_bias and n_expert_groups";
    if (c->router_on_input && !linear) return "router_on_input goes without expert_bias, ffn_ungated, ffn_limit, ffn_cubic and ffn_up_offset";
    const bool beside = c->post_norm && !c->layer_norm && c->n_ff > 0 && !c->n_ff_shared && !c->expert_bias;
    if (c->parallel_dense && !beside) return "parallel_dense needs post_norm and n_ff, and goes without layer_norm, n_ff_shared and expert_bias";
    if (c->layer_scale && !c->post_norm) return "layer_scale needs post_norm";
    return group_fault(c);
}

static const char *latent_fault(const struct config *c) {
    const bool companions = c->q_latent_dim || c->value_dim || c->latent_norm_eps > 0;
    if (c->kv_latent_dim == 0) return companions ? "kv_latent_dim is 0 but its companions are set" : NULL;
    if (c->n_kv_heads != 1) return "kv_latent_dim needs n_kv_heads 1";
    if (c->value_dim == 0) return "kv_latent_dim needs a value_dim";
    if (c->rope_dim == c->head_dim) return "kv_latent_dim needs a head_dim above rope_dim";
    if (c->rope_dim + c->kv_latent_dim > 1024) return "rope_dim and kv_latent_dim make more than 1024";
    const bool more = c->qk_norm || c->value_norm || c->qkv_clip > 0 || c->attn_qkv_bias;
    return more ? "kv_latent_dim goes without qk_norm, value_norm, qkv_clip and attn_qkv_bias" : NULL;
}

static const char *encoder_fault(const struct config *c) {
    if (c->sinusoids && c->n_embd % 2 != 0) return "sinusoids need an even n_embd";
    if (c->attn_bias_span && c->attn_bias_span < 8) return "attn_bias_span is below 8";
    if (c->expert_capacity && c->n_encoder_layers == 0) return "expert_capacity needs n_encoder_layers";
    if (c->n_encoder_layers >= c->n_layers) return "n_encoder_layers leaves no layer";
    const bool more = c->rope_dim || c->kv_latent_dim || c->delta_heads;
    return c->n_encoder_layers && more ? "n_encoder_layers goes without rope_dim, kv_latent_dim and mixer 1" : NULL;
}

static const char *delta_fault(const struct config *c) {
    bool used = false;
    const int32_t sizes[] = {c->delta_heads, c->delta_key_heads, c->delta_value_dim, c->conv_width, c->delta_key_dim};
    for (int32_t layer = 0; layer < c->n_layers; layer++) used = used || c->mixer[layer] == 1;
    for (int i = 0; i < 5; i++) {
        if ((sizes[i] > 0) == used || (used && i == 4)) continue;
        return "mixer 1 goes with delta_heads, delta_key_heads, delta_value_dim and conv_width, and delta_key_dim with mixer 1";
    }
    if (c->delta_key_dim == 0 && c->delta_value_dim > 1) return "delta_value_dim is above 1 but delta_key_dim is 0";
    if (c->attn_gate && c->kv_latent_dim) return "kv_latent_dim goes without attn_gate";
    return used && c->delta_heads % c->delta_key_heads ? "delta_heads is not a multiple of delta_key_heads" : encoder_fault(c);
}

/* How heads that differ from layer to layer fit the rest. */
static const char *head_fault(const struct config *c) {
    int32_t widest = 0;
    for (int32_t layer = 0; layer < c->n_layers; layer++) {
        const int32_t dim = config_head_dim(c, layer), set = c->rope_set[layer];
        widest = dim > widest ? dim : widest;
        if (c->n_heads % config_kv_heads(c, layer) != 0) return "n_heads is not a multiple of a layer's key and value heads";
        if (config_rope_dim(c, layer) % 2 != 0) return "rope_dim, or what a layer's head has of it, is odd";
        if (set == 2 ? c->kv_latent_dim > 0 : set >= c->rope_sets) return "a layer's rope_set does not fit rope_sets or kv_latent_dim";
        if ((c->kv_latent_dim || c->n_encoder_layers) && (c->own_head_dim[layer] || c->own_kv_heads[layer])) {
            return "own_head_dim and own_kv_heads go without kv_latent_dim and n_encoder_layers";
        }
    }
    return c->rope_dim > widest ? "rope_dim is larger than every head" : NULL;
}

/* How fields must fit together. */
static int32_t check_relations(const struct config *config, colibri_error *error) {
    const char *fault = NULL;
    bool dense = false;
    int32_t fewest = INT32_MAX;
    for (int32_t layer = 0; layer < config->n_layers; layer++) {
        if (config->n_experts[layer] == 0) dense = true;
        else if (config->n_experts[layer] < fewest) fewest = config->n_experts[layer];
    }
    if (config->n_vocab_used > config->n_vocab) fault = "n_vocab_used is larger than n_vocab";
    else if (dense && config->n_ff == 0) fault = "a layer is dense but n_ff is 0";
    else if (fewest != INT32_MAX && config->n_ff_expert == 0) fault = "a layer has experts but n_ff_expert is 0";
    else if (fewest != INT32_MAX && config->n_experts_used == 0) fault = "a layer has experts but n_experts_used is 0";
    else if (config->n_experts_used > fewest) fault = "n_experts_used is larger than a layer's n_experts";
    else if (config->shared_gate && config->n_ff_shared == 0) fault = "shared_gate is set but n_ff_shared is 0";
    else if ((fault = head_fault(config)) == NULL && (fault = router_fault(config)) == NULL && (fault = latent_fault(config)) == NULL)
        fault = delta_fault(config);
    if (fault == NULL) return COLIBRI_OK;
    return status_fail(error, COLIBRI_ERROR_FORMAT, "config: %s; convert the model again", fault);
}

int32_t config_parse(const uint8_t *data, uint64_t bytes, struct config *config, colibri_error *error) {
    bool seen[N_FIELDS] = {false}, first[N_FIELDS] = {false};
    memset(config, 0, sizeof *config);
    TRY(read_fields(data, bytes, find_field("n_layers", 8), config, first, error));
    config->n_layers = config->n_layers == 0 ? 1 : config->n_layers; /* absent: reported as missing below */
    TRY(read_fields(data, bytes, NULL, config, seen, error));
    for (int i = 0; i < N_FIELDS; i++) {
        if (seen[i]) continue;
        FAIL_IF(FIELDS[i].required, error, FORMAT, "config field '%s' is missing; convert the model again", FIELDS[i].name);
        const int32_t integer = (int32_t)FIELDS[i].fallback, count = FIELDS[i].per_layer ? config->n_layers : 1;
        const float real = (float)FIELDS[i].fallback;
        uint8_t *const at = (uint8_t *)config + FIELDS[i].offset;
        for (int32_t k = 0; k < count; k++) memcpy(at + k * 4, FIELDS[i].type == FIELD_FLOAT ? (const void *)&real : &integer, 4);
    }
    return check_relations(config, error);
}
