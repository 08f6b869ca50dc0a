// The row kernels for AVX-512 (F, BW, VL, DQ).
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>
#include <limits>

#include "cpu/rows.h"

// GCC 12's own intrinsics start from an undefined register on purpose.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#define LQ_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#define LQ_KERNELS kAvx512Kernels
#define LQ_PRODUCT 1
#define LQ_F16C 512
#define LQ_INLINE_LAMBDA __attribute__((always_inline))
#include "cpu/rows.inc"
#endif
