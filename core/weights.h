/* weights.h: an open model. Every tensor that the config asks for is found in the container in the canonical order,
 * its type, shape and size checked once; the mathematics afterwards checks nothing. Shared, immutable, counted. */
#pragma once

#include "config.h"
#include "container.h"
#include "arena.h"
#include "kernels/kernels.h"

#include <stdatomic.h>

/* gate and up [n_ff, n_embd], down [n_embd, n_ff]: a dense feed-forward, a shared expert or a routed one; up.data may be
 * NULL. */
struct ffn_weights { struct matrix gate, up, down; };

/* From gate's first byte to down's last: those of a routed expert lie side by side. */
static inline uint64_t ffn_bytes(const struct ffn_weights *w) {
    return (uint64_t)(w->down.data - w->gate.data) + matrix_bytes(w->down.type, (uint64_t)w->down.rows, (uint64_t)w->down.cols);
}

struct attention_weights {
    const float *norm, *norm_bias;              /* [n_embd]; bias NULL: RMSNorm, else LayerNorm */
    struct matrix q, k, v;                      /* [heads x head_dim, n_embd]; latent: q of its latent, k [rope_dim +
                                                 * kv_latent_dim, n_embd], no v */
    struct matrix gate;                         /* [heads x width of a value, n_embd] of what heads give; data NULL: none. mixer 1:
                                                 * beside q [config_channels, n_embd], k of beta and v of decay [heads, n_embd] */
    struct matrix q_latent;                     /* [q_latent_dim, n_embd]; data NULL: none */
    struct matrix *heads;                       /* latent: [n_heads] of [kv_latent_dim, head_dim - rope_dim], then [n_heads] of
                                                 * [value_dim, kv_latent_dim] */
    const float *q_bias, *k_bias, *v_bias;      /* NULL: none */
    const float *q_norm, *k_norm;               /* [head_dim] or [heads x head_dim]; latent: of the latents; NULL: none */
    const float *conv;                          /* mixer 1: [conv_width][config_channels] */
    const float *log_rate, *decay_bias, *value_norm; /* mixer 1: [heads] twice, [width of a value] */
    struct matrix out;                          /* [n_embd, heads x width of a value] */
    const float *out_bias;                      /* [n_embd]; NULL: none */
    const float *post_norm;                     /* [n_embd]; NULL: none */
    const float *sinks;                         /* [n_heads]; NULL: none */
    bool reads_q8;                              /* some matrix needs its input quantised, that of `out` aside */
};

struct layer {
    struct attention_weights self, cross;       /* to the row's own sequence; to a source, q.data NULL: not */
    const float *ffn_norm, *ffn_norm_bias, *ffn_post_norm; /* [n_embd] as norm; NULL: none */
    const float *router_norm, *expert_norm;     /* [n_embd] beside a dense feed-forward: of what they read; NULL: ffn_norm */
    const float *dense_post_norm, *expert_post_norm; /* [n_embd] then: of what they say, before ffn_post_norm of the sum */
    const float *scale, *expert_scale;          /* [1] of the residual stream, [n_experts] of weights; NULL: none */
    struct ffn_weights dense;                   /* data NULL in a MoE layer without one beside */
    struct matrix router;                       /* [n_experts, n_embd] f32 */
    const float *router_logit_bias, *router_bias; /* [n_experts] for the logits, for the choice; NULL: none */
    const float *shared_router;                 /* [n_embd]; NULL: the shared expert is not gated */
    struct ffn_weights shared;                  /* data NULL: none */
    const struct ffn_weights *experts;          /* [n_experts] */
    const float *gate_bias, *up_bias, *down_bias; /* [n_experts or 1][rows]; NULL: none */
    bool ffn_reads_q8;                          /* some gate or up is q8: the layer's input must be quantised */
};

struct colibri_model {
    _Atomic int32_t references;
    _Atomic bool fetching;
    _Atomic uint64_t private_bytes;             /* of what is to be a private copy, those that are one by now */
    _Atomic bool streamed;                      /* routed experts are none of it */
    struct container container;
    struct config config;
    const struct kernels *kernels;
    colibri_model_info info;
    struct matrix embedding, output;            /* [n_vocab, n_embd], the same one if tied */
    const float *output_norm, *output_norm_bias; /* [n_embd] as norm */
    const float *encoder_norm, *encoder_norm_bias; /* the same, of what a source has become; NULL: no encoder */
    const float *encoder_attn_bias, *attn_bias; /* [n_heads][2 x attn_bias_span + 1]; NULL: none */
    const float *output_bias, *rope_inv_freq;   /* [n_vocab], NULL: none; [rope_sets x rope_dim / 2] */
    const float *attn_temperature;              /* [context_length / temperature_step + 1] what q is multiplied by, less 1 */
    const float *position_freq;                 /* [n_embd / 2]; NULL: no sinusoids */
    struct layer *layers;                       /* [n_layers] */
    bool down_reads_f32;                        /* some down is neither q8 nor q4 */
    struct ffn_weights *experts;                /* [n_experts] of all layers */
    int32_t n_experts;
    uint64_t files_before;                      /* resident bytes of files when it was opened: later ones may be its own */
};

/* Bytes that a copy takes: of the whole file, or without the routed experts. */
uint64_t weights_copied_bytes(const colibri_model *model, bool streamed);
