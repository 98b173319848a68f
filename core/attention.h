/* attention.h: what mixes positions: grouped-query attention over the KV cache, to what came before or to a source, or the
 * delta rule. */
#pragma once

#include "chunk.h"

/* x += attention(norm(x)), or what else mixes positions in the layer; keys and values of the rows go to the cache, whose
 * positions are reserved. Behind an encoder also x += attention(norm(x)) to the source. */
void attention_layer(struct chunk *chunk);
/* Keys and values of the source's rows h, for the attention of a later layer to them, go to the cache. */
void attention_source(struct chunk *chunk);
