/* What the GPU benchmarks share: graphs, which the library itself does not make, and the end of a run that failed. */
#ifndef CUDA_GRAPH_H
#define CUDA_GRAPH_H

#include <dlfcn.h>

#include "backend/cuda/state.h"
#include "error.h"

static CUresult (*begin_capture)(CUstream, CUstreamCaptureMode);
static CUresult (*end_capture)(CUstream, CUgraph *);
static CUresult (*instantiate)(CUgraphExec *, CUgraph, unsigned long long);
static CUresult (*graph_launch)(CUgraphExec, CUstream);

static inline void find_graphs(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    *(void **)&begin_capture = dlsym(cuda, "cuStreamBeginCapture_v2");
    *(void **)&end_capture = dlsym(cuda, "cuStreamEndCapture");
    *(void **)&instantiate = dlsym(cuda, "cuGraphInstantiateWithFlags");
    *(void **)&graph_launch = dlsym(cuda, "cuGraphLaunch");
}

static inline void die(const char *what) {
    fprintf(stderr, "%s: %s\n", what, megamoe_error_message());
    exit(1);
}

static inline void check(CUresult r, const char *what) {
    if (r == CUDA_SUCCESS) return;
    fprintf(stderr, "%s: CUresult %d\n", what, (int)r);
    exit(1);
}

/* Device memory with a copy of host, or with whatever lies there if host is NULL. */
static inline void *to_gpu(const mm_backend_state *state, const void *host, size_t bytes) {
    CUdeviceptr p;
    check(state->driver->memory_allocate(&p, bytes + 256), "memory");
    if (host) check(state->driver->copy_to_device(p, host, bytes, state->stream), "copy");
    check(state->driver->stream_wait(state->stream), "copy");
    return (void *)(uintptr_t)p;
}

static inline int ascending(const void *a, const void *b) {
    return (*(const float *)a > *(const float *)b) - (*(const float *)a < *(const float *)b);
}

#endif
