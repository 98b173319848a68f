/* latent.h: multi-head latent attention, before and after the attention itself. */
#pragma once

#include "chunk.h"

/* From h: queries into q, the latents of keys and values into the cache. */
void latent_queries(struct chunk *chunk);
/* From what the heads attended to, in q: their values into `attended`. */
void latent_values(struct chunk *chunk);
