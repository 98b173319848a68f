/* ffn.h: feed-forward of a layer, dense or mixture of experts: the same work list of (weights, rows) groups. */
#pragma once

#include "chunk.h"

/* said = ffn(h), the dense one of the layer. */
int32_t ffn_dense(struct chunk *chunk, colibri_error *error);
/* The same of the weighted outputs of the experts that router_layer chose, plus the shared expert. */
int32_t ffn_experts(struct chunk *chunk, colibri_error *error);
