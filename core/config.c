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

/* What the layers say together: the fewest experts of one that has any (else INT32_MAX), the widest head, and whether there is one … */
struct layers_say {
    int32_t fewest, widest;
    bool dense, stateful, uneven_heads, odd_rope, strange_set, own_heads; /* … that is or has this */
    bool uneven_groups, small_groups, single_groups;
};

static struct layers_say ask_layers(const struct config *c) {
    struct layers_say say = {.fewest = INT32_MAX};
    for (int32_t layer = 0; layer < c->n_layers; layer++) {
        const int32_t n = c->n_experts[layer], dim = config_head_dim(c, layer), set = c->rope_set[layer];
        say.widest = dim > say.widest ? dim : say.widest;
        say.stateful |= c->mixer[layer] == 1;
        say.uneven_heads |= c->n_heads % config_kv_heads(c, layer) != 0;
        say.odd_rope |= config_rope_dim(c, layer) % 2 != 0;
        say.strange_set |= set == 2 ? c->kv_latent_dim > 0 : set >= c->rope_sets;
        say.own_heads |= c->own_head_dim[layer] > 0 || c->own_kv_heads[layer] > 0;
        say.dense |= n == 0;
        if (n > 0 && n < say.fewest) say.fewest = n;
        if (n == 0 || c->n_expert_groups == 0) continue;
        const int32_t size = n / c->n_expert_groups;
        say.uneven_groups |= size * c->n_expert_groups != n;
        say.small_groups |= size * c->n_groups_used < c->n_experts_used;
        say.single_groups |= size == 1;
    }
    return say;
}

/* How fields must fit together. */
static int32_t check_relations(const struct config *c, colibri_error *error) {
    const struct layers_say say = ask_layers(c);
    const bool routed = say.fewest < INT32_MAX, grouped = c->n_expert_groups > 0, biased = c->router_bias || grouped;
    const bool latent = c->kv_latent_dim > 0, encoder = c->n_encoder_layers > 0;
    const bool linear = !c->expert_bias && !c->ffn_ungated && !(c->ffn_limit > 0) && !(c->ffn_cubic > 0) && c->ffn_up_offset == 0;
    const bool beside = c->post_norm && !c->layer_norm && c->n_ff > 0 && !c->n_ff_shared && !c->expert_bias;
    const bool states = c->delta_heads && c->delta_key_heads && c->delta_value_dim && c->conv_width;
    const bool some = c->delta_heads || c->delta_key_heads || c->delta_value_dim || c->conv_width || c->delta_key_dim;
    const struct { bool found; const char *text; } faults[] = {
        {c->n_vocab_used > c->n_vocab, "n_vocab_used is larger than n_vocab"},
        {say.dense && c->n_ff == 0, "a layer is dense but n_ff is 0"},
        {routed && c->n_ff_expert == 0, "a layer has experts but n_ff_expert is 0"},
        {routed && c->n_experts_used == 0, "a layer has experts but n_experts_used is 0"},
        {c->n_experts_used > say.fewest, "n_experts_used is larger than a layer's n_experts"},
        {c->shared_gate && c->n_ff_shared == 0, "shared_gate is set but n_ff_shared is 0"},
        {say.uneven_heads, "n_heads is not a multiple of a layer's key and value heads"},
        {say.odd_rope, "rope_dim, or what a layer's head has of it, is odd"},
        {say.strange_set, "a layer's rope_set does not fit rope_sets or kv_latent_dim"},
        {(latent || encoder) && say.own_heads, "own_head_dim and own_kv_heads go without kv_latent_dim and n_encoder_layers"},
        {c->rope_dim > say.widest, "rope_dim is larger than every head"},
        {c->router_near > 0 && (c->router_score || biased), "router_near goes without router_score, router_bias and n_expert_groups"},
        {c->router_score == 2 && biased, "router_score 2 goes without router_bias and n_expert_groups"},
        {c->router_on_input && !linear, "router_on_input goes without expert_bias, ffn_ungated, ffn_limit, ffn_cubic and ffn_up_offset"},
        {c->parallel_dense && !beside, "parallel_dense needs post_norm and n_ff, and goes without layer_norm, n_ff_shared and expert_bias"},
        {c->layer_scale && !c->post_norm, "layer_scale needs post_norm"},
        {!grouped && (c->n_groups_used || c->group_score), "n_expert_groups is 0 but groups are in use"},
        {grouped && (c->n_groups_used < 1 || c->n_groups_used >= c->n_expert_groups), "n_groups_used is not below n_expert_groups"},
        {grouped && c->router_bias && c->group_score == 0, "router_bias needs group_score 1"},
        {say.uneven_groups, "n_experts is not a multiple of n_expert_groups"},
        {say.small_groups, "the groups used hold fewer experts than n_experts_used"},
        {say.single_groups && c->group_score, "group_score 1 needs groups of two experts or more"},
        {!latent && (c->q_latent_dim || c->value_dim || c->latent_norm_eps > 0), "kv_latent_dim is 0 but its companions are set"},
        {latent && c->n_kv_heads != 1, "kv_latent_dim needs n_kv_heads 1"},
        {latent && c->value_dim == 0, "kv_latent_dim needs a value_dim"},
        {latent && c->rope_dim == c->head_dim, "kv_latent_dim needs a head_dim above rope_dim"},
        {latent && c->rope_dim + c->kv_latent_dim > 1024, "rope_dim and kv_latent_dim make more than 1024"},
        {latent && (c->qk_norm || c->value_norm || c->qkv_clip > 0 || c->attn_qkv_bias),
         "kv_latent_dim goes without qk_norm, value_norm, qkv_clip and attn_qkv_bias"},
        {latent && c->attn_gate, "kv_latent_dim goes without attn_gate"},
        {say.stateful ? !states : some,
         "mixer 1 goes with delta_heads, delta_key_heads, delta_value_dim and conv_width, and delta_key_dim with mixer 1"},
        {c->delta_key_dim == 0 && c->delta_value_dim > 1, "delta_value_dim is above 1 but delta_key_dim is 0"},
        {c->delta_key_heads > 0 && c->delta_heads % c->delta_key_heads != 0, "delta_heads is not a multiple of delta_key_heads"},
        {c->sinusoids && c->n_embd % 2 != 0, "sinusoids need an even n_embd"},
        {c->attn_bias_span > 0 && c->attn_bias_span < 8, "attn_bias_span is below 8"},
        {c->expert_capacity > 0 && !encoder, "expert_capacity needs n_encoder_layers"},
        {c->n_encoder_layers >= c->n_layers, "n_encoder_layers leaves no layer"},
        {encoder && (c->rope_dim || latent || c->delta_heads), "n_encoder_layers goes without rope_dim, kv_latent_dim and mixer 1"},
    };
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        FAIL_IF(faults[i].found, error, FORMAT, "config: %s; convert the model again", faults[i].text);
    }
    return COLIBRI_OK;
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
