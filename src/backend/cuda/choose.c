/* The table of images and GPUs, and the sentences when none fits. */
#include "backend/cuda/choose.h"

#include <string.h>

#include "error.h"

#define DRIVER_NEEDED 13000 /* images of CUDA 13 */
#define SHARED_NEEDED 98304 /* two buffers of the portable tile kernel; sm_120 has 101,376 */

static const struct {
    int major, minor_first, minor_last;
    const char *image;
} families[] = {
    {9, 0, 0, "sm_90a"},   /* wgmma, setmaxnreg: 9.0 alone */
    {10, 0, 3, "sm_100f"}, /* the family of 10.0 and 10.3 */
    {12, 0, 1, "sm_120f"}, /* the family of 12.0 and 12.1 */
};

static bool is_built(const char *built, const char *image) {
    const char *at = strstr(built, image);
    return at && (at == built || at[-1] == ',') && (at[strlen(image)] == ',' || at[strlen(image)] == '\0');
}

megamoe_status mm_gpu_choose(const mm_gpu *gpu, const char *built, bool native, const char **image) {
    const char *found = NULL;
    if (gpu->driver_version < DRIVER_NEEDED)
        return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE,
                       "the driver supports CUDA %d.%d, but the images are built for CUDA 13.0: install driver 580 or "
                       "later, or use --backend cpu",
                       gpu->driver_version / 1000, gpu->driver_version % 1000 / 10);
    if (gpu->ordinal >= (uint32_t)(gpu->count > 0 ? gpu->count : 0))
        return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE, "there is no GPU %u: this machine has %d", gpu->ordinal, gpu->count);
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (gpu->major == families[i].major && gpu->minor >= families[i].minor_first &&
            gpu->minor <= families[i].minor_last)
            found = families[i].image;
    if (native && (!found || strcmp(found, "sm_90a") != 0))
        return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE,
                       "it needs compute capability 9.0, and GPU %u (%s) has %d.%d: use --backend cuda-portable",
                       gpu->ordinal, gpu->name, gpu->major, gpu->minor);
    if (!found || !is_built(built, found))
        return mm_fail(
            MEGAMOE_UNSUPPORTED_DEVICE,
            "GPU %u (%s) has compute capability %d.%d, %s%s; this build has images for %s: use --backend cpu",
            gpu->ordinal, gpu->name, gpu->major, gpu->minor, found ? "which needs image " : "which has no image",
            found ? found : "", built);
    if (gpu->shared_bytes < SHARED_NEEDED)
        return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE, "GPU %u (%s) gives a block %d bytes of shared memory; %d are needed",
                       gpu->ordinal, gpu->name, gpu->shared_bytes, SHARED_NEEDED);
    *image = found;
    return MEGAMOE_OK;
}
