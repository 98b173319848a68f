/* forward.h: the layer loop over one chunk of rows. */
#pragma once

#include "chunk.h"

/* Evaluates the chunk's rows, whose cache positions are reserved, and writes the logits that are wanted; or, where they are
 * one whole source, what later layers attend to, into the cache. COLIBRI_ERROR_CANCELLED comes without a text. */
int32_t forward(struct chunk *chunk, bool source, colibri_error *error);
