/* The arguments of gemm_kernel.cu and the faults that can be planted in it. */
#ifndef GEMM_KERNEL_H
#define GEMM_KERNEL_H
#include "../../src/backend/sm100/tensor_map.h"

enum gemm_fault {
    FAULT_NONE,
    FAULT_NO_INIT_FENCE,      /* mbarriers initialized without fence.mbarrier_init */
    FAULT_NO_INIT_BARRIER,    /* and used without a barrier in between */
    FAULT_NO_FULL_WAIT,       /* the mma does not wait for the data */
    FAULT_FULL_PARITY,        /* waits for the data with the wrong parity */
    FAULT_NO_EMPTY_WAIT,      /* the producer does not wait for a free stage */
    FAULT_EMPTY_PARITY,       /* waits for a free stage with the wrong parity */
    FAULT_EXPECT_MORE,        /* expect_tx 16 bytes too large */
    FAULT_EXPECT_LESS,        /* expect_tx 16 bytes too small */
    FAULT_NO_EXPECT,          /* a plain arrive instead of arrive.expect_tx */
    FAULT_SCALES_SWAPPED,     /* scale addresses of A and B exchanged in the mma */
    FAULT_NO_WARPX4,          /* scale factors copied without replication */
    FAULT_SCALE_STRIDE,       /* scale descriptor with the wrong stride */
    FAULT_SCALES_SINGLE,      /* one set of scale columns for all stages */
    FAULT_SCALE_ROWS_MISSING, /* the second 128 rows of B's scales are not copied */
    FAULT_NO_DEALLOC,
    FAULT_DEALLOC_EARLY,    /* before the epilogue has read everything */
    FAULT_ALLOC_COUNT,      /* 500 columns */
    FAULT_COLUMN_OFFSET,    /* mma and epilogue disagree about the first column */
    FAULT_QUADRANT,         /* epilogue warps use another warp's lanes */
    FAULT_QUADRANT_MISSING, /* no quadrant in the address at all */
    FAULT_NO_WAIT_LD,
    FAULT_NO_FENCE_AFTER,       /* before tcgen05.ld */
    FAULT_NO_FENCE_BEFORE,      /* after tcgen05.ld */
    FAULT_NO_TEMPTY_WAIT,       /* the mma does not wait for the epilogue */
    FAULT_NO_PROXY_FENCE,       /* before the TMA store of what st.shared wrote */
    FAULT_PROXY_FENCE_ONE_LANE, /* executed by the storing thread only */
    FAULT_NO_STORE_BARRIER,     /* no barrier between st.shared and the TMA store */
    FAULT_NO_STORE_WAIT,        /* staging reused while the store reads it */
    FAULT_NO_STORE_COMMIT,      /* no commit_group, so wait_group waits for nothing */
    FAULT_TEMPTY_COUNT,         /* initialized for one arrival too few */
    FAULT_ARRIVE_TWICE,         /* an epilogue warp arrives with all its lanes */
    FAULT_NO_COMMIT_FULL,       /* accumulator never announced */
    FAULT_NO_COMMIT_EMPTY,      /* stages never returned */
    FAULT_IDESC_TYPE,           /* E2M1 coded 5, as in kind::f8f6f4 */
    FAULT_IDESC_M,              /* M = 64 */
    FAULT_IDESC_N,              /* N not a multiple of 8 */
    FAULT_DESC_VERSION,         /* a Hopper descriptor */
    FAULT_DESC_STRIDE,          /* eight rows at 512 bytes in a 128-byte swizzle */
    FAULT_DESC_SWIZZLE,         /* the 64-byte swizzle for data in the 128-byte one */
    FAULT_STAGE_ALIGNMENT,      /* stages at odd multiples of 128 bytes */
    FAULT_STAGE_OVERLAP,        /* stages one kilobyte too close */
    FAULT_K_STEP,               /* descriptors advanced by 64 bytes */
    FAULT_ACCUMULATE_FIRST,     /* enable-input-d on the first step */
    FAULT_ACCUMULATE_NEVER,     /* never set */
    FAULT_NO_ELECT,             /* all lanes issue */
    FAULT_MIXED_GROUP,          /* cta_group 1 and 2 in one kernel */
    FAULT_DIVERGED,             /* half of a warp skips a warp-wide instruction */
    FAULT_NO_DRAIN,             /* the CTA ends while commits still signal it */
    FAULT_ONLY_1_CTA = 100,     /* from here on: cta_group 2 only */
    FAULT_NO_MULTICAST,         /* stages returned to the leader only */
    FAULT_PEER_BARRIER,         /* the peer's copies signal its own mbarrier */
    FAULT_EXPECT_ONE_CTA,       /* bytes of one CTA expected, two arrive */
    FAULT_LOCAL_ARRIVE,         /* the peer's epilogue arrives on its own mbarrier */
    FAULT_NO_CLUSTER_BARRIER,   /* the peer ends while the leader still uses it */
    FAULT_BOTH_ISSUE            /* both CTAs of the pair issue the mma */
};

struct gemm_args {
    struct sm100_tensor_map map_a, map_b, map_sfa, map_sfb, map_d;
    uint32_t n, k_tiles, tiles, fault; /* tiles per cluster; K is 256 * k_tiles */
};
#ifdef MEGAMOE_SM100_MODEL
extern "C" void gemm_kernel_1(const struct gemm_args &args);
extern "C" void gemm_kernel_2(const struct gemm_args &args);
#endif
#endif
