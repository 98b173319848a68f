/* quantize_q4.h: packs one super-group of q4 or q6. */
#ifndef COLIBRI_QUANTIZE_Q4_H
#define COLIBRI_QUANTIZE_Q4_H

#include <stdint.h>

enum { Q4_SUPER_COLS = 256 };

/* 4 rows, lane to lane + 3, of tile [cols][16], cols from 1 to 256. importance [cols]: what a column's errors count.
 * quants: the panel's bytes of the first group (256 each); record: the super-group's 256 bytes of scales.
 * Of q6: 384 and 288 bytes. */
void quantize_q4(const float *tile, int cols, const float *importance, int lane, uint8_t *quants, uint8_t *record);
void quantize_q6(const float *tile, int cols, const float *importance, int lane, uint8_t *quants, uint8_t *record);

#endif
