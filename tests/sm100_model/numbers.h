/* The small formats as the model understands them, written from their definitions: E2M1, E4M3 (unsigned as a scale),
 * FP16, BF16. Shares nothing with src/numerics, so that one can judge the other. */
#ifndef SM100_MODEL_NUMBERS_H
#define SM100_MODEL_NUMBERS_H

#include <stdint.h>

float e2m1_decode(uint32_t code);  // the low four bits
float e4m3_decode(uint32_t code);  // eight bits, sign included; 0x7F and 0xFF are NaN
uint32_t e2m1_encode(float value); // nearest, ties to even, saturating; NaN gives +6
uint32_t e4m3_encode(float value); // nearest, ties to even, saturating; NaN gives 0x7F
uint32_t bf16_encode(float value); // nearest, ties to even; NaN gives 0x7FFF
uint32_t fp16_encode(float value); // nearest, ties to even; NaN gives 0x7FFF
float fp16_decode(uint32_t code);

#endif
