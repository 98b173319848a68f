/* layer.h: what a layer is made of: what mixes positions (attention.c, of it latent.c and delta.c) and the feed-forward
 * (router.c, ffn.c). Who may call whom is in tools/check_layers.py. */
#pragma once

#include "chunk.h"

/* x += attention(norm(x)), or what else mixes positions in the layer; keys and values of the rows go to the cache, whose
 * positions are reserved. Behind an encoder also x += attention(norm(x)) to the source. */
void attention_layer(struct chunk *chunk);
/* Keys and values of the source's rows h, for the attention of a later layer to them, go to the cache. */
void attention_source(struct chunk *chunk);
/* Multi-head latent attention, before it attends. From h: queries into q, the latents of keys and values into the cache. */
void latent_queries(struct chunk *chunk);
/* And after. From what the heads attended to, in q: their values into `attended`. */
void latent_values(struct chunk *chunk);
/* Gated delta networks, between the norm and the output product of a layer. From h: what heads with a state give, into
 * delta_out.f32; states of the chunk's sequences go on by its rows. */
void delta_layer(struct chunk *chunk);
/* Which experts a row goes to, and with what weights (Shazeer et al., arXiv:1701.06538). From h: router logits, the chosen
 * experts and weights of every row, then rows grouped by expert into chunk->groups. */
void router_layer(struct chunk *chunk);
/* Asks the next layer's router before its time: what would it choose for the rows x as they are? Into `experts` and n_next, by
 * way of `said`; nothing where nobody wants to know. */
void router_ahead(struct chunk *chunk);
/* Appended to the recording, if there is one: what the layer's router chose, then the visits of its experts, and behind the last
 * layer the chunk's rows. */
void record_choices(const struct chunk *chunk);
void record_visits(const struct chunk *chunk);
void record_rows(const struct chunk *chunk, bool source);
/* said = ffn(h), the dense one of the layer. */
int32_t ffn_dense(struct chunk *chunk, colibri_error *error);
/* The same of the weighted outputs of the experts that router_layer chose, plus the shared expert. */
int32_t ffn_experts(struct chunk *chunk, colibri_error *error);
