/* config.h: the field list of a model's config. The one list below gives the struct, the parser, bounds, defaults,
 * messages, and by tools/generate_ffi.py what the converter knows of them. A field names a mechanism, never a model; zero means off.
 * To add a mechanism: one line here, its use in the engine, its line in docs/FORMAT.md. */
#pragma once

#include "status.h"

#include <stddef.h>

enum { CONFIG_MAX_LAYERS = 512, CONFIG_MAX_EXPERTS = 4096, CONFIG_MAX_GROUPS = 256 };

/* INT(name, min, max, default, doc), LAYER (an int per layer), FLOAT; REQUIRED in place of a default. */
#define CONFIG_FIELDS(INT, LAYER, FLOAT)                                                                              \
    INT(n_vocab, 1, 16777216, REQUIRED, "rows of the embedding and length of a logits row")                           \
    INT(n_vocab_used, 1, 16777216, REQUIRED, "ids at or above it are padding rows: never sampled")                    \
    INT(n_layers, 1, 512, REQUIRED, "layers")                                                                         \
    INT(n_encoder_layers, 0, 511, 0, "of these the first, which read a source; the others attend to it too; 0: none") \
    INT(n_embd, 1, 1048576, REQUIRED, "width of the residual stream")                                                 \
    INT(n_heads, 1, 4096, REQUIRED, "query heads")                                                                    \
    INT(n_kv_heads, 1, 4096, REQUIRED, "key and value heads, a divisor of n_heads")                                   \
    INT(head_dim, 1, 1024, REQUIRED, "width of a head")                                                               \
    LAYER(own_head_dim, 0, 1024, 0, "width of a head of the layer, if it is not head_dim; 0: it is")                  \
    LAYER(own_kv_heads, 0, 4096, 0, "key and value heads of the layer, if they are not n_kv_heads; 0: they are")      \
    INT(kv_latent_dim, 0, 1024, 0, "keys and values of all heads are made of one latent this wide; 0: off")           \
    INT(q_latent_dim, 0, 1048576, 0, "with it: queries are made of a latent this wide; 0: of the hidden state")       \
    INT(value_dim, 0, 1024, 0, "with it: width of a head's value; 0 without it")                                      \
    FLOAT(latent_norm_eps, 0, 1, 0, "epsilon of the RMSNorm of the latents")                                          \
    INT(rope_dim, 0, 1024, REQUIRED, "leading elements of a head that are rotated, even; all if it has less; 0: none") \
    INT(rope_sets, 1, 2, 1, "sets of frequencies that layers choose from")                                            \
    LAYER(rope_set, 0, 2, 0, "the layer's set of frequencies: 0, 1; 2: none, q and k are not rotated")                \
    INT(temperature_step, 0, 1073741824, 0, "positions that share a factor of q in layers that do not rotate; 0: off") \
    FLOAT(rope_scale, 0.0001, 10000, 1, "multiplies cos and sin")                                                     \
    INT(sinusoids, 0, 1048576, 0, "sines and cosines of positions, the first one this, join the embedding; 0: off")    \
    INT(context_length, 1, 1073741824, REQUIRED, "positions the model was trained for")                               \
    FLOAT(norm_eps, 0, 1, REQUIRED, "epsilon of every RMSNorm")                                                       \
    INT(layer_norm, 0, 1, 0, "1: norms of the residual stream take the mean off and have a bias")                     \
    FLOAT(embed_scale, 0.5, 10000, 1, "multiplies a token's row of the embedding")                                 \
    FLOAT(residual_scale, 0.0001, 10000, 1, "multiplies what attention and feed-forward add to the residual stream")  \
    FLOAT(attn_scale, 0.0000001, 1000, REQUIRED, "multiplies q.k before the softmax")                                 \
    FLOAT(qkv_clip, 0, 1000000, 0, "clamps q, k and v to +- this before RoPE; 0: off")                                 \
    INT(qk_norm, 0, 3, 0, "RMSNorm of q and k before RoPE: 1 per head, 2 of all, 3 per head in layers that rotate")   \
    INT(value_norm, 0, 1, 0, "1: v of a head is divided by the root of its mean square")                              \
    INT(attn_qkv_bias, 0, 1, 0, "1: q, k and v have biases")                                                          \
    INT(attn_out_bias, 0, 1, 0, "1: the attention output has a bias")                                                 \
    LAYER(window, 0, 1073741824, 0, "keys a query of the layer sees, itself the last of them; 0: all before it")      \
    INT(window_aligned, 0, 1, 0, "1: windows do not slide: a query sees keys from the last multiple of window on")    \
    INT(attn_bias_span, 0, 65536, 0, "scores have a bias for each head and distance, up to this one; 0: off")         \
    INT(attn_sinks, 0, 1, 0, "1: a learned logit per query head joins the sum that softmax divides by")                \
    INT(attn_gate, 0, 1, 0, "1: what attention gives is scaled by the sigmoid of a projection of its own")            \
    LAYER(mixer, 0, 1, 0, "what mixes positions: 0 attention, 1 a gated delta rule with a state, or a convolution") \
    INT(delta_heads, 0, 4096, 0, "of such layers: heads of values, each with a state")                                \
    INT(delta_key_heads, 0, 4096, 0, "heads of queries and keys, a divisor of delta_heads")                           \
    INT(delta_key_dim, 0, 1024, 0, "width of a query or key; 0: no rule, but values times betas, convolved, times gates") \
    INT(delta_value_dim, 0, 1024, 0, "width of a value")                                                              \
    INT(conv_width, 0, 16, 0, "positions that the convolution before them sees, the own one included")                \
    INT(tied_output, 0, 1, 0, "1: the output head is the embedding")                                                  \
    INT(post_norm, 0, 1, 0, "1: RMSNorm of what attention and feed-forward add, before it is added")                  \
    INT(layer_scale, 0, 1, 0, "1: a number multiplies the residual stream behind each layer")                         \
    INT(parallel_dense, 0, 1, 0, "1: MoE layers have a dense feed-forward beside, each with norms before and behind") \
    FLOAT(output_cap, 0, 1000000, 0, "logits become this x tanh(logit / this); 0: off")                               \
    INT(output_bias, 0, 1, 0, "1: logits have a bias")                                                                \
    INT(n_ff, 0, 1048576, 0, "width of the dense feed-forward; needed where a layer is dense")                        \
    LAYER(n_experts, 0, 4096, 0, "routed experts of the layer; 0: a dense layer")                                     \
    INT(n_experts_used, 0, 256, 0, "experts chosen per token")                                                        \
    INT(n_ff_expert, 0, 1048576, 0, "width of a routed expert")                                                       \
    INT(router_score, 0, 2, 0, "what gate logits become: 0 softmax over all experts, 1, 2 sigmoid; 2: chosen before") \
    INT(router_on_input, 0, 1, 0, "1: weights multiply what experts read, not what they say")                         \
    FLOAT(router_near, 0, 1000, 0, "experts are chosen in turn, weights are a softmax over logits this near; 0: off") \
    INT(router_logit_bias, 0, 1, 0, "1: gate logits have a bias")                                                     \
    INT(router_bias, 0, 1, 0, "1: a bias vector is added to the scores, for the choice only")                         \
    INT(n_expert_groups, 0, 256, 0, "equal groups of neighbouring experts, the best of which are chosen among; 0: off") \
    INT(n_groups_used, 0, 256, 0, "groups that stay in the choice")                                                   \
    INT(group_score, 0, 1, 0, "a group counts as 0 its best expert, others score 0; 1 its two best, others are out")  \
    INT(router_norm, 0, 1, 0, "1: the chosen weights are divided by their sum")                                       \
    FLOAT(router_norm_min, 0, 1, 0, "by this where their sum is less")                                                \
    FLOAT(router_norm_add, 0, 1, 0, "is added to that sum")                                                           \
    FLOAT(router_scale, 0.0001, 10000, 1, "multiplies the weights of the chosen experts")                             \
    INT(router_expert_scale, 0, 1, 0, "1: a factor of each expert multiplies its weight")                             \
    INT(expert_capacity, 0, 1073741824, 0, "tokens of a source that an expert adds to, the first ones; 0: all")       \
    INT(expert_bias, 0, 1, 0, "1: gate, up and down of routed experts and dense feed-forwards have biases")           \
    INT(ffn_ungated, 0, 1, 0, "1: a feed-forward is ReLU of gate, there is no up")                                    \
    FLOAT(ffn_limit, 0, 1000000, 0, "a gate is at most this, up within +- this; 0: off")                              \
    FLOAT(ffn_alpha, 0.0001, 10000, 1, "a feed-forward is (up + offset) gate sigmoid(this x gate)")                   \
    FLOAT(ffn_cubic, 0, 1000, 0, "the sigmoid is of alpha x (gate + this x gate^3)")                                  \
    FLOAT(ffn_up_offset, -1000, 1000, 0, "the offset of up")                                                          \
    INT(n_ff_shared, 0, 1048576, 0, "width of the shared expert of MoE layers; 0: none")                              \
    INT(shared_gate, 0, 1, 0, "1: the shared expert is scaled by sigmoid(shared_router . x)")

#define CONFIG_INT(name, min, max, def, doc) int32_t name;
#define CONFIG_LAYER(name, min, max, def, doc) int32_t name[CONFIG_MAX_LAYERS];
#define CONFIG_FLOAT(name, min, max, def, doc) float name;
struct config { CONFIG_FIELDS(CONFIG_INT, CONFIG_LAYER, CONFIG_FLOAT) };
#undef CONFIG_INT
#undef CONFIG_LAYER
#undef CONFIG_FLOAT

/* Of a layer: its key and value heads, the width of a head, and how much of it is rotated if the layer does. */
static inline int32_t config_kv_heads(const struct config *c, int32_t layer) {
    return c->own_kv_heads[layer] > 0 ? c->own_kv_heads[layer] : c->n_kv_heads;
}
static inline int32_t config_head_dim(const struct config *c, int32_t layer) {
    return c->own_head_dim[layer] > 0 ? c->own_head_dim[layer] : c->head_dim;
}
static inline int32_t config_rope_dim(const struct config *c, int32_t layer) {
    return c->rope_dim < config_head_dim(c, layer) ? c->rope_dim : config_head_dim(c, layer);
}
/* Widths of a key and a value in the cache, and of what a head adds to the attention output. */
static inline int32_t config_key_dim(const struct config *c, int32_t layer) {
    return c->kv_latent_dim ? c->rope_dim + c->kv_latent_dim : config_head_dim(c, layer);
}
static inline int32_t config_kv_value_dim(const struct config *c, int32_t layer) {
    return c->kv_latent_dim ? c->kv_latent_dim : config_head_dim(c, layer);
}
static inline int32_t config_out_dim(const struct config *c, int32_t layer) {
    return c->kv_latent_dim ? c->value_dim : config_head_dim(c, layer);
}
/* Queries, keys and values that a layer with a state convolves. */
static inline int32_t config_channels(const struct config *c) {
    return 2 * c->delta_key_heads * c->delta_key_dim + c->delta_heads * c->delta_value_dim;
}
/* Floats of a state that belong to one key head: see cache.h. */
static inline size_t config_state_floats(const struct config *c) {
    const size_t group = (size_t)(c->delta_heads / c->delta_key_heads), lanes = ((size_t)c->delta_value_dim + 15) & ~(size_t)15;
    const size_t channels = 2 * (size_t)c->delta_key_dim + group * (size_t)c->delta_value_dim;
    return (group * lanes * (size_t)c->delta_key_dim + (size_t)(c->conv_width - 1) * channels + 15) & ~(size_t)15;
}

/* Reads the config section of a container (docs/FORMAT.md §2) and checks each field and how fields fit together. */
int32_t config_parse(const uint8_t *data, uint64_t bytes, struct config *config, colibri_error *error);
