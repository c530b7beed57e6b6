/* The machine's limits as this backend meets them: streaming reads, and its own tile loop fed from L2. */
#ifndef MM_CPU_MEASURE_H
#define MM_CPU_MEASURE_H

#include "backend/cpu/kernels.h"

/* Takes about a second. matrix_tflop_s is 0 if the level has no tile loop. */
megamoe_status mm_cpu_measure(const mm_kernels *kernels, uint32_t threads, double *read_gb_s, double *matrix_tflop_s);

#endif
