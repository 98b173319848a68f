/* delta.h: gated delta networks, between the norm and the output product of a layer. */
#pragma once

#include "chunk.h"

/* From h: what heads with a state give, into delta_out.f32; states of the chunk's sequences go on by its rows. */
void delta_layer(struct chunk *chunk);
