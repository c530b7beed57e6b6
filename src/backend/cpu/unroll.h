/* MM_UNROLL before a loop over a tile: its trip count is a constant, and the tile must stay in registers. */
#ifndef MM_CPU_UNROLL_H
#define MM_CPU_UNROLL_H

#if defined(__clang__)
#    define MM_UNROLL _Pragma("unroll")
#else
#    define MM_UNROLL _Pragma("GCC unroll 16")
#endif

/* Keeps a loaded vector in its register: compilers load anew for each use, and loads are what binds. */
#define MM_KEEP(vector) __asm__("" : "+v"(vector))

/* A function whose constant arguments become a kernel of its own. */
#define MM_TEMPLATE static inline __attribute__((always_inline))

#endif
