/* Small misuses, one per case of trap_kernel.cu, and a few right uses beside them. */
#ifndef TRAP_KERNEL_H
#define TRAP_KERNEL_H
#include "../../src/backend/sm100/tensor_map.h"

enum trap_case {
    TRAP_ALLOC_GROWS,
    TRAP_ALLOC_AFTER_RELINQUISH,
    TRAP_DEALLOC_OTHER_COUNT,
    TRAP_ALLOC_TOO_MUCH,
    TRAP_ALLOC_HALF_WARP,
    TRAP_LD_NOT_UNIFORM,
    TRAP_LD_NOT_ALLOCATED,
    TRAP_ST_WITHOUT_WAIT,
    TRAP_GROUP_2_ALONE,
    TRAP_PAIR_ALLOC_DIFFERS,
    TRAP_INIT_TWICE,
    TRAP_NOT_INITIALIZED,
    TRAP_BARRIER_OVERWRITTEN,
    TRAP_PARITY,
    TRAP_TX_LEFT,
    TRAP_BAR_COUNT,
    TRAP_TMA_ALIGNMENT,
    TRAP_TMA_START,
    TRAP_TMA_STORE_NEGATIVE,
    TRAP_TMA_MAP_COPIED,
    TRAP_TMA_RANK,
    TRAP_TMA_IN_FLIGHT,
    TRAP_MULTICAST_MASK,
    TRAP_BULK_SIZE,
    TRAP_BULK_NO_FENCE,
    TRAP_NC_OF_WRITTEN,
    TRAP_READ_ONLY,
    TRAP_GLOBAL_BOUNDS,
    TRAP_GLOBAL_ALIGNMENT,
    TRAP_SHARED_BOUNDS,
    TRAP_SHARED_UNWRITTEN,
    TRAP_SHARED_RACE,
    TRAP_REMOTE_FORM,
    TRAP_MAPA_RANK,
    TRAP_ENDED_CTA,
    TRAP_CLUSTER_WAIT,
    TRAP_SHFL_OUTSIDE,
    TRAP_DIVERGED,
    TRAP_EXITED_LANE,
    TRAP_REGISTERS,
    TRAP_TRAP,
    TRAP_ENDLESS,
    TRAP_SLEEPING_LOOP,
    TRAP_SCALE_SIGN,
    TRAP_RESERVED_BITS,
    RIGHT_ST_LD,
    RIGHT_GATHER4,
    RIGHT_SUB_WORDS,
    RIGHT_SPLIT_BARRIERS,
    RIGHT_SLEEPING_LOOP
};

struct trap_args {
    struct sm100_tensor_map map, map_row; /* 64 rows of 128 bytes; boxes of 8 rows and of one */
    uint8_t *memory, *read_only;
    uint32_t *flag;
    uint32_t kind;
};
#ifdef MEGAMOE_SM100_MODEL
extern "C" void trap_kernel(const struct trap_args &args);
#endif
#endif
