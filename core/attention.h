/* attention.h: what mixes positions: grouped-query attention with RoPE over the KV cache, or the delta rule. */
#ifndef COLIBRI_ATTENTION_H
#define COLIBRI_ATTENTION_H

#include "chunk.h"

/* cos and sin of the chunk's rows, used by every layer. */
void attention_positions(const struct chunk *chunk);
/* x += attention(norm(x)), or what else mixes positions in the layer; keys and values of the rows go to the cache, whose
 * positions are reserved. */
void attention_layer(struct chunk *chunk, int32_t layer);
#endif
