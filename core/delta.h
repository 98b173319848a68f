/* delta.h: a layer with a recurrent state in place of attention. */
#ifndef COLIBRI_DELTA_H
#define COLIBRI_DELTA_H

#include "chunk.h"

/* From h: what the layer's heads give into delta_out.f32; states of the chunk's sequences go on by its rows. */
void delta_layer(struct chunk *chunk, int32_t layer);

#endif
