/* Which image runs on which GPU. Pure, so that tests can ask about GPUs that are not there. */
#ifndef MM_CUDA_CHOOSE_H
#define MM_CUDA_CHOOSE_H

#include "megamoe/megamoe.h"

/* What was found on this machine. */
typedef struct mm_gpu {
    int driver_version; /* as cuDriverGetVersion gives it: 13000 */
    int count;          /* of GPUs */
    uint32_t ordinal;
    char name[96];
    int major, minor; /* compute capability */
    int shared_bytes; /* the most one block can have */
    int sm_count;
} mm_gpu;

/* Images in this build, comma-separated: "sm_90a,sm_100f,sm_120f". */
extern const char *const mm_cuda_images_built;

/*
 * The image for a GPU among `built`. Never "at least": an image runs on its own family alone. native: the wgmma kernels
 * of sm_90a are asked for. UNSUPPORTED_DEVICE with what was found, what is built in and what can be done.
 */
megamoe_status mm_gpu_choose(const mm_gpu *gpu, const char *built, bool native, const char **image);

#endif
