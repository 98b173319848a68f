/* rope.h: cos and sin of rotary positions (RoFormer, arXiv:2104.09864), the same bits on every machine. */
#pragma once

#include <stdint.h>

/* cosine, sine [n]: of the angle position x inv_freq[i], times scale. */
void rope_table(const float *inv_freq, int32_t n, int32_t position, float scale, float *cosine, float *sine);
