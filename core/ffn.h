/* ffn.h: feed-forward of a layer, dense or mixture of experts: the same work list of (weights, rows) groups. */
#pragma once

#include "chunk.h"

/* x += ffn(h), the dense one of the layer; where norms follow (post_norm) it goes into h instead. */
void ffn_dense(struct chunk *chunk);
/* The same of the weighted outputs of the experts that router_layer chose, plus the shared expert. */
void ffn_experts(struct chunk *chunk);
