/* router.h: which experts a row goes to, and with what weights (Shazeer et al., arXiv:1701.06538). */
#pragma once

#include "chunk.h"

/* From h: router logits, the chosen experts and weights of every row, then rows grouped by expert into chunk->groups. */
void router_layer(struct chunk *chunk);
