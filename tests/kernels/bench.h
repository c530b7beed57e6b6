/* Times a layer of the V4-Pro rank shape (48 experts, H 7168, I 3072, 6 distinct experts per token). */
#ifndef TEST_BENCH_H
#define TEST_BENCH_H

/*
 * arguments: [experts=48] [rounds=7] [threads=0] [mode=bf16|nvfp4] [shared=0|1] token counts...
 * Rounds go through all token counts, so that every row sees the same noise; prints medians and the quartile
 * spread.
 */
int bench_layer(int argument_count, char **arguments);

#endif
