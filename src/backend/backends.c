/* Which backend runs: by name, by the environment, or the best that this machine can run. */
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "backend/plugin.h"
#include "error.h"

/* Best first: AUTO takes the first GPU path whose probe succeeds, else cpu. The reference is never chosen for
 * anybody. */
static const mm_backend *const backends[] = {
#ifdef MEGAMOE_HAVE_CUDA
    &mm_backend_sm100, &mm_backend_sm90,      &mm_backend_cuda_portable,
#endif
    &mm_backend_cpu,   &mm_backend_reference,
};

static const size_t backend_count = sizeof backends / sizeof *backends;

static const char *name_of(megamoe_backend id) {
    switch (id) {
    case MEGAMOE_BACKEND_AUTO: return "auto";
    case MEGAMOE_REFERENCE: return "reference";
    case MEGAMOE_CPU: return "cpu";
    case MEGAMOE_CUDA: return "cuda";
    case MEGAMOE_CUDA_PORTABLE: return "cuda-portable";
    case MEGAMOE_SM90: return "sm90";
    case MEGAMOE_SM100: return "sm100";
    case MEGAMOE_SM100_ON_MODEL: return "sm100-model";
    }
    return NULL;
}

/* MEGAMOE_BACKEND replaces AUTO, and only AUTO. */
static megamoe_status apply_environment(megamoe_backend *id) {
    const char *wanted = getenv("MEGAMOE_BACKEND");
    if (*id != MEGAMOE_BACKEND_AUTO || !wanted || !*wanted) return MEGAMOE_OK;
    for (megamoe_backend i = MEGAMOE_BACKEND_AUTO; i <= MEGAMOE_SM100_ON_MODEL; i++)
        if (strcmp(wanted, name_of(i)) == 0) {
            *id = i;
            return MEGAMOE_OK;
        }
    return mm_fail(
        MEGAMOE_INVALID_ARGUMENT,
        "MEGAMOE_BACKEND is '%s'; it can be auto, reference, cpu, cuda, cuda-portable, sm90, sm100 or sm100-model",
        wanted);
}

/* The first backend of GPU memory that can run here. */
static megamoe_status find_gpu(uint32_t ordinal, const mm_backend **backend) {
    megamoe_status status = mm_fail(MEGAMOE_UNSUPPORTED_DEVICE, "this megamoe was built without CUDA: build it with "
                                                                "nvcc 13 or later, or use --backend cpu");
    for (size_t i = 0; i < backend_count; i++) {
        if (backends[i]->host_memory) continue;
        status = backends[i]->probe(ordinal);
        if (status != MEGAMOE_OK) continue;
        *backend = backends[i];
        return MEGAMOE_OK;
    }
    return status;
}

megamoe_status mm_backend_find(megamoe_backend id, uint32_t ordinal, const mm_backend **backend) {
    MM_TRY(apply_environment(&id));
    if (!name_of(id)) return mm_fail(MEGAMOE_INVALID_ARGUMENT, "there is no backend %d", (int)id);
    if (id == MEGAMOE_CUDA) return find_gpu(ordinal, backend);
    if (id == MEGAMOE_BACKEND_AUTO) {
        if (find_gpu(ordinal, backend) == MEGAMOE_OK) return MEGAMOE_OK;
        id = MEGAMOE_CPU;
    }
    if (id == MEGAMOE_SM100_ON_MODEL) return mm_plugin_load("megamoe-sm100-model.so", backend);
    for (size_t i = 0; i < backend_count; i++) {
        if (backends[i]->id != id) continue;
        MM_TRY(backends[i]->probe(ordinal));
        *backend = backends[i];
        return MEGAMOE_OK;
    }
    return mm_fail(MEGAMOE_UNSUPPORTED_DEVICE, "this megamoe was built without the %s backend", name_of(id));
}
